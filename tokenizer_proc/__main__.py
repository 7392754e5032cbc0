"""`python -m tokenizer_proc`: the tokenizer's shell. Clients on one side, the scheduler on the
other.
"""

import argparse
import sys
import time
from pathlib import Path

from runtime.instance import Instance
from runtime.messages import Begin, Drain
from runtime.process import ENDPOINT_FILE, Process, Stopped, run
from runtime.sampling import SamplingParams
from runtime.transport import Poller, Router
from tokenizer_proc.actions import Convert, Forget, ToClient, ToScheduler
from tokenizer_proc.core import TokenizerCore
from tokenizer_proc.generation import read_generation_config, sampling_defaults
from tokenizer_proc.jobs import JobQueue, JobThread
from tokenizer_proc.loading import load_tokenizer
from tokenizer_proc.tokenizer import Tokenizer

TICK_S = 1.0
SWITCH_S = 0.001
"""How long the thread that converts may keep the interpreter from the main thread."""
SLICE_S = 0.01
"""How long clients are heard before the scheduler's news get their turn."""


class Service:
    """The core among its wires."""

    def __init__(
        self, process: Process, index: int, clients: Router, tokenizer: Tokenizer,
        defaults: SamplingParams, begin: Begin,
    ) -> None:  # fmt: skip
        instance, transport, name = process.instance, process.transport, process.name
        self._process = process
        self._clients = clients
        self._news = transport.inbox(instance.wire(name), f"scheduler → {name}")
        self._scheduler = transport.outbox(instance.wire("scheduler"), f"{name} → scheduler")
        # All are loaded, so all listen.
        files = [_file(instance, i) for i in range(instance.config.server.num_tokenizers)]
        self._core = TokenizerCore(
            tokenizer,
            index=index,
            endpoints=tuple(f.read_text() for i, f in enumerate(files) if i != index),
            model=instance.model.name,
            server_id=instance.server_id,
            max_seq_len=begin.max_seq_len,
            vocab_size=begin.vocab_size,
            max_jobs=instance.config.scheduler.max_queued_req,
            defaults=defaults,
        )
        self._drain: Drain | None = None
        """While the requests that are here may end; then `_drain_end_s` is when they must."""
        self._drain_end_s = 0.0
        self._jobs = JobQueue()
        self._thread = JobThread(self._core.texts.convert)
        process.ready(
            f"{tokenizer.vocab_size} tokens, sequences of up to {begin.max_seq_len} tokens, at"
            f" {self._clients.address}"
        )

    def serve(self) -> None:
        """Until the supervisor ends it; then whoever waits is told why."""
        try:
            self._loop()
        except Stopped as stop:
            self._core.shut_down(stop.reason or "the server was shut down")
            self._act()
            self._clients.close()
            raise

    def _loop(self) -> None:
        poller = Poller(self._news, self._clients, self._process.control, self._thread.fileno())
        next_tick = 0.0
        while True:
            ready = poller.wait(self._patience())
            if self._process.control in ready:
                for message in self._process.check_control():
                    if isinstance(message, Drain):
                        self._begin_to_drain(message)
            if self._news in ready:
                for message in self._news.drain():
                    self._core.on_scheduler(message)
            if self._thread.fileno() in ready:
                self._core.on_converted(*self._thread.result())
            if self._clients in ready:
                self._hear_clients()
            now = time.monotonic()
            if now >= next_tick:
                self._core.tick()
                next_tick = now + TICK_S
            if self._drain is not None:
                self._go_on_draining(self._drain, now)
            self._act()

    def _patience(self) -> float:
        """How long nothing needs to be done unless something comes."""
        if self._drain is None:
            return TICK_S
        return min(TICK_S, max(0.0, self._drain_end_s - time.monotonic()))

    def _begin_to_drain(self, drain: Drain) -> None:
        self._drain, self._drain_end_s = drain, time.monotonic() + drain.timeout_s
        self._core.drain()

    def _go_on_draining(self, drain: Drain, now: float) -> None:
        """Say so when the last request has ended, or has had its time."""
        if self._core.num_requests and now >= self._drain_end_s:
            self._core.shut_down(drain.end)
        if not self._core.num_requests:
            self._act()
            self._process.drained()
            self._drain = None

    def _hear_clients(self) -> None:
        """What clients sent, for SLICE_S at most: tokenizing for one must not silence the
        others.
        """
        end = time.monotonic() + SLICE_S
        for client, frames in self._clients.drain():
            for frame in frames:
                self._core.on_client_frame(client, frame, time.monotonic_ns())
            self._act()
            if time.monotonic() >= end:
                break

    def _act(self) -> None:
        """Send what the core wants sent; a client that can't be reached is gone.

        To the scheduler all of it together: what came together is to be scheduled together.
        """
        while actions := self._core.take_actions():
            if messages := [a.message for a in actions if isinstance(a, ToScheduler)]:
                self._scheduler.send(*messages)
            for action in actions:
                match action:
                    case Convert(job):
                        self._jobs.put(job)
                    case Forget(client):
                        self._clients.forget(client)
                    case ToClient(client, message):
                        if not self._clients.send(client, message):
                            self._core.on_client_gone(client)
        self._give_out_jobs()

    def _give_out_jobs(self) -> None:
        while not self._thread.is_busy and (job := self._jobs.take()) is not None:
            if job.is_wanted:
                self._thread.start(job)
            else:
                self._core.on_converted(job, "")


def listen(process: Process, index: int) -> Router:
    """Where this tokenizer's clients connect: the first has the public endpoint, and tells of the
    others. The addresses go into the instance's folder.
    """
    instance = process.instance
    public = instance.endpoint
    if index == 0:
        address = public
    elif public.startswith("tcp://"):
        address = f"{public.rpartition(':')[0]}:0"
    else:
        address = instance.wire(f"public-{index}")
    clients = process.transport.router(address)
    _file(instance, index).write_text(clients.address)
    return clients


def _file(instance: Instance, index: int) -> Path:
    """Where the address of tokenizer number `index` is written."""
    return instance.folder / (ENDPOINT_FILE if index == 0 else f"{ENDPOINT_FILE}-{index}")


def main(process: Process, arguments: argparse.Namespace) -> None:
    sys.setswitchinterval(SWITCH_S)
    # First: an address in use is told before anybody loads for long.
    clients = listen(process, arguments.index)
    instance = process.instance
    choice = instance.config.model.generation_config
    generation = read_generation_config(choice, instance.model, instance.tokenizer)
    defaults = sampling_defaults(generation)
    tokenizer = load_tokenizer(instance.tokenizer, generation)
    Service(process, arguments.index, clients, tokenizer, defaults, process.loaded()).serve()


def parser() -> argparse.ArgumentParser:
    """The command line beside what every process takes."""
    result = argparse.ArgumentParser(prog="python -m tokenizer_proc")
    result.add_argument("--index", type=int, default=0, help="this tokenizer's number")
    return result


if __name__ == "__main__":
    run(lambda arguments: f"tokenizer-{arguments.index}", main, parser())
