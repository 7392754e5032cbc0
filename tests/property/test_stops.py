"""StopMatcher against a search of the whole text after each character."""

from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.stops import StopMatcher

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """(text before the first completed stop, that stop)."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=8))
def test_the_outcome_is_that_of_the_whole_text(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher, out, matched = StopMatcher(stops), "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            break
    assert (out + matcher.finish(), matched) == naive(stops, "".join(pieces))


@given(stops=STOPS, text=LETTERS)
def test_what_is_held_is_the_longest_suffix_that_begins_a_stop(
    stops: tuple[str, ...], text: str
) -> None:
    if naive(stops, text)[1] is not None:
        return
    released, _ = StopMatcher(stops).push(text)
    suffixes = [text[i:] for i in range(len(text) + 1)]
    held = next(s for s in suffixes if s == "" or any(stop.startswith(s) for stop in stops))
    assert released + held == text


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=8))
def test_a_match_is_told_by_the_piece_that_completes_it(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    for i, piece in enumerate(pieces):
        _, matched = matcher.push(piece)
        assert (matched is not None) == (naive(stops, "".join(pieces[: i + 1]))[1] is not None)
        if matched is not None:
            return
