"""Whether this machine has the native kernels, and which."""

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """name: of the variant, as TANDEM_KERNELS has it. module: the functions of exports.cpp."""

    name: str
    module: Any


def native_kernels(chosen: str) -> Kernels | None:
    """The kernels, built if need be; None where torch has to compute: the log says why.

    chosen: as TANDEM_KERNELS. Raises ConfigError where the processor can't run those asked for.
    """
    if chosen == "torch":
        return None
    try:
        from worker_proc.native import build
    except ImportError as e:
        log.warning("computing with torch, slower than native kernels: %s", e)
        return None
    variant = build.pick(chosen)
    try:
        return Kernels(name=variant.name, module=build.load(variant))
    except build.NoKernels as e:
        log.warning("computing with torch, slower than native kernels: %s", e)
        return None
