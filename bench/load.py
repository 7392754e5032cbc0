"""Streams from an OpenAI-compatible server, all at once:
python -m bench.load URL --streams 512 --tokens 128 [--prompt-words 32] [--rounds 1]

Prints one line of JSON. A client of its own, so lean that it takes a small part of what a server
takes: one raw connection per stream, whose bytes are counted and not parsed. Each stream of a round
starts when all connections are open.
"""

import argparse
import asyncio
import itertools
import json
import random
import resource
import statistics
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

WORDS = ("time", "light", "water", "house", "river", "green", "small", "under", "story", "music")
EVENT = b'"finish_reason":null'
"""In every event that adds text."""
END = b"0\r\n\r\n"
TIMEOUT_S = 300.0


class StreamClient(asyncio.Protocol):
    """One connection, which asks for one stream after another."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        """Between one event and the next of a stream."""
        self.first_s: list[float] = []
        """From a request to its first event."""
        self.num_events = 0
        self.error: str | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self, request: bytes) -> "asyncio.Future[None]":
        """Send a request; done when its stream has ended, well or not."""
        self._done = asyncio.get_running_loop().create_future()
        self._has_head, self._is_first = False, True
        self._then_s = time.perf_counter()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        count = data.count(EVENT)
        if not self._has_head:
            self._has_head = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(data[:300].decode(errors="replace"))
                return
        if self._is_first and count:
            self.first_s.append(now_s - self._then_s)
            self._is_first = False
        elif count:
            self.gaps_s += [(now_s - self._then_s) / count] * count
        if count:
            self._then_s = now_s
        self.num_events += count
        if data.endswith(END):
            self._end(None if b"data: [DONE]" in data else "the stream ended without [DONE]")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was lost: {error}")

    def _end(self, error: str | None) -> None:
        if self._done is not None and not self._done.done():
            self.error = self.error or error
            self._done.set_result(None)


def request_of(netloc: str, words: int, tokens: int, rng: random.Random) -> bytes:
    """An HTTP request for one stream of `tokens` tokens, with a prompt like no other."""
    prompt = f"{rng.getrandbits(32)} " + " ".join(rng.choice(WORDS) for _ in range(words))
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(url: str, streams: int, tokens: int, words: int, rounds: int) -> dict[str, Any]:
    """What `rounds` times `streams` streams at once were like."""
    loop = asyncio.get_running_loop()
    address, rng = urlsplit(url), random.Random(streams)
    clients = [
        (await loop.create_connection(StreamClient, address.hostname, address.port))[1]
        for _ in range(streams)
    ]
    requests = [
        [request_of(address.netloc, words, tokens, rng) for _ in clients] for _ in range(rounds)
    ]
    start_s = time.perf_counter()
    for each in requests:
        asked = [client.ask(request) for client, request in zip(clients, each, strict=True)]
        await asyncio.wait_for(asyncio.gather(*asked), TIMEOUT_S)
    wall_s = time.perf_counter() - start_s
    errors = [client.error for client in clients if client.error is not None]
    gaps = list(itertools.chain.from_iterable(client.gaps_s for client in clients))
    return {
        "streams": streams,
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "wall_s": wall_s,
        "requests_per_s": streams * rounds / wall_s,
        "tokens": streams * tokens * rounds,
        "events": sum(client.num_events for client in clients),
        **_quantiles("ttft_ms", [t for client in clients for t in client.first_s]),
        **_quantiles("itl_ms", gaps),
        "client_cpu_s": time.process_time(),
    }


def _quantiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    if len(seconds) < 2:
        return {f"{name}_mean": None, f"{name}_p50": None, f"{name}_p99": None}
    cuts = statistics.quantiles(seconds, n=100)
    return {
        f"{name}_mean": statistics.fmean(seconds) * 1e3,
        f"{name}_p50": cuts[49] * 1e3,
        f"{name}_p99": cuts[98] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    a = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(uvloop.run(load(a.url, a.streams, a.tokens, a.prompt_words, a.rounds))))


if __name__ == "__main__":
    main()
