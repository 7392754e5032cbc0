"""The plan feed: plans in order, faults where the worker sees them, nothing left behind."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from runtime.errors import ConfigError, ProtocolError
from runtime.messages import Heartbeat, StepPlan
from runtime.transport import Duplex, Outbox, Transport
from tests.fakes import frame_of
from tests.plans import PlanMaker
from worker_proc.feed import PlanFeed


def plan() -> StepPlan:
    maker = PlanMaker(4)
    maker.admit(1, [5, 6, 7], [2])
    return maker.plan((1, 0, 3, True))


@contextmanager
def feeding() -> Iterator[tuple[PlanFeed, Outbox, Duplex]]:
    """A feed, the scheduler's end of its wire, and the other end of what it also waits for."""
    ours, theirs = Transport("worker-0"), Transport("scheduler")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        address = f"ipc://{folder}/plans"
        control, supervisor = ours.pair("control")
        with PlanFeed(ours, address, "scheduler → worker-0", control) as feed:
            yield feed, theirs.outbox(address, "scheduler → worker-0"), supervisor
        theirs.close()
        ours.close()


def next_of(feed: PlanFeed) -> StepPlan:
    while (taken := feed.take()) is None:
        feed.wait()
    return taken


def test_plans_come_whole_and_in_order() -> None:
    with feeding() as (feed, scheduler, _):
        for _ in range(3):
            scheduler.send(plan())
        for _ in range(3):
            assert np.array_equal(next_of(feed).segments, plan().segments)
        assert feed.take() is None


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        (frame_of(plan(), 1, "scheduler"), "number 0 of epoch 0 was due"),
        (frame_of(Heartbeat(), 0, "scheduler"), "sent a Heartbeat to a worker"),
        (b"\xc1", "undecodable frame"),
    ],
)
def test_a_fault_of_the_wire_is_raised_where_plans_are_taken(frame: bytes, fault: str) -> None:
    with feeding() as (feed, scheduler, _):
        scheduler.send_frame(frame)
        with pytest.raises(ProtocolError, match=fault):
            next_of(feed)


def test_an_address_that_is_taken_is_raised_there_too() -> None:
    with feeding() as (_, scheduler, _):
        address = scheduler.raw.getsockopt_string(32)  # ZMQ_LAST_ENDPOINT
        transport = Transport("worker-1")
        control, _ = transport.pair("control")
        taken = pytest.raises(ConfigError, match="in use")
        with PlanFeed(transport, address, "plans", control) as second, taken:
            next_of(second)
        transport.close()


def test_waiting_ends_when_the_other_socket_has_something_to_read() -> None:
    with feeding() as (feed, _, supervisor):
        supervisor.send(Heartbeat())
        feed.wait()
        assert feed.take() is None


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with feeding() as (feed, scheduler, _):
        scheduler.send(plan())
        next_of(feed)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
