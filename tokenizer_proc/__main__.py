"""`python -m tokenizer_proc`: the tokenizer's shell. Clients on one side, the scheduler on the
other.
"""

import argparse
import time

from runtime.messages import Begin
from runtime.process import ENDPOINT_FILE, Process, Stopped, run
from runtime.transport import Poller, Router
from tokenizer_proc.core import Forget, ToClient, TokenizerCore, ToScheduler
from tokenizer_proc.loading import load_tokenizer
from tokenizer_proc.tokenizer import Tokenizer

TICK_S = 1.0
SLICE_S = 0.05


class Service:
    """The core among its wires."""

    def __init__(
        self, process: Process, clients: Router, tokenizer: Tokenizer, begin: Begin
    ) -> None:
        instance, transport = process.instance, process.transport
        self._process = process
        self._clients = clients
        self._news = transport.inbox(instance.wire("tokenizer-0"), "scheduler → tokenizer-0")
        self._scheduler = transport.outbox(instance.wire("scheduler"), "tokenizer-0 → scheduler")
        self._core = TokenizerCore(
            tokenizer,
            index=0,
            model=instance.model.name,
            server_id=instance.server_id,
            max_seq_len=begin.max_seq_len,
            vocab_size=begin.vocab_size,
        )
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
        poller = Poller(self._news, self._clients, self._process.control)
        next_tick = 0.0
        while True:
            ready = poller.wait(TICK_S)
            self._process.check_control()
            if self._news in ready:
                for message in self._news.drain():
                    self._core.on_scheduler(message)
            if self._clients in ready:
                self._hear_clients()
            now = time.monotonic()
            if now >= next_tick:
                self._core.tick()
                next_tick = now + TICK_S
            self._act()

    def _hear_clients(self) -> None:
        """What clients sent, for SLICE_S at most: tokenizing for one must not silence the
        others.
        """
        end = time.monotonic() + SLICE_S
        for client, frame in self._clients.drain():
            self._core.on_client_frame(client, frame)
            self._act()
            if time.monotonic() >= end:
                break

    def _act(self) -> None:
        """Send what the core wants sent; a client that can't be reached is gone."""
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case ToScheduler(message):
                        self._scheduler.send(message)
                    case Forget(client):
                        self._clients.forget(client)
                    case ToClient(client, message):
                        if not self._clients.send(client, message):
                            self._core.on_client_gone(client)


def listen(process: Process) -> Router:
    """The public endpoint; where it is goes into the instance's folder."""
    clients = process.transport.router(process.instance.endpoint)
    (process.instance.folder / ENDPOINT_FILE).write_text(clients.address)
    return clients


def main(process: Process, arguments: argparse.Namespace) -> None:
    clients = listen(process)  # first: an address in use is told before anybody loads for long
    tokenizer = load_tokenizer(process.instance.tokenizer)
    Service(process, clients, tokenizer, process.loaded()).serve()


if __name__ == "__main__":
    run(lambda _: "tokenizer-0", main, argparse.ArgumentParser(prog="python -m tokenizer_proc"))
