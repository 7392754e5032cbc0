"""What this machine can do at most: memory read and peak operations, measured by limits.cpp."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """dram_read_gb_s: by all threads together. peak_tflop_s: by "bf16", "fp32" and "int8"."""

    dram_read_gb_s: float
    peak_tflop_s: dict[str, float]

    def or_better(self, other: "Limits") -> "Limits":
        """The higher of both, each figure by itself: a limit is what was reached once."""
        return Limits(
            dram_read_gb_s=max(self.dram_read_gb_s, other.dram_read_gb_s),
            peak_tflop_s={
                kind: max(peak, other.peak_tflop_s[kind])
                for kind, peak in self.peak_tflop_s.items()
            },
        )


class Meter:
    """Measures the limits as often as asked; compiled for this machine when made, by g++.

    Use as a context manager: the program is gone afterwards.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-limits-")
        self._program = Path(self._folder.name) / "limits"
        command = ["g++", *_FLAGS, str(_SOURCE), "-o", str(self._program)]
        subprocess.run(command, check=True)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._folder.cleanup()

    def measure(self) -> Limits:
        """The limits now, in a process of its own; some seconds."""
        command = [str(self._program), str(self._threads)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        return Limits(**json.loads(ended.stdout))
