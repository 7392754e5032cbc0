"""`python -m scheduler_proc`: the scheduler's shell. Sockets and clock around
scheduler_proc.scheduler.
"""

import argparse
import time
from typing import Any

from runtime.errors import ProtocolError
from runtime.messages import (
    Abort,
    Finish,
    FlushCache,
    Flushed,
    Stats,
    StatsReply,
    StepResult,
    Submit,
)
from runtime.process import Process, run
from runtime.transport import Outbox, Poller
from runtime.types import owner_of
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.stats import Clock, stats

IDLE_CHECK_S = 5.0
"""How often a scheduler without work proves its invariants."""


class Service:
    """The scheduler among its wires."""

    def __init__(self, process: Process) -> None:
        instance = process.instance
        options = instance.config.scheduler
        transport = process.transport
        self._process = process
        self._requests = transport.inbox(instance.wire("scheduler"), "tokenizer → scheduler")
        self._results = transport.inbox(instance.wire("results"), "worker-0 → scheduler")
        self._workers = [
            transport.outbox(instance.wire(f"worker-{rank}"), f"scheduler → worker-{rank}")
            for rank in range(instance.config.worker.tp)
        ]
        self._tokenizers = [
            transport.outbox(instance.wire(f"tokenizer-{index}"), f"scheduler → tokenizer-{index}")
            for index in range(instance.config.server.num_tokenizers)
        ]
        begin = process.loaded()
        self._core = Scheduler(options, begin.num_pages, begin.max_seq_len)
        self._clock = Clock()
        process.ready(
            f"{begin.num_pages} pages of {options.page_size}, {options.max_running_req} slots,"
            f" {options.cache_type} cache, overlap {'on' if options.overlap else 'off'}"
        )

    def serve(self) -> None:
        """Until the supervisor ends it: wait for news, tell the core, carry out what it decides."""
        poller = Poller(self._requests, self._results, self._process.control)
        while True:
            ready = poller.wait(self._timeout())
            if self._process.control in ready:
                self._process.check_control()
            # Results first: they free slots and pages for what the requests bring.
            if self._results in ready:
                for result in self._results.drain():
                    self._apply(result)
            if self._requests in ready:
                for message in self._requests.drain():
                    self._handle(message)
            self._core.expire(time.monotonic())
            self._send_plans()
            for owner, output in self._core.take_outputs():
                self._tokenizers[owner].send(output)
            self._core.outputs_sent(time.monotonic())
            if self._core.is_idle:
                self._clock.went_idle()
                if not ready:
                    self._core.check_integrity()

    def _apply(self, result: Any) -> None:
        if not isinstance(result, StepResult):
            raise ProtocolError(f"worker-0 sent a {type(result).__name__} to the scheduler")
        self._clock.step_ended(result)
        self._core.apply(result)

    def _handle(self, message: Any) -> None:
        match message:
            case Submit():
                self._core.submit(message, time.monotonic())
            case Abort():
                self._core.abort(message.request)
            case Finish():
                self._core.finish(message)
            case Stats():
                reply = StatsReply(request=message.request, stats=stats(self._core, self._clock))
                self._reply(message.request, reply)
            case FlushCache():
                flushed = Flushed(request=message.request, num_pages=self._core.flush_cache())
                self._reply(message.request, flushed)
            case _:
                raise ProtocolError(f"a tokenizer sent a {type(message).__name__} to the scheduler")

    def _reply(self, request: Any, message: object) -> None:
        self._tokenizers[owner_of(request)].send(message)

    def _send_plans(self) -> None:
        while (plan := self._core.plan()) is not None:
            self._clock.step_planned(plan.step)
            send_to_all(self._workers, plan)

    def _timeout(self) -> float:
        """Seconds until the next deadline or idle check."""
        deadline = self._core.next_deadline()
        if deadline is None:
            return IDLE_CHECK_S
        return min(IDLE_CHECK_S, max(0.0, deadline - time.monotonic()))


def send_to_all(outboxes: list[Outbox], message: object) -> None:
    """The same message to every rank."""
    for outbox in outboxes:
        outbox.send(message)


def main(process: Process, arguments: argparse.Namespace) -> None:
    Service(process).serve()


if __name__ == "__main__":
    run(lambda _: "scheduler", main, argparse.ArgumentParser(prog="python -m scheduler_proc"))
