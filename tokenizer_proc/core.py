"""The tokenizer's core: events in, messages out; no socket, no clock.

Rules:
 1. Whatever a client sends is answered or dropped, and touches no other client's requests.
 2. Every request ends by exactly one final message: a Chunk with a finish_reason, or Failed.
 3. Text, token ids and counts of a request end at the same token.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from runtime import errors, types
from runtime.errors import Overloaded, ProtocolError, RequestError, ShuttingDown, UserError
from runtime.logprobs import Logprobs
from runtime.messages import (
    CODEC,
    CREDIT,
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
    Grant,
    Hello,
    PromptLogprobs,
    Rejected,
    Stats,
    StatsReply,
    TokenBatch,
    Tokenize,
    Tokenized,
    Welcome,
)
from runtime.sampling import NO_DEFAULTS, SamplingParams, each_output
from runtime.types import IntArray, RequestId
from tokenizer_proc.actions import Action, Convert, Forget, ToClient, ToScheduler
from tokenizer_proc.admission import Admission
from tokenizer_proc.jobs import Job, Outcome
from tokenizer_proc.queries import Queries
from tokenizer_proc.requests import Credit, LiveRequest, never_begun
from tokenizer_proc.stops import StopMatcher
from tokenizer_proc.texts import Encoded, Texts
from tokenizer_proc.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

CLIENT_SILENCE_TICKS = 10
"""A client that sends nothing for so many ticks, one a second, loses its requests; it should send
Hello every 2 s. Ticks are counted and not seconds: while this process stands still (stopped by a
signal, say) it hears nobody, and then the silence is its own.
"""
UNREAD_TICKS = 60
"""A stream of which its reader takes nothing for so long, while news wait, is ended."""
LONG_BYTES = 8192
"""A call that is larger is converted beside the main thread: it may take longer than others should
wait.
"""


@dataclass(slots=True, eq=False)
class _Client:
    """A connected client and its open calls, by the client's own numbers: the outputs that each
    still has to come, by their index.
    """

    requests: dict[int, dict[int, LiveRequest]] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    """Calls that are being converted."""
    silent_ticks: int = 0


class TokenizerCore:
    """Between the clients and the scheduler."""

    def __init__(
        self, tokenizer: Tokenizer, *, index: int, endpoints: tuple[str, ...], model: str,
        server_id: str, max_seq_len: int, vocab_size: int, max_jobs: int,
        defaults: SamplingParams = NO_DEFAULTS,
    ) -> None:  # fmt: skip
        """index: this tokenizer's number, part of every RequestId. endpoints: where the other
        tokenizers listen. vocab_size: rows of the embedding. max_jobs: long calls that may wait to
        be converted. defaults: the model's, for fields that a request leaves open.
        """
        self._tokenizer = tokenizer
        self.texts = Texts(tokenizer, max_seq_len, vocab_size)
        """What jobs are converted with, on any thread."""
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._index = index
        # A tokenizer of another model may name ids that this model has not.
        eos_ids = tuple(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._admission = Admission(max_seq_len, vocab_size, eos_ids, defaults)
        self._welcome = Welcome(
            model=model,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            eos_token_ids=eos_ids,
            server_id=server_id,
            defaults=defaults,
            endpoints=endpoints,
        )
        self._clients: dict[bytes, _Client] = {}
        self._live: dict[RequestId, LiveRequest] = {}
        self._queries = Queries(self._new_id)
        self._counter = itertools.count()
        self._arrival = 0
        self._ticks = 0
        self._is_draining = False
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """What is to be sent, in order, since the last call."""
        actions, self._actions = self._actions, []
        return actions

    # ---- from clients ---------------------------------------------------------------------

    def on_client_frame(self, client: bytes, frame: bytes, now_ns: int) -> None:
        """Anything at all from a client. now_ns: on a clock that all tokenizers read."""
        self._arrival = max(now_ns, self._arrival + 1)
        known = self._clients.setdefault(client, _Client())
        known.silent_ticks = 0
        try:
            _, message = CODEC.decode(frame)
        except ProtocolError as e:
            self._refuse(client, str(e))
            return
        request = getattr(message, "request", None)
        is_open = request in known.requests or request in known.jobs
        if is_open and not isinstance(message, Abort | Grant):
            # Not answered under that number, which would end the other call.
            self._refuse(client, f"request number {request} is in use on this connection")
            return
        with self._answering_for(client, message):
            self._on_client(client, known, message, is_long=len(frame) > LONG_BYTES)

    def on_converted(self, job: Job, outcome: Outcome) -> None:
        """A job that was given out by `Convert` is done, or was not wanted any more."""
        self._num_jobs -= 1
        if job.is_wanted:
            del self._clients[job.client].jobs[job.call.request]
            with self._answering_for(job.client, job.call):
                if isinstance(outcome, Exception):
                    raise outcome
                self._answer(job, outcome)

    def on_client_gone(self, client: bytes) -> None:
        """The client can't be sent to any more: its requests end."""
        if (known := self._clients.pop(client, None)) is not None:
            for outputs in known.requests.values():
                self._abandon(outputs)
            for job in known.jobs.values():
                job.is_wanted = False
        self._queries.forget(client)
        self._actions.append(Forget(client))

    def tick(self) -> None:
        """A second has passed: let go of clients that are silent and of streams that are not read
        for too long.
        """
        self._ticks += 1
        for client, known in list(self._clients.items()):
            known.silent_ticks += 1
            if known.silent_ticks > CLIENT_SILENCE_TICKS:
                # It may be there and only have been stopped: then it must not wait for ever.
                self._let_go(client, known)
        for known in self._clients.values():
            for outputs in list(known.requests.values()):
                live = next(iter(outputs.values()))
                if live.credit.is_dry_for(self._ticks, UNREAD_TICKS):
                    text = f"nothing of the stream was read for {UNREAD_TICKS} s: read or abort it"
                    self._fail(live, "aborted", text)

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        self._is_draining = True

    @property
    def num_requests(self) -> int:
        """Outputs that have not ended, and requests that are still being converted."""
        jobs = (job for known in self._clients.values() for job in known.jobs.values())
        return len(self._live) + sum(isinstance(job.call, Generate) for job in jobs)

    def shut_down(self, reason: str) -> None:
        """The server ends: tell everybody who waits."""
        while self._live:
            self._fail(next(iter(self._live.values())), "died", reason)
        for client, known in self._clients.items():
            for number, job in known.jobs.items():
                job.is_wanted = False
                self._to_client(client, Failed(request=number, kind="died", text=reason))
            known.jobs.clear()
        for client, number in self._queries.callers():
            self._to_client(client, Failed(request=number, kind="died", text=reason))

    def _let_go(self, client: bytes, known: _Client) -> None:
        text = f"the client was silent for {CLIENT_SILENCE_TICKS} s"
        for outputs in list(known.requests.values()):
            self._fail(next(iter(outputs.values())), "aborted", text)
        for number in known.jobs:
            self._to_client(client, Failed(request=number, kind="aborted", text=text))
        self.on_client_gone(client)

    @contextlib.contextmanager
    def _answering_for(self, client: bytes, message: Any) -> Iterator[None]:
        """Whatever goes wrong is the answer to that call, and nobody else's."""
        request = getattr(message, "request", None)
        try:
            yield
        except UserError as e:
            field = e.field if isinstance(e, RequestError) else None
            failed = Failed(request=request, kind=errors.kind_of(e), text=str(e), field=field)
            self._to_client(client, failed)
        except Exception as e:  # one request's bytes must never end the others'
            _LOG.exception("a client's %s failed", type(message).__name__)
            text = f"the server failed on this request: {type(e).__name__}: {e}"
            self._to_client(client, Failed(request=request, kind="died", text=text))

    def _on_client(self, client: bytes, known: _Client, message: Any, *, is_long: bool) -> None:
        match message:
            case Hello():
                self._to_client(client, self._welcome)
            case Abort():
                self._abort(client, known, message.request)
            case Grant():
                self._grant(client, known, message)
            case Generate() | Tokenize() | Detokenize():
                self._convert(known, Job(client, message, self._arrival), is_long=is_long)
            case Stats() | FlushCache():
                if (query := self._queries.add(client, message)) is not None:
                    self._to_scheduler(query)
            case _:
                raise RequestError(f"a client may not send {type(message).__name__}")

    def _abort(self, client: bytes, known: _Client, number: int) -> None:
        for live in known.requests.get(number, {}).values():
            self._to_scheduler(Abort(request=live.id))
        if (job := known.jobs.get(number)) is not None and isinstance(job.call, Generate):
            job.is_wanted = False
            del known.jobs[number]
            self._to_client(client, never_begun(job.call))

    def _grant(self, client: bytes, known: _Client, grant: Grant) -> None:
        """Send what was held back of a stream, as far as the new credit goes."""
        if grant.chunks < 1:
            self._refuse(client, f"a Grant of {grant.chunks} chunks: at least 1 is taken")
            return
        outputs = known.requests.get(grant.request, {})
        for live in itertools.islice(outputs.values(), 1):
            live.credit.grant(grant.chunks)
        news = [
            live.take_chunk(None)
            for live in outputs.values()
            if live.has_news and live.credit.take(self._ticks)
        ]
        if news:
            self._to_client(client, Chunks(items=tuple(news)))

    def _convert(self, known: _Client, job: Job, *, is_long: bool) -> None:
        """Answer the call at once, or have it converted elsewhere first."""
        call = job.call
        if isinstance(call, Generate):
            if self._is_draining:
                raise ShuttingDown
            self._admission.check(call)
            is_long = is_long and call.token_ids is None  # they are what the scheduler takes
        self.texts.check_size(call)
        if not is_long:
            self._answer(job, self.texts.convert(call))
            return
        if self._num_jobs >= self._max_jobs:
            raise Overloaded(
                f"{self._num_jobs} long texts wait to be tokenized already (max_queued_req):"
                " try again later"
            )
        self._num_jobs += 1
        known.jobs[job.call.request] = job
        self._actions.append(Convert(job))

    def _answer(self, job: Job, outcome: Encoded | str) -> None:
        """The call is converted."""
        call = job.call
        match call, outcome:
            case Generate(), Encoded():
                self._generate(job.client, call, outcome.ids, job.arrival)
            case Tokenize(), Encoded():
                tokenized = Tokenized(
                    request=call.request, token_ids=outcome.ids, text=outcome.text
                )
                self._to_client(job.client, tokenized)
            case Detokenize(), str():
                self._to_client(job.client, Detokenized(request=call.request, text=outcome))

    def _refuse(self, client: bytes, text: str) -> None:
        """The client doesn't speak as it should."""
        self._to_client(client, Failed(request=None, kind="protocol", text=text))

    def _generate(
        self, client: bytes, message: Generate, prompt_ids: IntArray, arrival: int
    ) -> None:
        sampling = self._admission.resolve(message, len(prompt_ids))
        outputs: dict[int, LiveRequest] = {}
        credit = Credit(CREDIT * sampling.n)
        kept = replace(message, text=None, token_ids=None, chat=None)
        told = self._admission.told_stop_ids(sampling)
        for index, alone in enumerate(each_output(sampling)):
            live = LiveRequest(
                id=self._new_id(),
                client=client,
                generate=kept,
                prompt_ids=prompt_ids,
                decoder=self._tokenizer.decoder(sampling.skip_special_tokens),
                stops=StopMatcher(sampling.stop) if sampling.stop else None,
                told_stop_ids=told,
                credit=credit,
                index=index,
            )
            outputs[index] = self._live[live.id] = live
            self._to_scheduler(self._admission.submit(live, alone, arrival))
        self._clients[client].requests[message.request] = outputs

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
            case PromptLogprobs():
                if (live := self._live.get(message.request)) is not None:
                    self._on_prompt_logprobs(live, message)
            case Rejected():
                if (live := self._live.get(message.request)) is not None:
                    self._fail(live, message.kind, message.text)
            case StatsReply() | Flushed():
                callers, query = self._queries.answer(message)
                for client, number in callers:
                    self._to_client(client, replace(message, request=RequestId(number)))
                if query is not None:
                    self._to_scheduler(query)
            case _:
                raise ProtocolError(f"the scheduler sent a {type(message).__name__} to a tokenizer")

    def _on_tokens(self, batch: TokenBatch) -> None:
        """One step's tokens: one message to each client that hears news of it."""
        news: dict[bytes, list[Chunk]] = {}
        for live, logprobs, offset, token, code, cached in self._entries(batch):
            if offset != len(live.outputs):
                raise ProtocolError(
                    f"request {live.id}: output {offset} came when {len(live.outputs)} was due"
                )
            live.num_cached = cached
            chunk = self._on_token(live, token, FinishCode(code), logprobs)
            if chunk is not None:
                news.setdefault(live.client, []).append(chunk)
        for client, chunks in news.items():
            self._to_client(client, Chunks(items=tuple(chunks)))

    def _on_prompt_logprobs(self, live: LiveRequest, news: PromptLogprobs) -> None:
        live.prompt_logprobs.append(self._spelled(news.logprobs))
        if live.credit.take(self._ticks):
            self._to_client(live.client, Chunks(items=(live.take_chunk(None),)))

    def _entries(
        self, batch: TokenBatch
    ) -> Iterator[tuple[LiveRequest, Logprobs | None, int, int, int, int]]:
        """The batch's entries whose request is still wanted, as plain ints."""
        columns = (batch.requests, batch.offsets, batch.tokens, batch.reasons, batch.cached)
        each: Iterator[Logprobs | None] = itertools.repeat(None)
        if batch.logprobs is not None:
            each = self._spelled(batch.logprobs).split()
        entries = zip(*(column.tolist() for column in columns), strict=True)
        for (request, *rest), logprobs in zip(entries, each, strict=False):
            if (live := self._live.get(RequestId(request))) is not None:
                yield (live, logprobs, *rest)

    def _spelled(self, logprobs: Logprobs) -> Logprobs:
        return replace(logprobs, spelled=self._tokenizer.spell(logprobs.token_ids))

    def _on_token(
        self, live: LiveRequest, token: int, code: FinishCode, logprobs: Logprobs | None
    ) -> Chunk | None:
        """Take one token in; the chunk to send, if there is one."""
        if (stop := live.push(token, code, logprobs)) is not None:
            if code is FinishCode.NOT_YET:
                self._to_scheduler(Finish(request=live.id, keep=len(live.outputs)))
            self._forget(live)
            return live.take_chunk(FinishReason.STOP, stop)
        if code is not FinishCode.NOT_YET:
            self._forget(live)
            return live.take_chunk(*live.finish(code))
        if live.has_news and live.credit.take(self._ticks):
            return live.take_chunk(None)
        return None

    # ---- inside ---------------------------------------------------------------------------

    def _new_id(self) -> RequestId:
        return types.request_id(self._index, next(self._counter))

    def _finish(self, live: LiveRequest, chunk: Chunk) -> None:
        self._forget(live)
        self._to_client(live.client, Chunks(items=(chunk,)))

    def _fail(self, live: LiveRequest, kind: str, text: str) -> None:
        """The call of which `live` is an output fails, with all its outputs."""
        self._abandon(self._clients[live.client].requests.pop(live.generate.request))
        self._to_client(live.client, Failed(request=live.generate.request, kind=kind, text=text))

    def _forget(self, live: LiveRequest) -> None:
        """The request's final message is made."""
        del self._live[live.id]
        if (known := self._clients.get(live.client)) is not None:
            outputs = known.requests[live.generate.request]
            del outputs[live.index]
            if not outputs:
                del known.requests[live.generate.request]

    def _abandon(self, outputs: dict[int, LiveRequest]) -> None:
        """Nobody is told of these any more."""
        for live in outputs.values():
            del self._live[live.id]
            self._to_scheduler(Abort(request=live.id))

    def _to_client(self, client: bytes, message: object) -> None:
        self._actions.append(ToClient(client, message))

    def _to_scheduler(self, message: object) -> None:
        self._actions.append(ToScheduler(message))
