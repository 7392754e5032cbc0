"""One model's tokenizer: text or chat to ids, ids to text.

Rule: ids and texts equal those of transformers' tokenizer for the same files, but for what `encode`
says of BOS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from runtime.errors import RequestError
from runtime.types import IntArray, Json
from tokenizer_proc.chat import ChatTemplate
from tokenizer_proc.detokenizer import ID_LIMIT, IncrementalDecoder, TokenTable, as_ints
from tokenizer_proc.spelling import Spelling

#: Ids. More of them go the library's way for batches, which alone lets other threads run meanwhile
#: (tokenizers 0.23).
LONG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What a tokenizer has beside its vocabulary.

    eos_token_ids: any of these ends an output.
    bos_token_id: the token that starts a sequence, if the tokenizer names one; encode adds it only
    where the model says so.
    named_tokens: special tokens by the names that chat templates use: {"bos_token": "<s>", …}.
    chat_template: jinja source; None where the model has none.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    named_tokens: Mapping[str, str]
    chat_template: str | None


class Tokenizer:
    """Encodes and decodes with `backend`, whose post-processor adds what the model wants.

    vocab_size: one more than the highest id it knows; the model's embedding may have more rows.
    special_ids: the ids that skip_special_tokens leaves out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        # Either may be left over in a model's file from its training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._table = TokenTable(backend)
        self._spelling = Spelling(backend, self._table.token_bytes)
        source = settings.chat_template
        self._chat = None if source is None else ChatTemplate(source, settings.named_tokens)
        self.vocab_size = self._table.size
        self.special_ids: frozenset[int] = self._table.special_ids
        self.eos_token_ids = settings.eos_token_ids
        self.bos_token_id = settings.bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> IntArray:
        """Ids of `text`, int32 [n], with BOS in front where the model's tokenizer adds one.

        A text that spells BOS itself, as one rendered from a chat template does, gets no second
        one; transformers would add it. Raises RequestError for a text that is no valid Unicode.
        """
        try:
            # The way for batches, also of one text: it lets other threads run, and is faster.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError):
            raise RequestError(
                "the text holds half of a surrogate pair: send valid Unicode"
            ) from None
        ids, bos = encoding.ids, self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and self._adds_bos():
            ids = ids[1:]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | IntArray, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer doesn't know are nothing."""
        known = [i for i in as_ints(ids) if 0 <= i < ID_LIMIT]
        if len(known) <= LONG:
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one output, whose pieces add up to `decode` of all its ids."""
        return IncrementalDecoder(self._table, skip_special_tokens)

    def render_chat(self, chat: Json) -> str:
        """The prompt text of `chat` ({"messages": […], …}, as in Generate); RequestError where
        there is none.
        """
        if self._chat is None:
            raise RequestError("this model has no chat template: send a text or token ids")
        return self._chat.render(chat)

    def encode_chat(self, chat: Json) -> tuple[IntArray, str]:
        """(ids, text) of `chat`; the template writes all special tokens, so encoding adds none."""
        text = self.render_chat(chat)
        return self.encode(text, add_special_tokens=False), text

    def spell(self, ids: IntArray) -> tuple[bytes, ...]:
        """The bytes that each id stands for in a text; none for an id that it doesn't know."""
        return self._spelling.spell(ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a byte-level token stands for; None for an unknown id."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < ID_LIMIT else None
        return None if token is None else self._table.token_bytes(token)

    def _adds_bos(self) -> bool:
        return self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
