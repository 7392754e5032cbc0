"""What bytes single tokens stand for, as log probabilities show them.

The bytes of a text's tokens, joined, are the text's, but for a space that the decoder leaves out at
its start.
"""

import json
import re
from collections.abc import Callable

import tokenizers

from runtime.types import IntArray, Json
from tokenizer_proc.decoders import flat

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """The bytes of one tokenizer's tokens, kept as they turn up."""

    def __init__(
        self, backend: tokenizers.Tokenizer, byte_level_bytes: Callable[[str], bytes]
    ) -> None:
        """byte_level_bytes: the bytes of a token spelled in the byte alphabet."""
        self._backend = backend
        self._known: dict[int, bytes] = {}
        decoder = backend.decoder
        parts = [] if decoder is None else flat(json.loads(decoder.__getstate__()))
        kinds = {part["type"] for part in parts}
        self._byte_level_bytes = byte_level_bytes if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        self._spaces = [mark for part in parts if (mark := _space_mark(part))]

    def spell(self, ids: IntArray) -> tuple[bytes, ...]:
        """The bytes of each id; none for an id that the tokenizer doesn't know."""
        known = self._known
        for token_id in set(ids.tolist()) - known.keys():
            known[token_id] = self._bytes_of(token_id)
        return tuple([known[token_id] for token_id in ids.tolist()])

    def _bytes_of(self, token_id: int) -> bytes:
        """Decoders make no difference between added tokens and others."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level_bytes is not None:
            return self._byte_level_bytes(token)
        if self._falls_back and (byte := _FALLBACK.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for mark in self._spaces:
            token = token.replace(mark, " ")
        return token.encode()


def _space_mark(part: Json) -> str | None:
    """What a decoder makes spaces of."""
    match part:
        case {"type": "Metaspace", "replacement": str(mark)}:
            return mark
        case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
            return mark
    return None
