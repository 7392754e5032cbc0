"""What this machine computes fast, and how much of its memory is free."""

from pathlib import Path

import torch

from runtime.errors import InternalError

_CGROUP = Path("/sys/fs/cgroup")


def computes_bfloat16_fast() -> bool:
    """Whether the processor has bfloat16 products (AVX512_BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_dtype(option: str, checkpoint_dtype: str) -> torch.dtype:
    """The dtype of weights, activations and KV. option: "auto", "float32" or "bfloat16".

    auto is the checkpoint's own where it is computed fast here, else float32.
    """
    if option == "auto":
        bfloat16 = checkpoint_dtype == "bfloat16" and computes_bfloat16_fast()
        return torch.bfloat16 if bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[option]


def free_memory_bytes() -> int:
    """What may still be allocated without swapping, the container's limit included."""
    free = _available_bytes()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used + _cached_bytes(), 0))
    return free


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InternalError("/proc/meminfo has no MemAvailable: set num_page_override")


def _cached_bytes() -> int:
    """File pages that count as the container's use but are given back when asked for."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None where there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
