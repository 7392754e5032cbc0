"""From launch to the first token, as a user sees it:  python -m bench.start [--json]

A fresh interpreter makes an `LLM` and asks it for a token; the clock runs from that interpreter's
start. The file
cache is warm: each model is started RUNS times and the fastest counts.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.checkpoint import dummy_checkpoint

RUNS = 4
MODELS = {"SmolLM2-135M-Instruct": None, "Qwen3-0.6B": "Qwen3-0.6B"}
"""Each model's name and, where it is not embedded, the preset whose shape its checkpoint has."""

SCRIPT = """
import sys
from runtime import LLM, SamplingParams
llm = LLM(sys.argv[1])
llm.generate("The capital of France is", SamplingParams(max_tokens=1))
print(" ".join(f"{name}={pid}" for name, pid in llm.pids.items()), flush=True)
sys.stdin.read()
"""


def measure(model: str) -> dict[str, Any]:
    """Seconds to the first token, and each process's peak memory in MiB at that moment."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as script:  # fmt: skip
        assert script.stdout is not None
        line = script.stdout.readline()
        seconds = time.perf_counter() - start
        pids = dict(entry.split("=") for entry in line.split())
        memory = {name.partition("-")[0]: peak_mb(int(pid)) for name, pid in pids.items()}
        script.communicate("")
    return {"first_token_s": seconds, "rss_mb": memory}


def peak_mb(pid: int) -> float:
    """The process's largest resident set so far, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name, preset in MODELS.items():
        path = name if preset is None else str(dummy_checkpoint(preset))
        runs = [measure(path) for _ in range(RUNS)]
        results[name] = min(runs, key=lambda run: run["first_token_s"])
    if arguments.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        memory = ", ".join(f"{part} {mb:.0f} MiB" for part, mb in result["rss_mb"].items())
        print(f"{name}: {result['first_token_s']:.2f} s to the first token; peak {memory}")


if __name__ == "__main__":
    main()
