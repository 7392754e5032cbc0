"""How a request's next token is chosen and when it ends, for users, wires and worker alike."""

import math
from dataclasses import dataclass

from runtime.errors import RequestError

MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 64
"""The scheduler compares every sampled token with each of them."""
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler and of its end.

    max_tokens: most output tokens; None means up to the model's context.
    temperature: 0 is greedy (ties take the lowest id); above, logits are divided by it.
    top_k: keep the k most likely tokens; None keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches it.
    seed: the random numbers' key; None has the server draw one.
    stop: strings that end the text; the output ends before the first of them.
    stop_token_ids: tokens that end the request besides the model's end-of-sequence ids.
    ignore_eos: go on after the model's end-of-sequence ids (stop_token_ids still count).
    skip_special_tokens: leave special tokens out of the text (never out of token_ids).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """A single stop string and any sequence are taken for the tuples they mean."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of range, its value and its limit."""
        self._check_numbers()
        self._check_stops(vocab_size)

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            _check(_is_int(self.max_tokens) and 1 <= self.max_tokens <= MAX_COUNT, "max_tokens",
                   self.max_tokens,
                   f"must be a whole number from 1 to {MAX_COUNT}, or None")  # fmt: skip
        _check(_is_finite(self.temperature) and self.temperature >= 0, "temperature",
               self.temperature, "must be a number of at least 0 (0 is greedy)")  # fmt: skip
        if self.top_k is not None:
            _check(_is_int(self.top_k) and 1 <= self.top_k <= MAX_COUNT, "top_k", self.top_k,
                   f"must be a whole number from 1 to {MAX_COUNT}, or None")  # fmt: skip
        _check(_is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p,
               "must be above 0 and at most 1 (1 keeps all)")  # fmt: skip
        if self.seed is not None:
            _check(_is_int(self.seed) and 0 <= self.seed <= MAX_SEED, "seed", self.seed,
                   f"must be a whole number from 0 to {MAX_SEED}, or None")  # fmt: skip

    def _check_stops(self, vocab_size: int) -> None:
        _check(len(self.stop) <= MAX_STOPS, "stop", f"{len(self.stop)} strings",
               f"at most {MAX_STOPS} are taken")  # fmt: skip
        for text in self.stop:
            _check(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS, "stop", text,
                   f"each must be a string of 1 to {MAX_STOP_CHARS} characters")  # fmt: skip
        num_ids = len(self.stop_token_ids)
        _check(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{num_ids} ids",
               f"at most {MAX_STOP_TOKEN_IDS} are taken")  # fmt: skip
        for token in self.stop_token_ids:
            _check(_is_int(token) and 0 <= token < vocab_size, "stop_token_ids", token,
                   f"each must be a token id from 0 to {vocab_size - 1}")  # fmt: skip


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        shown = repr(value)
        raise RequestError(f"{name} is {shown if len(shown) <= 80 else shown[:80] + '…'}: {rule}")
