"""Prompts to ids and ids to text, within limits: the tokenizer's work that may take long.

Rule: nothing here is changed by a call, so that a second thread may do the long ones.
"""

from dataclasses import dataclass

from runtime.errors import RequestError, TooLong
from runtime.messages import Detokenize, Generate, Tokenize
from runtime.types import IntArray
from tokenizer_proc.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 64
"""A text longer than this times max_seq_len is refused before it is tokenized, and so are as many
ids before they become text.
"""
HEAD_CHARS_PER_TOKEN = 8
"""Of a text that is longer than twice this times max_seq_len, so much is tokenized first."""

TextCall = Generate | Tokenize | Detokenize
"""The calls that need a conversion."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as ids, and its text where it was one (a chat's after its template)."""

    ids: IntArray
    text: str


def text_field(call: TextCall) -> str:
    """The name of what the call brings to be converted, as users know it."""
    if isinstance(call, Detokenize):
        return "token_ids"
    return "prompt" if call.chat is None else "messages"


class Texts:
    """Converts what the calls bring."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._vocab_size = vocab_size

    def check_size(self, call: TextCall) -> None:
        """Refuse what is absurdly long without the work of converting it."""
        if isinstance(call, Detokenize):
            self._check_count(len(call.token_ids), "token ids", text_field(call))
        elif call.text is not None:
            self._check_count(len(call.text), "characters", text_field(call))

    def convert(self, call: TextCall) -> Encoded | str:
        """A prompt's ids, or for Detokenize the text; RequestError where there is none."""
        try:
            return self._convert(call)
        except RequestError as e:
            e.field = e.field or text_field(call)
            raise

    def _convert(self, call: TextCall) -> Encoded | str:
        match call:
            case Generate():
                return self._prompt(call)
            case Tokenize():
                return self._encode(call, call.add_special_tokens)
            case Detokenize():
                self._check_ids(call.token_ids)
                return self._tokenizer.decode(call.token_ids, call.skip_special_tokens)

    def _prompt(self, call: Generate) -> Encoded:
        given = (call.text, call.token_ids, call.chat)
        if call.token_ids is None or sum(prompt is not None for prompt in given) != 1:
            encoded = self._encode(call, True, is_prompt=True)
        else:
            encoded = Encoded(call.token_ids, "")
        if not len(encoded.ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        # A tokenizer of another model may know more than the model.
        self._check_ids(encoded.ids)
        return encoded

    def _encode(
        self, call: Generate | Tokenize, add_special_tokens: bool, *, is_prompt: bool = False
    ) -> Encoded:
        if (call.text is None) == (call.chat is None):
            kinds = "a text, token ids, a chat" if is_prompt else "a text, a chat"
            raise RequestError(f"a prompt is one of: {kinds}")
        if call.chat is not None:
            # The template writes every special token itself.
            text, add_special_tokens = self._tokenizer.render_chat(call.chat), False
            self._check_count(len(text), "characters", text_field(call))
        else:
            assert call.text is not None
            text = call.text
        if is_prompt:
            self._check_head(text)
        return Encoded(self._tokenizer.encode(text, add_special_tokens), text)

    def _check_head(self, text: str) -> None:
        """Refuse a text that is much too long after a part of the work.

        What follows a text may change the ids at its end, but not a third of them.
        """
        num_chars = HEAD_CHARS_PER_TOKEN * self._max_seq_len
        if len(text) <= 2 * num_chars:
            return
        num_tokens = len(self._tokenizer.encode(text[:num_chars], False))
        if num_tokens > 1.5 * self._max_seq_len:
            raise TooLong(
                f"the prompt has {len(text)} characters, and its first {num_chars} alone are"
                f" {num_tokens} tokens; this server takes {self._max_seq_len} (max_seq_len):"
                " shorten it"
            )

    def _check_count(self, count: int, what: str, field: str) -> None:
        if count > (limit := MAX_CHARS_PER_TOKEN * self._max_seq_len):
            raise TooLong(
                f"{count} {what} were given; this server takes {self._max_seq_len} tokens"
                f" (max_seq_len) and never more than {limit} {what}: shorten it",
                field,
            )

    def _check_ids(self, ids: IntArray) -> None:
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(bad):
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary: ids go from 0 to"
                f" {self._vocab_size - 1}"
            )
