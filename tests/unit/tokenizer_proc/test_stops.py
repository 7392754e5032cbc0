"""Which stop string matches, and what text is held back meanwhile."""

import pytest

from tokenizer_proc.stops import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None, str]:
    matcher = StopMatcher(stops)
    out, matched = [], None
    for piece in pieces:
        text, matched = matcher.push(piece)
        out.append(text)
        if matched is not None:
            break
    return out, matched, matcher.finish()


def test_without_stops_all_text_passes_at_once() -> None:
    assert run((), ["ab", "", "c"]) == (["ab", "", "c"], None, "")


def test_the_text_ends_before_the_stop_string() -> None:
    assert run(("END",), ["one END two"]) == (["one "], "END", "")


def test_a_stop_string_over_several_pieces_is_held_back_until_it_completes() -> None:
    assert run(("\n\nUser:",), ["hi\n", "\nUs", "er: x"]) == (["hi", "", ""], "\n\nUser:", "")


def test_held_text_is_released_once_it_can_no_longer_match() -> None:
    assert run(("abc",), ["xab", "d"]) == (["x", "abd"], None, "")


def test_only_the_part_that_may_still_match_stays_held() -> None:
    assert run(("aab",), ["aa", "a", "a", "b!"]) == (["", "a", "a", ""], "aab", "")


def test_text_still_held_at_the_end_is_released_by_finish() -> None:
    assert run(("abc",), ["xab"]) == (["x"], None, "ab")


def test_the_stop_completed_first_wins_even_if_another_started_earlier() -> None:
    assert run(("abcd", "bc"), ["xabcd"]) == (["xa"], "bc", "")


def test_of_stops_completed_by_the_same_character_the_longest_wins() -> None:
    assert run(("c", "abc", "bc"), ["xabc"]) == (["x"], "abc", "")


def test_a_stop_that_is_a_prefix_of_another_ends_the_text_at_once() -> None:
    assert run(("ab", "abc"), ["xabc"]) == (["x"], "ab", "")


def test_after_a_match_nothing_is_taken_in() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("ax") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))
