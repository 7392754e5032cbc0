"""The tokenizer's core: events in, messages out; no socket, no clock.

Rules:
 1. Whatever a client sends is answered or dropped, and touches no other client's requests.
 2. Every request ends by exactly one final message: a Chunk with a finish_reason, or Failed.
 3. Text, token ids and counts of a request end at the same token.
"""

import itertools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from runtime import errors, types
from runtime.errors import ProtocolError, RequestError, UserError
from runtime.messages import (
    CODEC,
    Abort,
    Chunk,
    Chunks,
    Detokenize,
    Detokenized,
    Ended,
    Failed,
    Finish,
    FinishCode,
    FinishReason,
    FlushCache,
    Flushed,
    Generate,
    Hello,
    Rejected,
    Stats,
    StatsReply,
    Submit,
    TokenBatch,
    Tokenize,
    Tokenized,
    Welcome,
)
from runtime.sampling import MAX_SEED, SamplingParams
from runtime.types import IntArray, Json, RequestId
from tokenizer_proc.requests import LiveRequest
from tokenizer_proc.stops import StopMatcher
from tokenizer_proc.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

CLIENT_SILENCE_TICKS = 10
"""A client that sends nothing for so many ticks, one a second, loses its requests; it should send
Hello every 2 s. Ticks are counted and not seconds: while this process stands still (stopped by a
signal, say) it hears nobody, and then the silence is its own.
"""
MAX_PRIORITY = 100
"""Bounded, for the wait under the policy "priority" is bounded by the levels there are."""
MAX_CHARS_PER_TOKEN = 64
"""A text longer than this times max_seq_len is refused before it is tokenized, and so are as many
ids before they become text.
"""


@dataclass(frozen=True, slots=True)
class ToClient:
    client: bytes
    message: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """The client is not sent anything any more."""

    client: bytes


@dataclass(frozen=True, slots=True)
class ToScheduler:
    message: Any


Action = ToClient | ToScheduler | Forget


@dataclass(slots=True, eq=False)
class _Client:
    """A connected client and its open calls, by the client's own numbers."""

    requests: dict[int, LiveRequest]
    silent_ticks: int = 0


class TokenizerCore:
    """Between the clients and the scheduler."""

    def __init__(
        self, tokenizer: Tokenizer, *, index: int, endpoints: tuple[str, ...], model: str,
        server_id: str, max_seq_len: int, vocab_size: int,
    ) -> None:  # fmt: skip
        """index: this tokenizer's number, part of every RequestId. endpoints: where the other
        tokenizers listen. vocab_size: rows of the embedding.
        """
        self._tokenizer = tokenizer
        self._index = index
        self._max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self._welcome = Welcome(
            model=model,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            eos_token_ids=tokenizer.eos_token_ids,
            server_id=server_id,
            endpoints=endpoints,
        )
        self._clients: dict[bytes, _Client] = {}
        self._live: dict[RequestId, LiveRequest] = {}
        self._queries: dict[RequestId, tuple[bytes, int]] = {}
        """Stats and FlushCache calls that the scheduler has yet to answer."""
        self._counter = itertools.count()
        self._arrival = 0
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """What is to be sent, in order, since the last call."""
        actions, self._actions = self._actions, []
        return actions

    # ---- from clients ---------------------------------------------------------------------

    def on_client_frame(self, client: bytes, frame: bytes, now_ns: int) -> None:
        """Anything at all from a client. now_ns: on a clock that all tokenizers read."""
        self._arrival = max(now_ns, self._arrival + 1)
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client({})
        known.silent_ticks = 0
        try:
            _, message = CODEC.decode(frame)
        except ProtocolError as e:
            self._to_client(client, Failed(request=None, kind="protocol", text=str(e)))
            return
        request = getattr(message, "request", None)
        if request in known.requests and not isinstance(message, Abort):
            # Not answered under that number, which would end the other call.
            text = f"request number {request} is in use on this connection"
            self._to_client(client, Failed(request=None, kind="protocol", text=text))
            return
        try:
            self._on_client(client, known, message)
        except UserError as e:
            self._to_client(client, Failed(request=request, kind=errors.kind_of(e), text=str(e)))
        except Exception as e:  # one request's bytes must never end the others'
            _LOG.exception("a client's %s failed", type(message).__name__)
            text = f"the server failed on this request: {type(e).__name__}: {e}"
            self._to_client(client, Failed(request=request, kind="died", text=text))

    def on_client_gone(self, client: bytes) -> None:
        """The client can't be sent to any more: its requests end."""
        if (known := self._clients.pop(client, None)) is not None:
            for live in known.requests.values():
                del self._live[live.id]
                self._to_scheduler(Abort(request=live.id))
        self._actions.append(Forget(client))

    def tick(self) -> None:
        """A second has passed: let go of clients that have been silent for too long."""
        for client, known in list(self._clients.items()):
            known.silent_ticks += 1
            if known.silent_ticks > CLIENT_SILENCE_TICKS:
                # It may be there and only have been stopped: then it must not wait for ever.
                for live in list(known.requests.values()):
                    self._to_scheduler(Abort(request=live.id))
                    text = f"the client was silent for {CLIENT_SILENCE_TICKS} s"
                    self._fail(live, "aborted", text)
                self.on_client_gone(client)

    def shut_down(self, reason: str) -> None:
        """The server ends: tell everybody who waits."""
        for live in list(self._live.values()):
            self._fail(live, "died", reason)
        for client, number in self._queries.values():
            self._to_client(client, Failed(request=number, kind="died", text=reason))

    def _on_client(self, client: bytes, known: _Client, message: Any) -> None:
        match message:
            case Hello():
                self._to_client(client, self._welcome)
            case Generate():
                self._generate(client, known, message)
            case Abort():
                if (live := known.requests.get(message.request)) is not None:
                    self._to_scheduler(Abort(request=live.id))
            case Tokenize():
                ids, text = self._encode(
                    message.text, None, message.chat, message.add_special_tokens
                )
                self._to_client(
                    client, Tokenized(request=message.request, token_ids=ids, text=text)
                )
            case Detokenize():
                self._check_count(len(message.token_ids), "token ids")
                self._check_ids(message.token_ids)
                text = self._tokenizer.decode(message.token_ids, message.skip_special_tokens)
                self._to_client(client, Detokenized(request=message.request, text=text))
            case Stats() | FlushCache():
                query = self._new_id()
                self._queries[query] = (client, message.request)
                self._to_scheduler(replace(message, request=query))
            case _:
                raise RequestError(f"a client may not send {type(message).__name__}")

    def _generate(self, client: bytes, known: _Client, message: Generate) -> None:
        message.sampling.validate(self._vocab_size)
        if message.timeout_s is not None and not 0 < message.timeout_s < 1e9:
            raise RequestError(f"timeout_s is {message.timeout_s}: it must be above 0 seconds")
        if abs(message.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {message.priority}: it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        prompt_ids, _ = self._encode(message.text, message.token_ids, message.chat, True)
        if not len(prompt_ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        self._check_ids(prompt_ids)  # a tokenizer of another model may know more than the model
        sampling = self._resolve(message.sampling, len(prompt_ids))
        live = LiveRequest(
            id=self._new_id(),
            client=client,
            generate=message,
            prompt_ids=prompt_ids,
            decoder=self._tokenizer.decoder(sampling.skip_special_tokens),
            stops=StopMatcher(sampling.stop) if sampling.stop else None,
        )
        known.requests[message.request] = self._live[live.id] = live
        eos_ids = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        submit = Submit(
            request=live.id,
            arrival=self._arrival,
            token_ids=prompt_ids,
            sampling=sampling,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids))),
            deadline_s=message.timeout_s,
            priority=message.priority,
        )
        self._to_scheduler(submit)

    def _resolve(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Every open choice made: a length that fits the context, a recorded seed."""
        room = self._max_seq_len - num_prompt
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if room < 1 or wanted > room:
            raise RequestError(
                f"prompt has {num_prompt} tokens"
                + (
                    f" and max_tokens is {wanted}, together {num_prompt + wanted}"
                    if room > 0
                    else ""
                )
                + f"; this server takes {self._max_seq_len} (max_seq_len):"
                " shorten it or raise the limit"
            )
        seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=wanted, seed=seed)

    def _encode(
        self, text: str | None, ids: IntArray | None, chat: Json | None, add_special: bool
    ) -> tuple[IntArray, str]:
        """The ids of whichever prompt is given, and its text where it was one."""
        if sum(given is not None for given in (text, ids, chat)) != 1:
            raise RequestError("a prompt is one of: a text, token ids, a chat")
        if text is not None:
            self._check_count(len(text), "characters")
            encoded = self._tokenizer.encode(text, add_special)
        elif chat is not None:
            text = self._tokenizer.render_chat(chat)
            self._check_count(len(text), "characters")
            encoded = self._tokenizer.encode(text, False)
        else:
            assert ids is not None
            text, encoded = "", ids
        return encoded, text

    def _check_count(self, count: int, what: str) -> None:
        """Refuse what is absurdly long without the work of converting it."""
        if count > (limit := MAX_CHARS_PER_TOKEN * self._max_seq_len):
            raise RequestError(
                f"{count} {what} were given; this server takes {self._max_seq_len} tokens"
                f" (max_seq_len) and never more than {limit} {what}: shorten it"
            )

    def _check_ids(self, ids: IntArray) -> None:
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(bad):
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary: ids go from 0 to"
                f" {self._vocab_size - 1}"
            )

    # ---- from the scheduler ---------------------------------------------------------------

    def on_scheduler(self, message: Any) -> None:
        """News of the requests that this tokenizer owns."""
        match message:
            case TokenBatch():
                self._on_tokens(message)
            case Ended():
                if (live := self._live.get(message.request)) is not None:
                    live.cut()
                    self._finish(live, live.take_chunk(message.reason))
            case Rejected():
                if (live := self._live.get(message.request)) is not None:
                    self._fail(live, message.kind, message.text)
            case StatsReply() | Flushed():
                client, number = self._queries.pop(message.request, (None, 0))
                if client is not None:
                    self._to_client(client, replace(message, request=RequestId(number)))
            case _:
                raise ProtocolError(f"the scheduler sent a {type(message).__name__} to a tokenizer")

    def _on_tokens(self, batch: TokenBatch) -> None:
        """One step's tokens: one message to each client that hears news of it."""
        news: dict[bytes, list[Chunk]] = {}
        for live, offset, token, code, cached in self._entries(batch):
            if offset != len(live.outputs):
                raise ProtocolError(
                    f"request {live.id}: output {offset} came when {len(live.outputs)} was due"
                )
            live.num_cached = cached
            chunk = self._on_token(live, token, FinishCode(code))
            if chunk is not None:
                news.setdefault(live.client, []).append(chunk)
        for client, chunks in news.items():
            self._to_client(client, Chunks(items=tuple(chunks)))

    def _entries(self, batch: TokenBatch) -> Iterator[tuple[LiveRequest, int, int, int, int]]:
        """The batch's entries whose request is still wanted, as plain ints."""
        columns = (batch.requests, batch.offsets, batch.tokens, batch.reasons, batch.cached)
        for request, *rest in zip(*(column.tolist() for column in columns), strict=True):
            if (live := self._live.get(RequestId(request))) is not None:
                yield (live, *rest)

    def _on_token(self, live: LiveRequest, token: int, code: FinishCode) -> Chunk | None:
        """Take one token in; the chunk to send, if there is one."""
        if (stop := live.push(token)) is not None:
            if code is FinishCode.NOT_YET:
                self._to_scheduler(Finish(request=live.id, keep=len(live.outputs)))
            self._forget(live)
            return live.take_chunk(FinishReason.STOP, stop)
        if code is not FinishCode.NOT_YET:
            self._forget(live)
            return live.take_chunk(*live.finish(code))
        return live.take_chunk(None) if live.has_news else None

    # ---- inside ---------------------------------------------------------------------------

    def _new_id(self) -> RequestId:
        return types.request_id(self._index, next(self._counter))

    def _finish(self, live: LiveRequest, chunk: Chunk) -> None:
        self._forget(live)
        self._to_client(live.client, Chunks(items=(chunk,)))

    def _fail(self, live: LiveRequest, kind: str, text: str) -> None:
        self._forget(live)
        self._to_client(live.client, Failed(request=live.generate.request, kind=kind, text=text))

    def _forget(self, live: LiveRequest) -> None:
        """The request's final message is made."""
        del self._live[live.id]
        if (known := self._clients.get(live.client)) is not None:
            del known.requests[live.generate.request]

    def _to_client(self, client: bytes, message: object) -> None:
        self._actions.append(ToClient(client, message))

    def _to_scheduler(self, message: object) -> None:
        self._actions.append(ToScheduler(message))
