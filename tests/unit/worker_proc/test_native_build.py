"""Kernels are built once, whole, by whoever comes first; without them the worker still computes."""

import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.config import cache_dir, kernels_choice
from runtime.errors import ConfigError
from tests.fakes import Script
from worker_proc.kernels import native_kernels
from worker_proc.native import build

_SOURCES = {
    "exports.cpp": """#include <tvm/ffi/function.h>
#include "forty.h"
int answer() { return forty() + TANDEM_DOT_BF16; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
""",
    "forty.cpp": """#include "forty.h"
int forty() { return 40; }
""",
    "forty.h": "int forty();\n",
}
_PORTABLE = build.VARIANTS[-1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and sources that compile in a moment."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in _SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "_FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TANDEM_KERNELS", raising=False)
    return cache_dir() / "kernels"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a compiler of this shell text first on the PATH."""

    def place(text: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        file = folder / "g++"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return place


def test_a_library_is_built_once_and_found_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.load(_PORTABLE).answer() == 40
    (path,) = cache.iterdir()
    compiled: list[str] = []
    monkeypatch.setattr(build, "_compile", lambda *args: compiled.append("again"))
    assert build.library(_PORTABLE) == path
    assert not compiled


def test_a_changed_source_variant_or_compiler_is_another_library(
    command: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command("echo 1")
    monkeypatch.setattr(build, "_compile", lambda compiler, variant, path: path.touch())
    names = {build.library(variant) for variant in build.VARIANTS}
    for name, text in _SOURCES.items():
        (build._FOLDER / name).write_text(text + "\n")
        names.add(build.library(_PORTABLE))
    (tmp_path / "bin/g++").write_text("#!/bin/sh\necho 2\n")
    names.add(build.library(_PORTABLE))
    assert len(names) == len(build.VARIANTS) + len(_SOURCES) + 1


@pytest.mark.parametrize("cores", [1, 2])
def test_sources_are_compiled_side_by_side_on_so_many_cores(
    cores: int, command: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler ends once as many run as there are cores, and says where more do."""
    monkeypatch.setattr(build, "usable_cpus", lambda: cores)
    running, real = tmp_path / "running", shutil.which("g++")
    path = os.environ["PATH"]
    running.mkdir()
    command(
        f"PATH='{path}'\n"
        f"case \" $* \" in *' -c '*) : > '{running}'/$$\n"
        f" until [ $(ls '{running}' | wc -l) -ge {cores} ]; do sleep 0.01; done\n"
        f" [ $(ls '{running}' | wc -l) = {cores} ] || exit 1\n"
        f' {real} "$@"; code=$?\n'
        f" [ {cores} = 1 ] && rm '{running}'/$$\n"
        " exit $code;; esac\n"
        f'exec {real} "$@"'
    )
    assert build.load(_PORTABLE).answer() == 40


def test_two_processes_may_build_at_once(
    cache: Path, command: Callable[[str], None], tmp_path: Path
) -> None:
    """The compiler waits until both have started it."""
    real = shutil.which("g++")
    path = os.environ["PATH"]
    (tmp_path / "gate").mkdir()
    command(
        f"PATH='{path}'\n"
        f"case $1 in --version) ;; *) : > '{tmp_path}'/gate/$PPID\n"
        f" until [ $(ls '{tmp_path}/gate' | wc -l) = 2 ]; do sleep 0.01; done;; esac\n"
        f'exec {real} "$@"'
    )
    code = (
        "import sys; from pathlib import Path; import torch; from worker_proc.native import build\n"
        "build._FOLDER = Path(sys.argv[1])\n"
        "print('answer', build.load(build.VARIANTS[-1]).answer(), flush=True)\n"
    )
    folder = str(build._FOLDER)
    with Script(code, folder) as first, Script(code, folder) as second:
        assert first.line("answer", 60) == second.line("answer", 60) == "40"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def assert_torch_computes(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.WARNING):
        assert native_kernels("portable") is None
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()


def test_without_a_compiler_torch_computes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_torch_computes(caplog, "there is no g++: install one")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (build._FOLDER / "forty.cpp").write_text("int x = ;\n")
    assert_torch_computes(caplog, "expected primary-expression")
    assert list(cache.iterdir()) == []


def test_a_compiler_that_cannot_start_is_no_crash(
    caplog: pytest.LogCaptureFixture, command: Callable[[str], None], tmp_path: Path
) -> None:
    command("")
    (tmp_path / "bin/g++").write_text("#!/nowhere/sh\n")
    assert_torch_computes(caplog, "can't be run")


@pytest.mark.parametrize("kind", ["a file in its place", "read-only"])
def test_without_a_usable_cache_folder_torch_computes(
    kind: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "read-only":  # Root writes through modes, so the refusal is the system's own error.

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
    else:
        cache.parent.parent.mkdir()
        cache.parent.write_text("")
    assert_torch_computes(caplog, "make it writable or set XDG_CACHE_HOME")


def test_a_library_that_cannot_be_loaded_is_named(
    caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    build.library(_PORTABLE).write_bytes(b"")
    assert_torch_computes(caplog, "delete it to have it built anew")


def test_the_fastest_variant_that_the_processor_runs_is_picked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(build, "_CPUINFO", cpuinfo)
    assert build.pick("auto").name == "portable"
    picked = []
    for variant in build.VARIANTS:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(sorted(variant.needs))}\n")
        picked.append(build.pick("auto").name)
    assert picked == [variant.name for variant in build.VARIANTS]
    with pytest.raises(ConfigError, match=r"TANDEM_KERNELS is 'avx512'.*it runs portable"):
        build.pick("avx512")


def test_the_environment_may_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_choice() == "auto"
    monkeypatch.setenv("TANDEM_KERNELS", "torch")
    assert native_kernels(kernels_choice()) is None
    monkeypatch.setenv("TANDEM_KERNELS", "avx51")
    with pytest.raises(ConfigError, match="did you mean 'avx512'"):
        kernels_choice()
