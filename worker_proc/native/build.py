"""Kernels compiled for this processor at first use and kept in the cache folder.

Rules: a library appears under its name whole or not at all, so that two processes may build the
same one at once; the name tells the source, the compiler and the flags, so nothing stale is loaded.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tvm_ffi import Module, libinfo, load_module

from runtime.config import cache_dir
from runtime.errors import ConfigError
from worker_proc.threads import usable_cpus

_FOLDER = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")
_COMPILERS = ("g++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread")
# Rows are written as numbers and read as words; equal names of two variants must stay apart.
_RULES = ("-fno-strict-aliasing", "-fvisibility=hidden", "-Wno-psabi")
_BUILD_TIMEOUT_S = 300
_UNUSED_S = 30 * 24 * 3600
_SCRATCH = ".building-"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "fma"})

log = logging.getLogger(__name__)


class NoKernels(Exception):
    """Kernels can't be had here: its text says why, and the way out. Torch computes instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compile the source.

    name: as TANDEM_KERNELS has it. needs: the processor's features, by their names in
    /proc/cpuinfo. vector_bytes: of a register. dot_bf16: whether pairs of bfloat16 are multiplied
    as they are. dot_int8: whether fours of 8-bit numbers are.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    vector_bytes: int
    dot_bf16: bool = False
    dot_int8: bool = False

    def arguments(self) -> tuple[str, ...]:
        """What the compiler is told beside file names."""
        defines = (
            f"-DTANDEM_VECTOR_BYTES={self.vector_bytes}",
            f"-DTANDEM_DOT_BF16={int(self.dot_bf16)}",
            f"-DTANDEM_DOT_INT8={int(self.dot_int8)}",
        )
        return (*_FLAGS, *_RULES, *self.flags, *defines)


VARIANTS = (
    Variant(
        name="avx512bf16",
        needs=_AVX512 | {"avx512_bf16", "avx512_vnni"},
        flags=(
            "-march=x86-64-v4",
            "-mavx512bf16",
            "-mavx512vnni",
            "-mprefer-vector-width=512",
        ),
        vector_bytes=64,
        dot_bf16=True,
        dot_int8=True,
    ),
    Variant(
        name="avx512vnni",
        needs=_AVX512 | {"avx512_vnni"},
        flags=("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
        vector_bytes=64,
        dot_int8=True,
    ),
    Variant(
        name="avx512",
        needs=_AVX512,
        flags=("-march=x86-64-v4", "-mprefer-vector-width=512"),
        vector_bytes=64,
    ),
    Variant(
        name="avx2",
        needs=frozenset({"avx2", "fma", "bmi2", "f16c", "movbe"}),
        flags=("-march=x86-64-v3",),
        vector_bytes=32,
    ),
    Variant(name="portable", needs=frozenset(), flags=(), vector_bytes=16),
)
"""The fastest first."""


def runnable() -> list[Variant]:
    """Those that this processor runs, the fastest first; the last is `portable`."""
    features = _features()
    return [variant for variant in VARIANTS if variant.needs <= features]


def pick(kernels: str) -> Variant:
    """The variant so called, "auto" for the fastest. Raises ConfigError where it can't run here."""
    found = runnable()
    if kernels == "auto":
        return found[0]
    for variant in found:
        if variant.name == kernels:
            return variant
    raise ConfigError(
        f"TANDEM_KERNELS is {kernels!r}, which this processor can't run: it runs "
        + ", ".join(variant.name for variant in found)
    )


def load(variant: Variant) -> Module:
    """The kernels, built if need be (some seconds). Raises NoKernels."""
    path = library(variant)
    try:
        return load_module(str(path))
    except (RuntimeError, OSError) as e:
        raise NoKernels(f"{path} can't be loaded ({e}): delete it to have it built anew") from None


def library(variant: Variant) -> Path:
    """The shared library of `variant`, built now or in an earlier start. Raises NoKernels."""
    compiler = _compiler()
    try:
        folder = cache_dir() / "kernels"
    except RuntimeError as e:  # no home
        raise NoKernels(f"there is no cache folder ({e}): set XDG_CACHE_HOME to a place") from None
    target = folder / f"{variant.name}-{_key(compiler, variant)}.so"
    try:
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
            built = Path(scratch) / target.name
            _compile(compiler, variant, built)
            with built.open("rb") as file:
                os.fsync(file.fileno())  # a name without its content would crash every later start
            built.rename(target)
    except OSError as e:
        raise NoKernels(
            f"the cache folder {target.parent} can't be used ({e.strerror or e}):"
            " make it writable or set XDG_CACHE_HOME to another place"
        ) from None
    return target


def _sweep(folder: Path) -> None:
    """Remove what builds left that were killed, and libraries that nobody has used for a month."""
    now = time.time()
    for path in folder.iterdir():
        try:
            if path.name.startswith(_SCRATCH) and now - path.stat().st_mtime > 2 * _BUILD_TIMEOUT_S:
                shutil.rmtree(path)
            elif path.suffix == ".so" and now - path.stat().st_atime > _UNUSED_S:
                path.unlink()
        except OSError:
            continue  # another start removes it, or may


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    """Beside `target`, an object of every source, as many at once as there are CPUs."""
    log.info("building the %s kernels in %s", variant.name, target.parent.parent)
    sources = sorted(_FOLDER.glob("*.cpp"))
    objects = [target.with_name(f"{source.stem}.o") for source in sources]
    includes = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    options = (*variant.arguments(), *(f"-isystem{path}" for path in includes))

    def translate(source: Path, made: Path) -> None:
        _run_compiler([compiler, *options, "-c", str(source), "-o", str(made)])

    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(translate, sources, objects))
    library = Path(libinfo.find_libtvm_ffi())
    linked = (*map(str, objects), "-o", str(target), f"-L{library.parent}", "-ltvm_ffi")
    _run_compiler([compiler, "-shared", "-pthread", *linked])


def _run_compiler(command: Sequence[str]) -> None:
    ended = _run(command)
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["no message"]
        fault = next((line for line in lines if "error" in line), lines[0])
        raise NoKernels(f"{command[0]} failed ({fault}): is it a g++ of version 11 or later?")


def _compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NoKernels(f"there is no {_COMPILERS[0]}: install one")


def _key(compiler: str, variant: Variant) -> str:
    """Changes with all that the library is made of."""
    ended = _run([compiler, "--version"])
    headers = Path(libinfo.find_include_path()) / "tvm" / "ffi" / "c_api.h"
    sources = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]*"))]
    digest = hashlib.sha256()
    for part in (*sources, ended.stdout, *variant.arguments(), headers.read_text()):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:24]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NoKernels(f"{command[0]} can't be run ({e})") from None


def _features() -> frozenset[str]:
    """The processor's, by the names that Linux gives them; none where it isn't Linux on x86."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
