"""Streaming over HTTP, as clients see it:  python -m bench.serve [--json] [--streams 1 64 512 2000]

One stream runs on a model of two layers, more of them on a worker that computes nothing and takes 5
ms for a step. Time to the first token and between tokens are the client's, CPU is what each process
used while the streams ran, divided by their tokens. The client (bench.load) runs on the same
machine and takes its share of it: its CPU is shown too.
`added_ttft_ms_p50`: what HTTP and tokenizer add to the first token of one stream. Requests follow
one another; of each, the client's time to its first token less the scheduler's, from the request's
arrival there until it has sent that token on (`first_token_s` of its statistics); the median.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.load import StreamClient, request_of
from runtime import AsyncClient
from runtime.config import child_environment, configs_dir, from_options
from runtime.server import Server

STEP_MS = 5
TOKENS = {1: 256, 64: 256, 512: 128, 2000: 128}
"""Of each stream, by how many there are."""
ROUNDS = {1: 20, 64: 3}
"""How many streams follow one another on a connection; one where nothing is said."""
SHOWN = ("http", "tokenizer", "scheduler", "worker")
PAGES_PER_STREAM = 256
PROMPT_WORDS = 32
ADDED_ROUNDS = 300
"""Requests that `added_ttft_ms` asks."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TWO_LAYERS = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
"""How the model of two layers differs from the embedded one, whose vocabulary it has."""


@contextmanager
def server(**options: Any) -> Iterator[Server]:
    """A running server that listens at any free port."""
    running = Server(from_options({"http_port": 0, "log_level": "warning", **options}))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@contextmanager
def two_layer_server() -> Iterator[Server]:
    """A server of a model that takes next to no time."""
    preset = json.loads((configs_dir() / "models" / "SmolLM2-135M-Instruct.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**preset, **TWO_LAYERS}))
        with server(
            model=folder, load_format="dummy", tokenizer="SmolLM2-135M-Instruct",
            num_page_override=8192, threads=1,
        ) as running:  # fmt: skip
            yield running


def simulated_server(streams: int) -> Any:
    """A server whose worker takes STEP_MS for any step, with room for so many streams."""
    return server(
        simulated=f"--answers echo --vocab-size 49152 --step-ms {STEP_MS}",
        max_running_req=min(4096, max(64, streams)),
        num_page_override=max(1 << 16, streams * PAGES_PER_STREAM),
        max_extend_tokens=8192,
    )


def measure(running: Server, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One load on a server that has seen a small one before."""
    ask(running, streams, 2, 1)
    before = cpu_s(running)
    result = ask(running, streams, tokens, rounds)
    used = {name: seconds - before[name] for name, seconds in cpu_s(running).items()}
    count = result["tokens"]
    each = {name: used.get(name, 0.0) * 1e6 / count for name in SHOWN}
    result["cpu_us_per_token"] = each
    result["client_cpu_us_per_token"] = result.pop("client_cpu_s") * 1e6 / count
    result["tokens_per_s"] = count / result["wall_s"]
    return result


def ask(running: Server, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """What bench.load says."""
    command = [
        sys.executable, "-m", "bench.load", str(running.http_url), "--streams", str(streams),
        "--tokens", str(tokens), "--rounds", str(rounds),
    ]  # fmt: skip
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cpu_s(running: Server) -> dict[str, float]:
    """Seconds of CPU that each kind of process has used, in all its threads."""
    used: dict[str, float] = {}
    for name, pid in running.supervisor.pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        kind = name.partition("-")[0]
        used[kind] = used.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return used


def run(streams: int) -> dict[str, Any]:
    """The figures of so many streams at once."""
    tokens, rounds = TOKENS.get(streams, 64), ROUNDS.get(streams, 1)
    with two_layer_server() if streams == 1 else simulated_server(streams) as running:
        result = measure(running, streams, tokens, rounds)
        if streams == 1:
            result["added_ttft_ms_p50"] = asyncio.run(added_ttft_ms(running))
    return result


async def added_ttft_ms(running: Server) -> float:
    """What HTTP and tokenizer add to the first token of one stream, in the median."""
    address, rng = urlsplit(str(running.http_url)), random.Random(1)
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(StreamClient, address.hostname, address.port)
    added_s: list[float] = []
    async with await AsyncClient.connect(str(running.endpoint)) as client:
        stats = await client.stats()
        for _ in range(ADDED_ROUNDS):
            await stream.ask(request_of(address.netloc, PROMPT_WORDS, 2, rng))
            if stream.error is not None:
                raise RuntimeError(stream.error)
            before, stats = stats, await client.stats()
            added_s.append(stream.first_s[-1] - (stats["first_token_s"] - before["first_token_s"]))
    transport.close()
    return statistics.median(added_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=list(TOKENS))
    arguments = parser.parse_args()
    results = {}
    for streams in arguments.streams:
        results[str(streams)] = result = run(streams)
        if not arguments.json:
            show(streams, result)
    if arguments.json:
        print(json.dumps({"streams": results}))


def show(streams: int, result: dict[str, Any]) -> None:
    ms = {k: "–" if v is None else f"{v:.2f}" for k, v in result.items() if "_ms_" in k}
    cpu = ", ".join(f"{name} {us:.0f}" for name, us in result["cpu_us_per_token"].items())
    print(
        f"{streams} streams: {result['requests_per_s']:.1f} requests/s,"
        f" {result['tokens_per_s']:.0f} tokens/s; first token {ms['ttft_ms_p50']} ms"
        f" (p99 {ms['ttft_ms_p99']}), then one each {ms['itl_ms_p50']} ms"
        f" (p99 {ms['itl_ms_p99']}); CPU per token in µs: {cpu}, client"
        f" {result['client_cpu_us_per_token']:.0f}; {result['errors']} errors"
    )
    if (added := result.get("added_ttft_ms_p50")) is not None:
        print(f"  HTTP and tokenizer add {added:.2f} ms to the first token, in the median")
    if result["first_error"]:
        print(f"  the first error: {result['first_error']}")


if __name__ == "__main__":
    main()
