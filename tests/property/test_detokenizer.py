"""Incremental decoding against the library's one-shot decode, for any ids cut anywhere."""

import codecs

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tests import small_tokenizers as small
from tokenizer_proc.byte_level import PreTokenizer, byte_level
from tokenizer_proc.detokenizer import byte_alphabet
from tokenizer_proc.tokenizer import Tokenizer


def byte_level_with_added() -> tokenizers.Tokenizer:
    """Its added tokens are text, and one looks like a byte."""
    backend = small.byte_level()
    backend.add_tokens(["<think>", "日本", "é"])
    return backend


TOKENIZERS: dict[str, Tokenizer] = {
    "byte-level": small.wrap(byte_level_with_added()),
    "llama": small.wrap(small.llama_style()),
    "gemma": small.wrap(
        small.unigram(
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        )
    ),
    "metaspace after bytes": small.wrap(small.unigram()),
    "metaspace": small.wrap(small.unigram(decoders.Metaspace())),
    "metaspace never": small.wrap(small.unigram(decoders.Metaspace(prepend_scheme="never"))),
    "strip each token": small.wrap(
        small.unigram(
            decoders.Sequence([decoders.ByteFallback(), decoders.Strip("▁", 1, 0), decoders.Fuse()])
        )
    ),
    "fused, then replaced": small.wrap(
        small.unigram(
            decoders.Sequence(
                [decoders.Fuse(), decoders.Strip("▁", 2, 0), decoders.Replace("▁", "  ")]
            )
        )
    ),
    "wordpiece": small.wrap(small.wordpiece()),
    "no decoder": small.wrap(small.bare()),
}


def id_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[list[int]]]:
    """Ids of the vocabulary and past it, in pieces; low ones (specials, bytes) are likely."""
    limit = tokenizer.vocab_size
    ids = st.integers(0, limit + 5) | st.integers(0, min(260, limit)) | st.sampled_from([2**31, -1])
    return st.lists(st.lists(ids, max_size=6), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_pieces_add_up_to_the_one_shot_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = data.draw(id_lists(tokenizer))
    decoder = tokenizer.decoder(skip)
    text = "".join(decoder.push(ids) for ids in pieces) + decoder.finish()
    assert text == tokenizer.decode([i for ids in pieces for i in ids], skip)


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
@given(data=st.data())
def test_valid_utf8_in_byte_tokens_adds_up_too(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text(max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    decoder = tokenizer.decoder(False)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == tokenizer.decode(
        ids, False
    )


# "é" is an added token here, spelled like the token of the single byte 0xE9: half a character.
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="é"), max_size=20))
def test_byte_level_text_is_out_with_the_last_byte_of_each_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    decoder = tokenizer.decoder(False)
    out = "".join(decoder.push([i]) for i in tokenizer.encode(text, add_special_tokens=False))
    assert (out, decoder.finish()) == (tokenizer.decode(tokenizer.encode(text, False), False), "")


BYTES = byte_level(byte_alphabet(), [], PreTokenizer())
EDGES = [0x20, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC,
         0xED, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]  # fmt: skip


@given(data=st.lists(st.sampled_from(EDGES), max_size=9).map(bytes))
def test_python_marks_broken_utf8_as_the_library_does(data: bytes) -> None:
    incremental = codecs.getincrementaldecoder("utf-8")("replace")
    streamed = "".join(incremental.decode(bytes([b])) for b in data) + incremental.decode(b"", True)
    assert streamed == BYTES.decode(list(data)) == data.decode(errors="replace")
