"""How many threads a worker computes with."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Cores that this process may run on, two hardware threads of one core counted once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = {_core(cpu) for cpu in usable}
    return len(cores) or os.cpu_count() or 1


def _core(cpu: int) -> str:
    """A name that the hardware threads of one core share."""
    file = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return file.read_text().strip() if file.exists() else str(cpu)
