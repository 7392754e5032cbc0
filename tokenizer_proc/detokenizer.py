"""Output ids to text while they arrive.

Rule: the joined pieces equal the library's one-shot decode of all ids, whatever the ids; a piece
once given out is never taken back, so U+FFFD shows only where the whole text has it. The cost of a
token doesn't grow with the text before it.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers

from runtime.types import IntArray
from tokenizer_proc.decoders import Stage, StageFactory, stages_of

#: The library takes ids below this; anything else is unknown to every tokenizer.
ID_LIMIT = 2**32

_log = logging.getLogger(__name__)


def byte_alphabet() -> dict[str, int]:
    """Which character spells which byte in a byte-level vocabulary.

    Printable ones spell themselves; the rest follows from U+0100 on.
    Source: GPT-2's encoder (Radford et al., 2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


class TokenTable:
    """What decoding needs of one tokenizer: shared by its decoders, filled as ids turn up."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._alphabet = byte_alphabet()
        self._tokens: dict[int, str] = {}
        self._bytes: dict[str, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        #: One more than the highest known id.
        self.size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = backend.decoder
        config: Any = json.loads(decoder.__getstate__()) if decoder is not None else None
        self._factories, streams = stages_of(config, decoder, self.token_bytes)
        if not streams:
            _log.warning("this tokenizer's decoder can't stream: text comes when a request ends")

    def tokens(self, ids: Iterable[int], skip_special_tokens: bool) -> list[str]:
        """The token strings that decoding works on; unknown ids are left out."""
        found = [token for i in ids if (token := self._token(i)) is not None]
        if skip_special_tokens:
            found = [token for token in found if token not in self._special]
        return found

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token of a byte-level vocabulary spells."""
        spelled = self._bytes.get(token)
        if spelled is None:
            codes = [self._alphabet.get(char) for char in token]
            known = [code for code in codes if code is not None]
            # As in the library: a token with any other character (an added one) stands for itself.
            spelled = bytes(known) if len(known) == len(codes) else token.encode()
            self._bytes[token] = spelled
        return spelled

    def stage_factories(self) -> Sequence[StageFactory]:
        """How to make the decoding stages of a new text."""
        return self._factories

    def _token(self, token_id: int) -> str | None:
        token = self._tokens.get(token_id)
        if token is None and 0 <= token_id < ID_LIMIT:
            token = self._backend.id_to_token(token_id)
            if (
                token is not None
            ):  # Unknown ids are not kept: the table stays as small as the vocabulary.
                self._tokens[token_id] = token
        return token


class IncrementalDecoder:
    """The text of one output, piece by piece."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._stages: list[Stage] = [make() for make in table.stage_factories()]

    def push(self, ids: Sequence[int] | IntArray) -> str:
        """The text that `ids` make certain: it may be less than theirs, and is never revised."""
        tokens = self._table.tokens(as_ints(ids), self._skip_special_tokens)
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        """The rest of the text; call once, after the last id."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.push(tokens) + stage.finish()
        return "".join(tokens)


def as_ints(ids: Sequence[int] | IntArray) -> list[int]:
    """`ids` as plain Python ints."""
    return ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
