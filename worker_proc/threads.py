"""How many threads a worker computes with, and where they run."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> list[int]:
    """One CPU of each core that this process may run on, the first of its hardware threads."""
    cores = {_core(cpu): cpu for cpu in sorted(_affinity(), reverse=True)}
    return sorted(cores.values()) or list(range(os.cpu_count() or 1))


def default_threads() -> int:
    """The physical cores, or fewer where the container may use only so much of them."""
    return _within_quota(len(physical_cores()))


def usable_cpus() -> int:
    """As `default_threads`, hardware threads counted: for work that shares a core well."""
    return _within_quota(len(_affinity()) or os.cpu_count() or 1)


def cpus_for(num_threads: int) -> list[int]:
    """Where to bind each thread; empty where they are not one per core: the system then decides.

    Fewer threads than cores stay free, since another server may have been given as few.
    """
    cores = physical_cores()
    return cores if len(cores) == num_threads else []


def _affinity() -> set[int]:
    """The CPUs that this process may run on; none where the system doesn't say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _within_quota(count: int) -> int:
    """`count`, or fewer where the container may use only so much."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        return min(count, max(-(-int(quota) // int(period)), 1))
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return count


def _core(cpu: int) -> str:
    """A name that the hardware threads of one core share."""
    file = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return file.read_text().strip() if file.exists() else str(cpu)
