"""How a request's next token is chosen and when it ends, for users, wires and worker alike.

Every front end and the server check with `SamplingParams.validate`, so that a bad value gets the
same message wherever it comes in.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from runtime.checks import Range, check, is_whole

_NOTHING: tuple[Any, ...] = ()
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 64
"""The scheduler compares every sampled token with each of them."""
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_TOKEN_IDS = 8192
"""Of allowed_token_ids and of bad_token_ids."""
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """What is added to one token's logit; -inf bans the token."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the sampler and of its end.

    Where a field is None and the model's generation_config.json has a default, that is taken.

    n: how many outputs; each is sampled by itself, the i-th with the seed `seed` + i.
    max_tokens: most output tokens; None means up to the model's context.
    min_tokens: until so many, no token ends the output and stop strings are not looked for.
    temperature: 0 is greedy (ties take the lowest id); above, logits are divided by it. None: 0.
    top_k: keep the k most likely tokens; 0 keeps all (as does -1). None: 0.
    top_p: of these, the smallest set of most likely ones whose probability reaches it. None: 1.
    min_p: of these, those with at least this share of the likeliest token's probability. None: 0.
    seed: the random numbers' key; None has the server draw one.
    presence_penalty: taken from the logits of tokens that are in the output already.
    frequency_penalty: the same, once for each time that they are in it.
    repetition_penalty: logits of tokens in the prompt or the output are divided by it where they
    are positive and multiplied where negative. None: 1.
    logit_bias: added to the logits of these tokens; a mapping from token id to bias may be given.
    allowed_token_ids: no other token is sampled; None allows all.
    bad_token_ids: never sampled.
    stop: strings that end the text; the output ends before the first of them.
    stop_token_ids: tokens that end the request besides the model's end-of-sequence ids.
    include_stop_str_in_output: the text keeps the stop string, or the token that ended it.
    ignore_eos: go on after the model's end-of-sequence ids (stop_token_ids still count).
    skip_special_tokens: leave special tokens out of the text (never out of token_ids).
    logprobs: report every output token's log probability, and those of so many likeliest tokens;
    None reports nothing. They are the model's own: before penalties, biases and temperature.
    prompt_logprobs: the same for the prompt's tokens from the second on; none of the prompt is
    taken from the cache then.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[TokenBias, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """A single stop string, any sequence, a mapping of biases and a top_k of -1 are taken for
        what they mean; RequestError for what means nothing.
        """
        # On its way to the worker a request is copied and decoded often: most have nothing here.
        if self.stop is not _NOTHING:
            stop = (self.stop,) if isinstance(self.stop, str) else self.stop
            object.__setattr__(self, "stop", _tuple("stop", stop, "strings"))
        for name in ("stop_token_ids", "bad_token_ids"):
            if (ids := getattr(self, name)) is not _NOTHING:
                object.__setattr__(self, name, _ids(name, ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not _NOTHING:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if is_whole(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def with_defaults(self, defaults: "SamplingParams", **chosen: Any) -> "SamplingParams":
        """The same with no open choice but max_tokens and seed: `defaults` and then what None
        means. chosen: what those two or others are to be.
        """
        return replace(self, **chosen, **{
            name: _first(getattr(self, name), getattr(defaults, name), neutral)
            for name, neutral in _NEUTRAL.items()
        })  # fmt: skip

    def validate(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Raise RequestError naming the first field out of range, its value and its limit.

        eos_token_ids: the model's; they count where `min_tokens` forbids them.
        """
        for name, rule in _RANGES.items():
            rule.check(name, getattr(self, name))
        for name in _FLAGS:
            value = getattr(self, name)
            check(isinstance(value, bool), name, value, "must be True or False")
        self._check_stops()
        self._check_ids(vocab_size)
        self.check_lengths()
        self._check_something_is_left(vocab_size, eos_token_ids)

    def check_lengths(self) -> None:
        """Raise RequestError unless max_tokens has room for min_tokens."""
        if self.max_tokens is not None:
            check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                  f"must not be above max_tokens, which is {self.max_tokens}")  # fmt: skip

    # ---- inside ---------------------------------------------------------------------------

    def _check_stops(self) -> None:
        check(len(self.stop) <= MAX_STOPS, "stop", f"{len(self.stop)} strings",
              f"at most {MAX_STOPS} are taken")  # fmt: skip
        for text in self.stop:
            check(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS, "stop", text,
                  f"each must be a string of 1 to {MAX_STOP_CHARS} characters")  # fmt: skip

    def _check_ids(self, vocab_size: int) -> None:
        biased = tuple(entry.token for entry in self.logit_bias)
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", self.allowed_token_ids or (), MAX_TOKEN_IDS),
            ("bad_token_ids", self.bad_token_ids, MAX_TOKEN_IDS),
            ("logit_bias", biased, MAX_BIASES),
        ):
            check(len(ids) <= most, name, f"{len(ids)} ids", f"at most {most} are taken")
            for token in ids:
                check(is_whole(token) and 0 <= token < vocab_size, name, token,
                      f"each must be a token id from 0 to {vocab_size - 1}")  # fmt: skip
        check(len(set(biased)) == len(biased), "logit_bias", f"{len(biased)} ids",
              "each token may have one bias")  # fmt: skip
        for entry in self.logit_bias:
            ok = entry.bias == -math.inf or _BIAS.holds(entry.bias)
            check(ok, "logit_bias", entry.bias, f"each bias {_BIAS.text}, or -inf")

    def _check_something_is_left(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Some token can be sampled at every place."""
        banned = {*self.bad_token_ids}
        banned |= {entry.token for entry in self.logit_bias if entry.bias == -math.inf}
        if self.min_tokens:
            banned |= {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.allowed_token_ids is not None:
            left = len({*self.allowed_token_ids} - banned)
            check(left > 0, "allowed_token_ids", list(self.allowed_token_ids),
                  "some token must be left by bad_token_ids, biases of -inf and (with min_tokens)"
                  " the ids that end the output")  # fmt: skip
        else:
            check(len(banned) < vocab_size, "bad_token_ids", list(self.bad_token_ids),
                  f"one of the {vocab_size} tokens must be left")  # fmt: skip


def each_output(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` outputs, the seed being resolved.

    The i-th has the seed `seed` + i; the prompt's log probabilities are told with the first.
    """
    if sampling.n == 1 and sampling.seed is not None:
        return [sampling]
    seed = sampling.seed or 0
    return [
        replace(
            sampling,
            n=1,
            seed=(seed + index) % (MAX_SEED + 1),
            prompt_logprobs=None if index else sampling.prompt_logprobs,
        )
        for index in range(sampling.n)
    ]


_PENALTY = Range(least=-2, most=2)
_BIAS = Range(least=-MAX_BIAS, most=MAX_BIAS)
_LOGPROBS = Range(least=0, most=MAX_LOGPROBS, whole=True, optional=True)
_RANGES = {
    "n": Range(least=1, most=MAX_CHOICES, whole=True),
    "max_tokens": Range(least=1, most=MAX_COUNT, whole=True, optional=True),
    "min_tokens": Range(least=0, most=MAX_COUNT, whole=True),
    "temperature": Range(least=0, most=1e6, optional=True, note=" (0 is greedy)"),
    "top_k": Range(least=0, most=MAX_COUNT, whole=True, optional=True, note=" (0 keeps all)"),
    "top_p": Range(least=0, most=1, above=True, optional=True, note=" (1 keeps all)"),
    "min_p": Range(least=0, most=1, optional=True, note=" (0 keeps all)"),
    "seed": Range(least=0, most=MAX_SEED, whole=True, optional=True),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Range(least=0.01, most=100, optional=True, note=" (1 changes nothing)"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What None means where the model has no default either."""


def _tuple(name: str, given: Any, what: str) -> tuple[Any, ...]:
    """The values of any sequence; None is none."""
    if given is None:
        return ()
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        check(False, name, given, f"must be a list of {what}")
    return tuple(given)


def _ids(name: str, given: Any) -> tuple[Any, ...]:
    """Token ids as plain ints, whichever kind of whole number they came as."""
    return tuple(
        int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token
        for token in _tuple(name, given, "token ids")
    )


def _biases(given: Any) -> tuple[TokenBias, ...]:
    """The entries of a mapping from token ids, which JSON writes as strings, to biases."""
    if isinstance(given, Mapping):
        return tuple(TokenBias(token=_key(key), bias=bias) for key, bias in given.items())
    entries = _tuple("logit_bias", given, "TokenBias, or a mapping from token ids to numbers")
    for entry in entries:
        check(isinstance(entry, TokenBias), "logit_bias", entry,
              "must be a mapping from token ids to numbers")  # fmt: skip
    return entries


def _key(key: Any) -> Any:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20:
        return int(key)
    return _ids("logit_bias", (key,))[0]


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


NO_DEFAULTS = SamplingParams()
"""Of a model that leaves every choice open."""
