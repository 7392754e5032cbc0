"""Who may import whom, and where the outside world may be touched: read from the source, by AST."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(
    p.name
    for p in ROOT.iterdir()
    if p.name == "runtime" or (p.name.endswith("_proc") and p.is_dir())
)
OURS = {*ROOMS, "launch", "configs", "tests", "bench", "examples"}
ENVIRONMENT_READERS = {"runtime/config.py"}
"""Where os.environ may be read; a library that needs more is named here with the reason."""
SOCKETS = {"runtime/transport.py", "runtime/async_transport.py"}
"""Where zmq may be imported: of processes, and of clients."""
TORCHLESS = ("runtime", "scheduler_proc", "tokenizer_proc", "http_proc", "launch.py")


def sources() -> list[str]:
    """Every Python file of the rooms and the entry point, relative to the root."""
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    files += [p for p in (ROOT / "launch.py",) if p.is_file()]
    return sorted(p.relative_to(ROOT).as_posix() for p in files)


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def imported(module: ast.Module) -> Iterator[str]:
    """Every module imported anywhere in a file, also by importlib.import_module("name")."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def packages(file: str) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.split(".")[0] for name in imported(tree(file))}


def environment_reads(module: ast.Module) -> list[int]:
    """Lines that touch os.environ or os.getenv, under any spelling of the import."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(module)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]


@pytest.mark.parametrize("file", sources())
def test_a_room_imports_only_itself_and_runtime(file: str) -> None:
    room = file.split("/")[0]
    allowed = {room} if room == "runtime" else {room, "runtime"}
    assert packages(file) & OURS <= allowed


@pytest.mark.parametrize("file", [f for f in sources() if f.split("/")[0] in TORCHLESS])
def test_only_workers_import_torch(file: str) -> None:
    assert "torch" not in packages(file)


@pytest.mark.parametrize("file", sources())
def test_sockets_are_touched_in_the_transport_only(file: str) -> None:
    assert "zmq" not in packages(file) or file in SOCKETS


@pytest.mark.parametrize("file", sources())
def test_the_environment_is_read_in_the_configuration_only(file: str) -> None:
    lines = environment_reads(tree(file))
    assert not lines or file in ENVIRONMENT_READERS, f"lines {lines}"


@pytest.mark.parametrize("file", sources())
def test_nothing_is_pickled(file: str) -> None:
    assert not packages(file) & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}


def test_the_rules_see_what_they_look_for() -> None:
    code = ast.parse(
        "def f():\n import torch.nn as t\n from zmq import Context\n"
        " importlib.import_module('pickle')\n os.environ['A']\n"
        "from os import getenv\n"
    )
    assert set(imported(code)) == {"torch.nn", "zmq", "pickle", "os"}
    assert sorted(environment_reads(code)) == [5, 6]
    assert "runtime/config.py" in sources()
