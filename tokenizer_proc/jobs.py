"""Conversions that take long, done beside the main thread: one after the other, clients in turns.

Rule: only `JobThread` knows of threads; the queue and what becomes of a result are the main
thread's.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenizer_proc.texts import Encoded, TextCall


@dataclass(slots=True, eq=False)
class Job:
    """One call to convert. arrival: as in Submit. is_wanted: whether anybody waits for it."""

    client: bytes
    call: TextCall
    arrival: int
    is_wanted: bool = True


Outcome = Encoded | str | Exception
"""What `Texts.convert` gave or raised."""


class JobQueue:
    """Jobs that wait; a client with many doesn't keep the others from their turn."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, deque[Job]] = {}
        """In order of the clients' turns."""

    def put(self, job: Job) -> None:
        """The job waits behind those of its client."""
        self._by_client.setdefault(job.client, deque()).append(job)

    def take(self) -> Job | None:
        """The next one, None if there is none; its client's next turn is after all others'."""
        if not self._by_client:
            return None
        client = next(iter(self._by_client))
        jobs = self._by_client.pop(client)
        job = jobs.popleft()
        if jobs:
            self._by_client[client] = jobs
        return job


class JobThread:
    """A thread that converts the job it is given. `fileno` can be read once there are results."""

    def __init__(self, convert: Callable[[TextCall], Encoded | str]) -> None:
        self.is_busy = False
        self._convert = convert
        self._given: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="texts", daemon=True).start()

    def fileno(self) -> int:
        return self._event

    def start(self, job: Job) -> None:
        """Convert this one; not while it is busy."""
        self.is_busy = True
        self._given.put(job)

    def result(self) -> tuple[Job, Outcome]:
        """The job's outcome, once `fileno` can be read; the thread is free again."""
        os.eventfd_read(self._event)
        self.is_busy = False
        return self._done.get()

    def _run(self) -> None:
        while True:
            job = self._given.get()
            outcome: Outcome
            try:
                outcome = self._convert(job.call)
            except Exception as e:  # it is this call's alone
                outcome = e
            self._done.put((job, outcome))
            os.eventfd_write(self._event, 1)
