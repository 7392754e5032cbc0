"""A scheduler driven by hand: coupled with the simulated engine, and watched at every move."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

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
from runtime.sampling import SamplingParams
from runtime.types import RequestId, owner_of, request_id
from scheduler_proc.scheduler import Scheduler
from worker_proc.simulated import SimulatedEngine, Simulation, answer_alone

ATTENTIVE = Simulation(vocab_size=1000, answers="attend")
"""Tokens that are right only if every cell read is right."""
_REASONS = {FinishCode.STOP: FinishReason.STOP, FinishCode.LENGTH: FinishReason.LENGTH}


class Harness:
    """One scheduler, its simulated engine, and what every client has been told.

    After each operation the scheduler's invariants are proved, and each request's news are checked:
    consecutive offsets, exactly one final message, nothing after it. Each plan is executed as it
    is made; its result waits until `answer`.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        max_seq_len: int | None = None,
        simulation: Simulation = ATTENTIVE,
        **options: Any,
    ) -> None:
        """max_seq_len: by default what the pool holds, as at launch. options: SchedulerOptions'."""
        self.options = SchedulerOptions(**{"page_size": 1, **options})
        self.simulation = simulation
        capacity = num_pages * self.options.page_size
        self.max_seq_len = capacity if max_seq_len is None else min(capacity, max_seq_len)
        self.scheduler = Scheduler(self.options, num_pages, self.max_seq_len)
        self.engine = SimulatedEngine(
            simulation,
            num_pages=num_pages,
            page_size=self.options.page_size,
            num_slots=self.options.max_running_req,
            max_seq_len=self.max_seq_len,
        )
        self.submits: dict[RequestId, Submit] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.prompt_told: dict[RequestId, list[int]] = {}
        """The prompt tokens, from the second on, whose log probabilities were told."""
        self.logprobs: dict[RequestId, list[int]] = {}
        """The output tokens whose log probabilities were told."""
        self.cached: dict[RequestId, int] = {}
        """Prompt tokens from the cache, as the newest token of the request says."""
        self.ends: dict[RequestId, FinishReason | Rejected] = {}
        """In the order in which the requests ended."""
        self.plans: list[StepPlan] = []
        self.admissions: Counter[RequestId] = Counter()
        """How often a request was given a slot: once more than it was retracted, or as often."""
        self.late: list[RequestId] = []
        """Who was retracted more often than others had ended meanwhile."""
        self.ended_by_a_token: set[RequestId] = set()
        """Whose end came by itself, not by an abort, a deadline or a finish."""
        self._asked: dict[RequestId, FinishReason] = {}
        """Whom the client or the tokenizer wanted to end before they had, and how."""
        self._ended_before: dict[RequestId, int] = {}
        self._results: list[StepResult] = []
        self._num_answers = 0

    # ---- events -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        stop_ids: Sequence[int] = (),
        deadline_s: float | None = None,
        priority: int = 0,
        owner: int = 0,
        now: float = 0.0,
        **sampling: Any,
    ) -> RequestId:
        """A new request of tokenizer `owner`; its id. sampling: of SamplingParams' fields."""
        number = len(self.submits)
        request = request_id(owner, number)
        self.submits[request] = Submit(
            request=request,
            arrival=number,
            token_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, seed=number, **sampling),
            stop_ids=tuple(stop_ids),
            deadline_s=deadline_s,
            priority=priority,
        )
        self.outputs[request] = []
        self.prompt_told[request] = []
        self.scheduler.submit(self.submits[request], now)
        self._listen()
        return request

    def abort(self, request: RequestId) -> None:
        self._ask_for_an_end(request, FinishReason.ABORT)
        self.scheduler.abort(request)
        self._listen()

    def finish(self, request: RequestId) -> None:
        """A stop string was found in what the request has said so far."""
        self._ask_for_an_end(request, FinishReason.STOP)
        self.scheduler.finish(Finish(request=request, keep=len(self.outputs[request])))
        self._listen()

    def expire(self, now: float) -> None:
        self.scheduler.expire(now)
        self._listen()

    def flush_cache(self) -> int:
        num_pages = self.scheduler.flush_cache()
        self._listen()
        return num_pages

    def plan(self) -> StepPlan | None:
        """The next plan, if there is one now; the engine has executed it."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._check_plan(plan)
            self._count_admissions(plan)
            self.plans.append(plan)
            answer = self.engine.answer(plan)
            result = StepResult(
                step=plan.step,
                tokens=answer.tokens,
                logprobs=answer.logprobs,
                prompt_logprobs=answer.prompt_logprobs,
                started_s=0.0,
                ended_s=0.0,
            )
            self._results.append(result)
        self._listen()
        return plan

    @property
    def now_s(self) -> float:
        """What time it is: each answer is applied a second after the one before."""
        return float(self._num_answers)

    def answer(self) -> bool:
        """Apply the oldest result; False if none is in flight."""
        if not self._results:
            return False
        self._num_answers += 1
        self.scheduler.apply(self._results.pop(0))
        self._listen()
        return True

    # ---- many events ------------------------------------------------------------------------

    def step(self) -> None:
        """Plan as far ahead as is allowed, then answer the oldest plan."""
        while self.plan() is not None:
            pass
        assert self.answer() or self.scheduler.is_idle, "work waits, but nothing is in flight"

    def run(self, max_steps: int = 10_000) -> None:
        """Until every request has ended and every plan is answered."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_running} requests still run")

    def ask(self, prompt: Sequence[int], max_tokens: int = 4) -> RequestId:
        """A request from its submission to its end, whoever else runs."""
        request = self.submit(prompt, max_tokens)
        while request not in self.ends:
            self.step()
        return request

    # ---- what must hold ---------------------------------------------------------------------

    def expected(self, request: RequestId) -> list[int]:
        """What the request says when it is alone and nobody interferes."""
        submit = self.submits[request]
        seed, max_tokens = submit.sampling.seed or 0, submit.sampling.max_tokens or 0
        alone = answer_alone(self.simulation, submit.token_ids, seed, max_tokens)
        ends = (i + 1 for i, token in enumerate(alone) if token in submit.stop_ids)
        return alone[: next(ends, len(alone))]

    def check_answers(self) -> None:
        """Every request has ended as it should, having said what it says alone."""
        for request, submit in self.submits.items():
            end, outputs = self.ends[request], self.outputs[request]
            if isinstance(end, Rejected):
                continue
            expected = self.expected(request)
            if request in self.ended_by_a_token:
                stopped = expected[-1] in submit.stop_ids
                assert end is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                assert outputs == expected, f"request {request}"
            else:
                assert end is self._asked.get(request, FinishReason.ABORT)
                assert request in self._asked or submit.deadline_s is not None
                assert outputs == expected[: len(outputs)], f"request {request}"

    def check_empty(self) -> None:
        """Nobody is left; pages are free or cached, and after a flush all are free."""
        scheduler = self.scheduler
        assert scheduler.is_idle
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert self.pages_in_use == 0
        cached = scheduler.num_cached_pages
        assert self.flush_cache() == cached
        assert scheduler.num_free_pages == scheduler.num_pages

    def run_and_check(self) -> None:
        """`run`, then both checks above."""
        self.run()
        self.check_answers()
        self.check_empty()

    @property
    def pages_in_use(self) -> int:
        """Pages that are neither free nor cached."""
        scheduler = self.scheduler
        return scheduler.num_pages - scheduler.num_free_pages - scheduler.num_cached_pages

    @property
    def chunks(self) -> list[list[int]]:
        """The segment lengths of every plan so far."""
        return [plan.seg_lens.tolist() for plan in self.plans]

    # ---- inside -----------------------------------------------------------------------------

    def _ask_for_an_end(self, request: RequestId, reason: FinishReason) -> None:
        if request not in self.ends:
            self._asked[request] = reason

    def _listen(self) -> None:
        """Take what the clients are told, and have the scheduler prove its invariants."""
        for owner, message in self.scheduler.take_outputs():
            if isinstance(message, TokenBatch):
                self._hear_tokens(owner, message)
                continue
            assert owner == owner_of(message.request)
            if isinstance(message, PromptLogprobs):
                self._hear_prompt(message)
            else:
                self._hear_end(
                    message.request, message.reason if isinstance(message, Ended) else message
                )
        self.scheduler.outputs_sent(self.now_s)
        self.scheduler.check_integrity()

    def _hear_prompt(self, news: PromptLogprobs) -> None:
        told = self.prompt_told[news.request]
        assert not self.outputs[news.request], "an output came before the prompt was told"
        assert news.start == len(told) + 1, f"request {news.request} skips or repeats its prompt"
        told += news.logprobs.token_ids.tolist()

    def _hear_tokens(self, owner: int, batch: TokenBatch) -> None:
        fields = (batch.requests, batch.offsets, batch.tokens, batch.reasons, batch.cached)
        each = repeat(None, len(batch.tokens)) if batch.logprobs is None else batch.logprobs.split()
        columns = zip(*(f.tolist() for f in fields), strict=True)
        for (number, offset, token, code, cached), told in zip(columns, each, strict=True):
            request = RequestId(number)
            assert owner == owner_of(request)
            assert request not in self.ends, f"a token for request {request}, which has ended"
            assert offset == len(self.outputs[request]), f"request {request} skips or repeats"
            self.outputs[request].append(token)
            if told is not None:
                self.logprobs.setdefault(request, []).append(int(told.token_ids[0]))
            self.cached[request] = cached
            if code != FinishCode.NOT_YET:
                self.ended_by_a_token.add(request)
                self._hear_end(request, _REASONS[FinishCode(code)])

    def _hear_end(self, request: RequestId, end: FinishReason | Rejected) -> None:
        assert request not in self.ends, f"request {request} ends twice"
        assert not isinstance(end, Rejected) or not self.outputs[request]
        self.ends[request] = end

    def _check_plan(self, plan: StepPlan) -> None:
        """What every plan is, whatever it holds."""
        assert plan.step == len(self.plans)
        assert plan.seg_lens.min() > 0
        assert plan.seg_lens.sum() == len(plan.out_loc) == len(set(plan.out_loc.tolist()))
        assert len(set(plan.seg_slots.tolist())) == len(plan.seg_slots)
        assert plan.seg_lens[plan.seg_lens > 1].sum() <= self.options.max_extend_tokens
        entries = set(zip(plan.page_slots.tolist(), plan.page_indices.tolist(), strict=True))
        assert len(entries) == len(plan.page_ids)
        assert self.scheduler.num_in_flight <= (2 if self.options.overlap else 1)

    def _count_admissions(self, plan: StepPlan) -> None:
        for setup in plan.setups:
            self.admissions[setup.request] += 1
            before = self._ended_before.setdefault(setup.request, len(self.ends))
            if self.admissions[setup.request] - 1 > len(self.ends) - before:
                self.late.append(setup.request)
