"""What a Generate may ask for, and what the scheduler is asked for it: every open choice made."""

import secrets

from runtime.errors import RequestError, TooLong
from runtime.messages import Generate, Submit
from runtime.sampling import MAX_SEED, SamplingParams
from tokenizer_proc.requests import LiveRequest
from tokenizer_proc.texts import text_field

MAX_PRIORITY = 100
"""Bounded, for the wait under the policy "priority" is bounded by the levels there are."""


class Admission:
    """The model's limits and defaults."""

    def __init__(
        self,
        max_seq_len: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        defaults: SamplingParams,
    ) -> None:
        """eos_ids: the model's end-of-sequence ids. defaults: for fields that a request leaves
        open.
        """
        self._max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._defaults = defaults

    def check(self, message: Generate) -> None:
        """Refuse what can be told without the prompt."""
        message.sampling.validate(self._vocab_size, self._eos_ids)
        if message.timeout_s is not None and not 0 < message.timeout_s < 1e9:
            text = f"timeout_s is {message.timeout_s}: it must be above 0 seconds"
            raise RequestError(text, "timeout_s")
        if abs(message.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {message.priority}: it must be from {-MAX_PRIORITY} to"
                f" {MAX_PRIORITY}",
                "priority",
            )

    def resolve(self, message: Generate, num_prompt: int) -> SamplingParams:
        """Its sampling with every open choice made: the model's defaults, a length that fits the
        context, a recorded seed.
        """
        sampling = message.sampling
        room = self._max_seq_len - num_prompt
        usual = room if self._defaults.max_tokens is None else min(room, self._defaults.max_tokens)
        wanted = usual if sampling.max_tokens is None else sampling.max_tokens
        if room < 1 or wanted > room:
            raise TooLong(
                f"prompt has {num_prompt} tokens"
                + (
                    f" and max_tokens is {wanted}, together {num_prompt + wanted}"
                    if room > 0
                    else ""
                )
                + f"; this server takes {self._max_seq_len} (max_seq_len):"
                " shorten it or raise the limit",
                "max_tokens" if room > 0 else text_field(message),
            )
        seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
        resolved = sampling.with_defaults(self._defaults, max_tokens=wanted, seed=seed)
        resolved.check_lengths()
        return resolved

    def told_stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The ids that are told as the matched stop: the request's own, less those that end every
        output.
        """
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos or not own else own.difference(self._eos_ids)

    def submit(self, live: LiveRequest, sampling: SamplingParams, arrival: int) -> Submit:
        """What the scheduler is asked for one output; `sampling` is resolved, its n is 1."""
        eos_ids = () if sampling.ignore_eos else self._eos_ids
        return Submit(
            request=live.id,
            arrival=arrival,
            token_ids=live.prompt_ids,
            sampling=sampling,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids))),
            deadline_s=live.generate.timeout_s,
            priority=live.generate.priority,
        )
