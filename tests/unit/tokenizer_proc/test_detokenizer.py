"""Incremental decoding, piece by piece, on texts that are hard to cut."""

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from runtime.messages import FinishCode, Generate
from runtime.sampling import SamplingParams
from runtime.types import request_id
from tests import small_tokenizers as small
from tokenizer_proc.byte_level import PreTokenizer, byte_level
from tokenizer_proc.decoders import ByteFallback, LeadStrip, fallback_byte
from tokenizer_proc.detokenizer import byte_alphabet
from tokenizer_proc.requests import Credit, LiveRequest
from tokenizer_proc.stops import StopMatcher
from tokenizer_proc.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """Id = byte; <s> is 256."""
    backend = byte_level(byte_alphabet(), [], PreTokenizer())
    backend.add_tokens([AddedToken("<s>", special=True)])
    return small.wrap(backend)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = tokenizer.decoder(skip)
    return [*(decoder.push([i]) for i in ids), decoder.finish()]


def test_a_character_comes_with_its_last_byte(bytewise: Tokenizer) -> None:
    assert stream(bytewise, list("é☃".encode())) == ["", "é", "", "", "☃", ""]


def test_a_character_that_never_completes_shows_as_one_mark_at_the_end(bytewise: Tokenizer) -> None:
    assert stream(bytewise, list("a👨".encode())[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_broken_character_is_marked_when_the_next_byte_breaks_it(bytewise: Tokenizer) -> None:
    assert stream(bytewise, [0xE2, 0x98, 0x41]) == ["", "", "\ufffdA", ""]


@pytest.mark.parametrize(
    "text", ["👨‍👩‍👧‍👦 family", "한국어 각", "ภาษาไทย", " leading space", "\ufffd\n"]
)
def test_text_survives_whatever_its_script(bytewise: Tokenizer, text: str) -> None:
    pieces = stream(bytewise, list(text.encode()))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


def test_special_tokens_are_left_out_only_when_asked(bytewise: Tokenizer) -> None:
    assert "".join(stream(bytewise, [65, 256, 66])) == "AB"
    assert "".join(stream(bytewise, [65, 256, 66], skip=False)) == "A<s>B"


def test_a_special_token_left_out_does_not_cut_a_character(bytewise: Tokenizer) -> None:
    assert stream(bytewise, [0xC3, 256, 0xA9]) == ["", "", "é", ""]


def test_ids_past_the_vocabulary_are_nothing(bytewise: Tokenizer) -> None:
    ids = [65, 257, 151_935, 2**32, -1, 66]
    assert "".join(stream(bytewise, ids)) == bytewise.decode(ids) == "AB"


def test_ids_may_come_as_an_array(bytewise: Tokenizer) -> None:
    ids = np.array([72, 105], dtype=np.int32)
    assert bytewise.decoder().push(ids) == bytewise.decode(ids) == "Hi"


def test_token_bytes_are_those_before_utf8(bytewise: Tokenizer) -> None:
    assert bytewise.token_bytes(0xE2) == b"\xe2"
    assert bytewise.token_bytes(999) is None


def test_a_run_of_byte_tokens_is_certain_when_it_ends() -> None:
    stage = ByteFallback()
    assert stage.push(["<0xE2>", "<0x98>", "<0x83>"]) == []
    assert stage.push(["x"]) == ["☃", "x"]


def test_a_broken_run_of_byte_tokens_is_one_mark_for_each_byte() -> None:
    stage = ByteFallback()
    assert stage.push(["<0x41>", "<0xE2>"]) == []
    assert stage.push(["<0x41>"]) == ["\ufffd"] * 3
    assert stage.push(["<0x42>"]) == ["\ufffd"]
    assert stage.push(["y", "<0x42>"]) == ["y"]
    assert stage.finish() == ["B"]


@pytest.mark.parametrize(
    ("token", "byte"), [("<0x0a>", 10), ("<0x+F>", 15), ("<0xé>", None), ("<0x1G>", None)]
)
def test_byte_tokens_are_read_as_the_library_reads_them(token: str, byte: int | None) -> None:
    assert fallback_byte(token) == byte


def test_leading_spaces_are_stripped_across_pieces() -> None:
    stage = LeadStrip(" ", 2)
    assert [stage.push([piece]) for piece in ("", " ", "  a", " b")] == [[""], [""], [" a"], [" b"]]


def test_llama_text_loses_its_prefix_space_and_no_other() -> None:
    tokenizer = small.wrap(small.llama_style())
    text = "  two spaces ☃ and 한 dogs"
    pieces = stream(tokenizer, tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert pieces[-1] == ""


def test_a_long_text_lets_other_threads_run() -> None:
    """The library's call for one text keeps the interpreter, and everybody waited all the same."""
    tokenizer = small.wrap(small.llama_style())
    text = "the quick brown fox and the lazy dog " * 20_000
    ids = tokenizer.encode(text)
    results: list[Any] = []
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids)):
        thread = threading.Thread(target=lambda work=work: results.append(work()))  # type: ignore[misc]
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
            thread.join(0.0005)
        assert turns > 3
    assert results[0].tolist() == ids.tolist()
    assert results[1] == text


def calls_of(work: Callable[[], object]) -> int:
    """How many functions `work` calls, the library's included.

    The garbage collector stands still: a collection calls what hypothesis times it with, which
    counted as work when one fell due here.
    """
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("make", [small.llama_style, small.unigram, "bytewise"])
def test_a_tokens_work_does_not_grow_with_the_text_before_it(
    make: Any, bytewise: Tokenizer
) -> None:
    tokenizer = bytewise if make == "bytewise" else small.wrap(make())
    decoder, stops = tokenizer.decoder(), StopMatcher(("dog and", "doggy"))
    ids = tokenizer.encode("the dog ☃ and the dogs ", add_special_tokens=False).tolist()

    def once() -> None:
        for token in ids:
            stops.push(decoder.push([token]))

    once()  # what is looked up once is known from here on
    first = calls_of(once)
    for _ in range(300):
        once()
    assert calls_of(once) == first


def test_tokens_without_text_leave_nothing_to_go_through(bytewise: Tokenizer) -> None:
    """Every one left an empty piece, and each token looked at all of them."""
    live = LiveRequest(
        id=request_id(0, 0), client=b"a", prompt_ids=np.array([65], np.int32), stops=None,
        decoder=bytewise.decoder(), credit=Credit(64),
        generate=Generate(
            request=0, text=None, token_ids=None, chat=None, sampling=SamplingParams(),
            stream=True, timeout_s=None,
        ),
    )  # fmt: skip
    for _ in range(1000):
        live.push(256, FinishCode.NOT_YET)  # a special token
    assert not live.has_news
    assert live._text == []


def test_a_decoder_that_cannot_stream_gives_all_text_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = small.wrap(small.wordpiece())
    assert "can't stream" in caplog.text
    assert stream(tokenizer, [3, 4, 5, 6, 7]) == [""] * 5 + ["unhappyly dog."]
