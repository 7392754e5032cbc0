"""The worker's exchange: plans and results in order, faults where the worker sees them, nothing
left behind.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from runtime.errors import ConfigError, PeerError, ProtocolError
from runtime.messages import Heartbeat, StepPlan, StepResult
from runtime.transport import INTERNAL_HWM, Duplex, Inbox, Outbox, Poller, Transport
from tests.fakes import frame_of
from tests.plans import PlanMaker
from worker_proc.exchange import Exchange


def plan() -> StepPlan:
    maker = PlanMaker(4)
    maker.admit(1, [5, 6, 7], [2])
    return maker.plan((1, 0, 3, True))


def result(step: int) -> StepResult:
    return StepResult(step=step, tokens=np.array([step], np.int32), started_s=0.0, ended_s=1.0)


class Ends(NamedTuple):
    """An exchange, the scheduler's ends of its wires, and the other end of what it waits for."""

    exchange: Exchange
    plans: Outbox
    results: Inbox
    supervisor: Duplex


@contextmanager
def transports() -> Iterator[tuple[Transport, Transport, str]]:
    """The worker's, the scheduler's, and a folder for the addresses of their wires."""
    ours, theirs = Transport("worker-0"), Transport("scheduler")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield ours, theirs, folder
        theirs.close()
        ours.close()


def exchange_of(ours: Transport, folder: str, control: Duplex, answers: bool = True) -> Exchange:
    """answers: whether this rank's results are sent."""
    return Exchange(
        lambda: ours.inbox(f"ipc://{folder}/plans", "scheduler → worker-0"),
        (lambda: ours.outbox(f"ipc://{folder}/results", "worker-0 → scheduler"))
        if answers
        else None,
        control,
    )


@contextmanager
def exchanging(answers: bool = True) -> Iterator[Ends]:
    with transports() as (ours, theirs, folder):
        control, supervisor = ours.pair("control")
        inbox = theirs.inbox(f"ipc://{folder}/results", "worker-0 → scheduler")
        with exchange_of(ours, folder, control, answers) as exchange:
            plans = theirs.outbox(f"ipc://{folder}/plans", "scheduler → worker-0")
            yield Ends(exchange, plans, inbox, supervisor)


def received(inbox: Inbox, count: int) -> list[int]:
    """The steps of the next `count` results."""
    steps: list[int] = []
    poller = Poller(inbox)
    while len(steps) < count:
        assert poller.wait(10.0), f"only {steps} came"
        steps += [message.step for message in inbox.drain()]
    return steps


def next_of(exchange: Exchange) -> StepPlan:
    while (taken := exchange.take()) is None:
        exchange.wait()
    return taken


def test_plans_come_whole_and_in_order() -> None:
    with exchanging() as (exchange, scheduler, _, _):
        for _ in range(3):
            scheduler.send(plan())
        for _ in range(3):
            assert np.array_equal(next_of(exchange).segments, plan().segments)
        assert exchange.take() is None


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        (frame_of(plan(), 1, "scheduler"), "number 0 of epoch 0 was due"),
        (frame_of(Heartbeat(), 0, "scheduler"), "sent a Heartbeat to a worker"),
        (b"\xc1", "undecodable frame"),
    ],
)
def test_a_fault_of_the_wire_is_raised_where_plans_are_taken(frame: bytes, fault: str) -> None:
    with exchanging() as (exchange, scheduler, _, _):
        scheduler.send_frames(frame)
        with pytest.raises(ProtocolError, match=fault):
            next_of(exchange)


def test_an_address_that_is_taken_is_raised_there_too() -> None:
    with exchanging() as (_, scheduler, _, _):
        address = scheduler.raw.getsockopt_string(32)  # ZMQ_LAST_ENDPOINT
        transport = Transport("worker-1")
        control, _ = transport.pair("control")
        taken = pytest.raises(ConfigError, match="in use")
        with Exchange(lambda: transport.inbox(address, "plans"), None, control) as second, taken:
            next_of(second)
        transport.close()


def test_waiting_ends_when_the_other_socket_has_something_to_read() -> None:
    with exchanging() as (exchange, _, _, supervisor):
        supervisor.send(Heartbeat())
        exchange.wait()
        assert exchange.take() is None


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with exchanging() as (exchange, scheduler, _, _):
        scheduler.send(plan())
        next_of(exchange)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_results_go_out_in_order_while_nobody_waits() -> None:
    with exchanging() as ends:
        for step in range(50):
            ends.exchange.give(result(step))
        assert received(ends.results, 50) == list(range(50))


def test_what_was_given_is_sent_before_the_exchange_ends() -> None:
    with transports() as (ours, theirs, folder):
        results = theirs.inbox(f"ipc://{folder}/results", "results")
        control, _ = ours.pair("control")
        with exchange_of(ours, folder, control) as exchange:
            for step in range(20):
                exchange.give(result(step))
        assert received(results, 20) == list(range(20))


def test_a_rank_that_does_not_answer_sends_nothing() -> None:
    with exchanging(answers=False) as ends:
        ends.exchange.give(result(0))
        ends.plans.send(plan())
        next_of(ends.exchange)
        assert not list(ends.results.drain())


def test_a_reader_that_is_stuck_is_raised_where_plans_are_taken() -> None:
    with transports() as (ours, _, folder):
        control, _ = ours.pair("control")
        with exchange_of(ours, folder, control) as exchange:  # nobody reads its results
            for step in range(INTERNAL_HWM + 1):
                exchange.give(result(step))
            with pytest.raises(PeerError, match="worker-0 → scheduler is full"):
                next_of(exchange)
