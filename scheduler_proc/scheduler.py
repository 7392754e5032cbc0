"""The scheduler's core: events in, plans and messages out; no socket, no clock.

Rules:
 1. One place decides: admissions, chunks, retractions, aborts, deadlines and ends all happen here.
 2. Each step lets a request's planned tokens catch up with its promised ones; there are no phases.
 3. At most `depth` plans are in flight and are answered in order; a result belongs to the slots and
    tenures recorded with its plan.
 4. A request is retracted only when no plan in flight holds it; for want of pages, the oldest of
    the highest rank never is.
 5. Every live request ends by exactly one final message.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.errors import IntegrityError, ProtocolError
from runtime.logprobs import Logprobs
from runtime.messages import (
    Ended,
    Finish,
    FinishCode,
    FinishReason,
    PromptLogprobs,
    Rejected,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
)
from runtime.options import SchedulerOptions
from runtime.types import IntArray, RequestId, Slot, owner_of, owners_of
from scheduler_proc.cache import NaiveCache, PrefixCache
from scheduler_proc.counters import Counters
from scheduler_proc.memory import KvMemory
from scheduler_proc.pages import PageAllocator
from scheduler_proc.plan_builder import sampling_slots
from scheduler_proc.planner import Planner
from scheduler_proc.policies import policy_of
from scheduler_proc.queue import WaitingQueue
from scheduler_proc.radix import RadixTree
from scheduler_proc.request import Request, State
from scheduler_proc.slots import SlotTable

Output = tuple[int, TokenBatch | Ended | Rejected | PromptLogprobs]
"""A message and the number of the tokenizer it goes to."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    slots: IntArray
    """Whose token is sampled, in plan order: int32 [samples]."""
    tenures: IntArray
    """The slots' tenure when the plan was built."""


class Scheduler:
    """Decides what every step computes."""

    def __init__(self, options: SchedulerOptions, num_pages: int, max_seq_len: int) -> None:
        self._options = options
        self._max_seq_len = max_seq_len
        self._depth = 2 if options.overlap else 1
        self._slots = SlotTable(options.max_running_req, max_seq_len, options.page_size)
        cache: PrefixCache = (
            RadixTree(options.page_size) if options.cache_type == "radix" else NaiveCache()
        )
        self._memory = KvMemory(PageAllocator(num_pages), cache, self._slots, options.page_size)
        self._queue = WaitingQueue(policy_of(options.policy, cache))
        self._live: dict[RequestId, Request] = {}
        self._num_tokenless = 0
        """Live requests that have had no token yet."""
        self._deadlines: list[tuple[float, RequestId]] = []
        self._in_flight: deque[_InFlight] = deque()
        self._step = 0
        self._outputs: list[Output] = []
        self._first_token_arrivals: list[float] = []
        """When the requests came whose first token is among the outputs and was not sent yet."""
        self.counters = Counters()
        self._planner = Planner(options, self._slots, self._memory, self._queue, self.counters)

    # ---- events ---------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """A new request: queued, or refused at once."""
        if (refusal := self._refusal(submit)) is not None:
            self._emit(submit.request, refusal)
            return
        deadline = None if submit.deadline_s is None else now + submit.deadline_s
        request = Request(submit, deadline, now, submit.token_ids)
        self._live[request.id] = request
        self._num_tokenless += 1
        self._queue.push(request)
        if deadline is not None:
            self._drop_past_deadlines()
            heapq.heappush(self._deadlines, (deadline, request.id))

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state; does nothing if it has ended."""
        if (request := self._live.get(request_id)) is not None:
            self._end(request)
            self._emit(request_id, Ended(request=request_id, reason=FinishReason.ABORT))

    def finish(self, finish: Finish) -> None:
        """A stop string ended the request; does nothing if it has ended.

        ProtocolError where it keeps tokens that the request has not had.
        """
        if (request := self._live.get(finish.request)) is not None:
            slot = request.slot
            num_known = len(request.ids) if slot is None else int(self._slots.known[slot])
            num_outputs = num_known - request.prompt_len
            if not 0 <= finish.keep <= num_outputs:
                raise ProtocolError(
                    f"request {request.id} was to end with its first {finish.keep} output tokens;"
                    f" it has had {num_outputs}"
                )
            self._end(request)
            self._emit(request.id, Ended(request=request.id, reason=FinishReason.STOP))

    def expire(self, now: float) -> None:
        """Abort what is past its deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self.abort(request_id)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return self._deadlines[0][0] if self._deadlines else None

    def apply(self, result: StepResult) -> None:
        """The worker's answer to the oldest plan in flight."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ProtocolError(
                f"a result of step {result.step}, which is not the oldest in flight"
            )
        plan = self._in_flight.popleft()
        if len(plan.slots) != len(result.tokens):
            raise ProtocolError(
                f"step {result.step} samples {len(plan.slots)} tokens, its result has"
                f" {len(result.tokens)}"
            )
        for news in result.prompt_logprobs:
            self._tell_prompt(news)
        slots, tokens, logprobs = plan.slots, result.tokens, result.logprobs
        current = self._slots.tenure[slots] == plan.tenures
        if not current.all():
            slots, tokens = slots[current], tokens[current]
            logprobs = logprobs and logprobs.select(current)
        if len(slots):
            self._append_tokens(slots, tokens, logprobs)

    def flush_cache(self) -> int:
        """Free every cached page that no running request uses; how many."""
        pages = self._memory.cache.evict(self._memory.cache.num_evictable)
        self._memory.allocator.free(pages)
        return len(pages)

    # ---- actions --------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, if one can be built now; to be called until it returns None."""
        if len(self._in_flight) >= self._depth:
            return None
        while not (builder := self._planner.plan(self._step)):
            # A plan in flight may hold whoever must go: wait for its result first.
            if self._in_flight or (victim := self._planner.victim()) is None:
                return None
            self._retract(victim)
        plan = builder.build(self._step)
        slots = sampling_slots(plan)
        self._in_flight.append(_InFlight(self._step, slots, self._slots.tenure[slots]))
        self._step += 1
        return plan

    def take_outputs(self) -> list[Output]:
        """What happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def outputs_sent(self, now: float) -> None:
        """What `take_outputs` gave is on its way: the first tokens among it are counted."""
        for arrived_s in self._first_token_arrivals:
            self.counters.first_tokens += 1
            self.counters.first_token_s += now - arrived_s
        self._first_token_arrivals.clear()

    @property
    def num_running(self) -> int:
        return len(self._slots.owners)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """No live request and no plan in flight."""
        return not self._live and not self._in_flight

    @property
    def num_pages(self) -> int:
        return self._memory.allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._memory.allocator.num_free

    @property
    def num_cached_pages(self) -> int:
        return self._memory.cache.num_pages

    def check_integrity(self) -> None:
        """Prove the invariants of docs/architecture.md; IntegrityError says which is broken."""
        self._slots.check_integrity()
        self._memory.check_integrity()
        self._planner.check_integrity()
        if len(self._in_flight) > self._depth:
            raise IntegrityError(f"{len(self._in_flight)} plans in flight, {self._depth} allowed")
        waiting = {r.id for r in self._queue}
        running = {r.id for r in self._slots.owners.values()}
        if waiting & running or waiting | running != set(self._live):
            raise IntegrityError("a live request is not in exactly one of queue and slots")
        if self._num_tokenless != sum(not r.has_token for r in self._live.values()):
            raise IntegrityError(f"{self._num_tokenless} requests are said to have no token yet")
        for request in self._live.values():
            if request.state is not (State.WAITING if request.id in waiting else State.RUNNING):
                raise IntegrityError(f"request {request.id} is {request.state.name}")

    # ---- inside ---------------------------------------------------------------------------

    def _refusal(self, submit: Submit) -> Rejected | None:
        num_prompt, num_output = len(submit.token_ids), submit.sampling.max_tokens or 0
        kind, text = "request", None
        if not num_prompt or not num_output:
            text = f"prompt has {num_prompt} tokens and max_tokens is {num_output}: both need one"
        elif num_prompt + num_output > self._max_seq_len:
            text = (
                f"prompt has {num_prompt} tokens and max_tokens is {num_output}, together"
                f" {num_prompt + num_output}; this server takes {self._max_seq_len} (max_seq_len):"
                " shorten it or raise the limit"
            )
        elif len(self._queue) >= self._options.max_queued_req:
            kind, text = "overloaded", (
                f"{len(self._queue)} requests wait already (max_queued_req): try again later"
            )  # fmt: skip
        return None if text is None else Rejected(request=submit.request, kind=kind, text=text)

    def _drop_past_deadlines(self) -> None:
        """Forget the deadlines of ended requests once they are the greater part. Amortised O(1)."""
        if len(self._deadlines) > 2 * len(self._live) + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)

    def _tell_prompt(self, news: PromptLogprobs) -> None:
        """Pass log probabilities of a prompt on, if its request still lives."""
        if (request := self._live.get(news.request)) is not None:
            if news.start != request.next_prompt_logprob:
                raise ProtocolError(
                    f"request {request.id}: prompt token {news.start} was told, when"
                    f" {request.next_prompt_logprob} was due"
                )
            request.next_prompt_logprob += news.logprobs.num_tokens
            self._emit(request.id, news)

    def _append_tokens(self, slots: IntArray, tokens: IntArray, logprobs: Logprobs | None) -> None:
        """New known tokens, one for each of `slots`; ends whom they complete."""
        table = self._slots
        known = table.known[slots]
        table.token_ids[slots, known] = tokens
        table.known[slots] = known + 1
        reasons = np.where(known + 1 == table.limit[slots], FinishCode.LENGTH, FinishCode.NOT_YET)
        reasons[table.stopped(slots, tokens)] = FinishCode.STOP
        batch = TokenBatch(
            requests=table.request_ids[slots],
            offsets=known - table.prompt_len[slots],
            tokens=tokens,
            reasons=reasons.astype(np.int32),
            cached=table.num_cached[slots],
            logprobs=logprobs,
        )
        self.counters.generated += len(tokens)
        self._emit_tokens(batch)
        if self._num_tokenless:
            self._note_first_tokens(slots[batch.offsets == 0])
        for slot in slots[reasons != FinishCode.NOT_YET]:
            self._end(table.owners[slot])

    def _note_first_tokens(self, slots: IntArray) -> None:
        """The requests in these slots have had their first token."""
        for slot in slots:
            request = self._slots.owners[slot]
            request.has_token = True
            self._num_tokenless -= 1
            self._first_token_arrivals.append(request.arrived_s)

    def _emit_tokens(self, batch: TokenBatch) -> None:
        """The batch, or its parts if several tokenizers own its requests."""
        owners = owners_of(batch.requests)
        if (owners == owners[0]).all():
            self._outputs.append((int(owners[0]), batch))
            return
        for owner in np.unique(owners):
            mine = owners == owner
            part = TokenBatch(
                requests=batch.requests[mine],
                offsets=batch.offsets[mine],
                tokens=batch.tokens[mine],
                reasons=batch.reasons[mine],
                cached=batch.cached[mine],
                logprobs=batch.logprobs and batch.logprobs.select(mine),
            )
            self._outputs.append((int(owner), part))

    def _emit(self, request_id: RequestId, message: Ended | Rejected | PromptLogprobs) -> None:
        self._outputs.append((owner_of(request_id), message))

    def _end(self, request: Request) -> None:
        """The request is over: nothing of it stays but its pages in the cache."""
        if request.state is State.RUNNING:
            self._leave_slot(request)
        else:
            self._queue.remove(request)
        request.move(State.ENDED)
        del self._live[request.id]
        self._num_tokenless -= not request.has_token
        self.counters.ended += 1
        self._planner.someone_ended()

    def _retract(self, request: Request) -> None:
        """Make room: a running request waits again, its pages free or evictable."""
        self._leave_slot(request)
        request.move(State.WAITING)
        request.num_retractions += 1
        self._queue.put_back(request)
        self.counters.retractions += 1

    def _leave_slot(self, request: Request) -> None:
        slot = request.slot
        if slot is None:
            raise IntegrityError(f"request {request.id} runs without a slot")
        self._planner.forget(Slot(slot))
        self._memory.release(slot)
        self._slots.release(slot)
