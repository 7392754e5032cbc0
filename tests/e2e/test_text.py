"""Text that is hard to cut, through the whole server: the worker echoes ids of our choice."""

import asyncio
import random
import unicodedata
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from runtime.client import AsyncClient
from runtime.messages import Chunk
from runtime.sampling import SamplingParams
from runtime.server import Server
from tests import fakes
from tests import small_tokenizers as small

TEXTS = [
    "👨‍👩‍👧‍👦 family, 👩🏽‍🚀 astronaut, 🏳️‍🌈 flag, 🇫🇷🇯🇵",
    "한국어 각각 값싼 훑다",
    "ภาษาไทย กำลัง น้ำ",
    "हिन्दी क्ष त्र ज्ञ",
    " a space before, and two  within",
    "\n\n\ttabs and lines\r\n",
    "e\u0301 and \ufffd, which is itself",
    "日本語のテキスト ☃ café naïve",
]
MARK = "\ufffd"


@pytest.fixture(scope="module", params=["byte-level", "byte-level, Qwen", "SentencePiece"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    """A server for each way in which tokens become text."""
    options: dict[str, Any] = {}
    vocab_size = 49152
    if request.param == "byte-level, Qwen":
        options, vocab_size = {"model": "Qwen3-0.6B", "load_format": "dummy"}, 151936
    elif request.param == "SentencePiece":
        folder = tmp_path_factory.mktemp("tokenizer")
        backend = small.llama_style()
        backend.save(str(folder / "tokenizer.json"))
        options, vocab_size = {"tokenizer": str(folder)}, backend.get_vocab_size() + 20
    worker = ("--answers", "echo", "--vocab-size", str(vocab_size))
    with fakes.simulated_server(*worker, **options) as server:
        yield server


def run(server: Server, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    async def connected() -> Any:
        async with await AsyncClient.connect(server.endpoint) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(connected(), 120))


def echo(num_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **others)


async def streamed(client: AsyncClient, ids: list[int], sampling: SamplingParams) -> list[Chunk]:
    return [chunk async for chunk in await client.generate(ids, sampling, stream=True)]


async def check(client: AsyncClient, ids: list[int], skip: bool) -> None:
    """The output `ids`, streamed and whole, is the text of these ids and no other."""
    sampling = echo(len(ids), skip_special_tokens=skip)
    text = await client.detokenize(ids, skip_special_tokens=skip)
    chunks = await streamed(client, ids, sampling)
    assert [i for chunk in chunks for i in chunk.token_ids.tolist()] == ids
    deltas = [chunk.text for chunk in chunks]
    assert "".join(deltas) == text
    assert sum(delta.count(MARK) for delta in deltas) == text.count(MARK)
    whole = await client.generate(ids, sampling)
    assert (whole.text, whole.token_ids) == (text, ids)


def test_hard_texts_whole_and_cut_at_every_token(server: Server) -> None:
    async def cut_everywhere(client: AsyncClient) -> None:
        for text in TEXTS:
            ids = await client.tokenize(text)
            await asyncio.gather(*(check(client, ids[:n], True) for n in range(1, len(ids) + 1)))

    run(server, cut_everywhere)


def test_a_text_without_broken_characters_shows_none_on_the_way(server: Server) -> None:
    async def stream(client: AsyncClient) -> None:
        for text in TEXTS:
            ids = await client.tokenize(text, add_special_tokens=False)
            chunks = await streamed(client, ids, echo(len(ids)))
            whole = "".join(chunk.text for chunk in chunks)
            assert unicodedata.normalize("NFC", whole) == unicodedata.normalize("NFC", text)

    run(server, stream)


def test_ids_at_random_over_the_whole_vocabulary(server: Server) -> None:
    """All at once: what one request's bytes are is nothing to the others."""

    async def random_ids(client: AsyncClient) -> None:
        assert client.server is not None
        rng, limit = random.Random(0), client.server.vocab_size
        samples = [rng.choices(range(limit), k=rng.randint(1, 60)) for _ in range(60)]
        # Low ids are single bytes and special tokens, where the trouble is.
        samples += [rng.choices(range(min(limit, 300)), k=rng.randint(1, 60)) for _ in range(60)]
        await asyncio.gather(*(check(client, ids, n % 2 == 0) for n, ids in enumerate(samples)))

    run(server, random_ids)


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    async def round_trip(client: AsyncClient) -> None:
        for text in TEXTS:
            back = await client.detokenize(await client.tokenize(text))
            assert back in (text, unicodedata.normalize("NFC", text))
            ids = await client.tokenize(back, add_special_tokens=False)
            assert await client.tokenize(text, add_special_tokens=False) == ids

    run(server, round_trip)


# ---- stop strings -----------------------------------------------------------------------------

STOPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "across tokens": ("alpha beta gamma delta", ("ta gam",)),
    "a whole token": ("alpha beta gamma", (" beta",)),
    "inside a cluster": ("see 👨‍👩‍👧‍👦 here", ("👩",)),
    "the joiner of a cluster": ("see 👨‍👩‍👧‍👦 here", ("\u200d👧",)),
    "inside a syllable block": ("한국어 값싼", ("어 값",)),
    "a combining mark": ("n น้ำ ok", ("\u0e49",)),
    "overlapping itself": ("x aaab y", ("aab",)),
    "overlapping another": ("one two three four", ("two three four", "o thr")),
    "one the end of another": ("one two three", ("e two", "two")),
    "one the start of another": ("one two three", ("two three", "two")),
    "the first character": ("one two three", ("o",)),
    "the mark itself": ("one \ufffd two", (MARK,)),
}


def naive(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str, int] | None:
    """(text, stop, tokens taken) where the text of `pieces` first completes a stop."""
    text = "".join(pieces)
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            lengths = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
            num_tokens = next(n for n, length in enumerate(lengths, 1) if length >= end)
            return text[: end - len(longest)], longest, num_tokens
    return None


async def pieces_of(client: AsyncClient, ids: list[int]) -> list[str]:
    """The text that each token adds."""
    pieces = [""] * len(ids)
    for chunk in await streamed(client, ids, echo(len(ids))):
        # It may stand for several tokens: its text came with the last of them.
        pieces[chunk.offset + len(chunk.token_ids) - 1] += chunk.text
    return pieces


@pytest.mark.parametrize("name", STOPS)
def test_text_ids_and_usage_end_with_the_stop_string(server: Server, name: str) -> None:
    text, stops = STOPS[name]

    async def stop(client: AsyncClient) -> None:
        ids = await client.tokenize(text, add_special_tokens=False)
        expected = naive(await pieces_of(client, ids), stops)
        assert expected is not None
        kept, matched, num_tokens = expected
        for max_tokens in (len(ids), num_tokens):  # the second: the stop is in the last token
            sampling = echo(max_tokens, stop=stops)
            whole = await client.generate(ids, sampling)
            assert (whole.text, whole.matched_stop) == (kept, matched)
            assert whole.token_ids == ids[:num_tokens]
            assert whole.finish_reason == "stop"
            chunks = await streamed(client, ids, sampling)
            assert "".join(chunk.text for chunk in chunks) == kept
            assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens

    run(server, stop)


def test_stop_strings_at_random_in_outputs_at_random(server: Server) -> None:
    async def one(client: AsyncClient, rng: random.Random) -> None:
        assert client.server is not None
        limit = min(client.server.vocab_size, rng.choice([300, 200_000]))
        ids = rng.choices(range(limit), k=rng.randint(1, 30))
        pieces = await pieces_of(client, ids)
        text = "".join(pieces)
        cuts = [rng.randrange(len(text)) for _ in range(3)] if text else []
        stops = (*(text[at : at + rng.randint(1, 6)] for at in cuts), "never ☃")
        done = await client.generate(ids, echo(len(ids), stop=stops))
        kept, matched, num_tokens = naive(pieces, stops) or (text, None, len(ids))
        assert (done.text, done.matched_stop) == (kept, matched)
        assert done.token_ids == ids[:num_tokens]

    async def many(client: AsyncClient) -> None:
        await asyncio.gather(*(one(client, random.Random(seed)) for seed in range(100)))

    run(server, many)


def test_near_misses_are_released_at_the_end(server: Server) -> None:
    async def miss(client: AsyncClient) -> None:
        ids = await client.tokenize("one two three", add_special_tokens=False)
        stops = ("three!", "two four", "thee", "👨‍👩‍👧‍👦")
        done = await client.generate(ids, echo(len(ids), stop=stops))
        chunks = await streamed(client, ids, echo(len(ids), stop=stops))
        assert done.text == "".join(c.text for c in chunks) == "one two three"
        assert done.finish_reason == chunks[-1].finish_reason == "length"
        assert done.matched_stop is None

    run(server, miss)


def test_a_half_character_at_the_end_may_complete_a_stop_string(server: Server) -> None:
    """It becomes text only once nothing follows."""

    async def half(client: AsyncClient) -> None:
        ids = await client.tokenize("ab 👨", add_special_tokens=False)
        text = await client.detokenize(ids[:-1])
        if MARK not in text:
            pytest.skip("this tokenizer has it in one token")
        for stream in (False, True):
            sampling = echo(len(ids) - 1, stop=(MARK,))
            if stream:
                chunks = await streamed(client, ids, sampling)
                kept, last = "".join(c.text for c in chunks), chunks[-1]
                assert (last.finish_reason, last.matched_stop) == ("stop", MARK)
            else:
                done = await client.generate(ids, sampling)
                kept = done.text
                assert (done.finish_reason, done.token_ids) == ("stop", ids[:-1])
            assert kept == text[: text.index(MARK)]

    run(server, half)
