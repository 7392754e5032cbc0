"""The bytes that single tokens are said to stand for, against the library's decode of them all."""

from itertools import groupby

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tests import small_tokenizers as small
from tokenizer_proc.decoders import fallback_byte
from tokenizer_proc.tokenizer import Tokenizer

ADDED = ["▁▁", "▁x", "<think>", "日本", "é"]
"""Runs of spaces, as Gemma has them, and one that byte-level BPE takes for a byte."""


def with_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_tokens(ADDED)
    return backend


REPLACING = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)
BACKENDS: dict[str, tokenizers.Tokenizer] = {
    "llama": with_added(small.llama_style()),
    "gemma": with_added(small.unigram(REPLACING)),
    "metaspace after bytes": with_added(small.unigram()),
    "metaspace never": with_added(small.unigram(decoders.Metaspace(prepend_scheme="never"))),
    "byte-level": with_added(small.byte_level()),
}
FALLING_BACK = ["llama", "gemma", "metaspace after bytes"]
TOKENIZERS = {name: small.wrap(backend) for name, backend in BACKENDS.items()}


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    return list(tokenizer.spell(np.array(ids, np.int32)))


def id_lists(name: str, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    """Ids of the vocabulary and past it; special and byte tokens and added ones are likely."""
    limit = BACKENDS[name].get_vocab_size()
    ids = st.integers(0, limit + 5) | st.integers(0, 260) | st.integers(limit - len(ADDED), limit)
    return st.lists(ids, max_size=max_size)


def text_of(name: str, ids: list[int]) -> str:
    """What the spelled bytes make of the ids, by the rules of the decoder.

    With byte fallback a run of byte tokens is its text, or if it is none a U+FFFD for each.
    """
    pieces = spelled(TOKENIZERS[name], ids)
    if name not in FALLING_BACK:
        return b"".join(pieces).decode(errors="replace")
    tokens = [BACKENDS[name].id_to_token(i) for i in ids]
    known = [(t, p) for t, p in zip(tokens, pieces, strict=True) if t is not None]
    text = ""
    for is_byte, group in groupby(known, lambda pair: fallback_byte(pair[0]) is not None):
        run = [piece for _, piece in group]
        try:
            text += b"".join(run).decode()
        except UnicodeDecodeError:
            assert is_byte
            text += "\N{REPLACEMENT CHARACTER}" * len(run)
    return text


def differs_by_first_spaces(ours: str, library: str) -> bool:
    """At most: some decoders leave spaces out at the start of a text."""
    return ours.endswith(library) and not ours.removesuffix(library).strip(" ")


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
def test_the_bytes_of_any_ids_make_the_librarys_text(name: str, data: st.DataObject) -> None:
    ids = data.draw(id_lists(name))
    library = BACKENDS[name].decode(ids, skip_special_tokens=False)
    assert differs_by_first_spaces(text_of(name, ids), library)


@pytest.mark.parametrize("name", ["llama", "gemma", "metaspace after bytes", "byte-level"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_the_bytes_of_a_texts_tokens_are_the_texts(name: str, text: str) -> None:
    """Also where a character is no token and falls back to bytes."""
    ids = BACKENDS[name].encode(text, add_special_tokens=False).ids
    ours = b"".join(spelled(TOKENIZERS[name], ids)).decode(errors="replace")
    assert differs_by_first_spaces(ours, BACKENDS[name].decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", FALLING_BACK)
def test_a_byte_token_is_its_byte(name: str) -> None:
    backend = BACKENDS[name]
    ids = [backend.token_to_id(token) for token in small.BYTES]
    assert spelled(TOKENIZERS[name], ids) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
def test_a_token_is_spelled_alike_wherever_it_stands(name: str, data: st.DataObject) -> None:
    """Log probabilities name tokens that are in no text at all."""
    ids = data.draw(id_lists(name))
    tokenizer = small.wrap(BACKENDS[name])
    assert spelled(tokenizer, ids) == [spelled(TOKENIZERS[name], [i])[0] for i in ids]


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_that_are_no_tokens_have_no_bytes(name: str) -> None:
    limit = BACKENDS[name].get_vocab_size()
    assert spelled(TOKENIZERS[name], [limit, limit + 1000]) == [b"", b""]
