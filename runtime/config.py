"""One frozen Config: read from command line, YAML and keywords, checked once, handed out in parts.

The only module that reads the environment.
"""

import argparse
import contextlib
import difflib
import operator
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import ConfigError
from runtime.options import (
    PARTS,
    HttpOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    WorkerOptions,
    all_options,
)

KERNELS = ("auto", "avx512bf16", "avx512vnni", "avx512", "avx2", "portable", "torch")
"""auto: the fastest that the processor runs; torch also where no kernels can be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options of one server, each value checked."""

    model: ModelOptions
    scheduler: SchedulerOptions
    worker: WorkerOptions
    server: ServerOptions
    http: HttpOptions

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Plain values, by part; `Config.from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, Any]]) -> "Config":
        """The Config that `to_json` wrote."""
        return cls(**{part: PARTS[part](**values) for part, values in data.items()})


def from_options(given: Mapping[str, Any], origin: str = "argument") -> Config:
    """A Config from option names and values; ConfigError names the first unknown or bad one.

    origin: what the user calls a setting there ("argument", "option", "key"), for the error's text.
    """
    known = all_options()
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(_unknown(name, list(known), origin))
        part, field = known[name]
        parts[part][name] = _checked(name, value, _type_of(part, name), field.metadata)
    return Config(**{part: cls(**parts[part]) for part, cls in PARTS.items()})


def from_command_line(argv: Sequence[str], prog: str = "launch.py") -> Config:
    """A Config from `argv`: options on the command line win over those of `--config FILE`."""
    given = vars(_parser(prog).parse_args(argv))
    path = given.pop("config", None)
    return from_options({**(_read_yaml(path) if path else {}), **given}, "option")


def cache_dir() -> Path:
    """Where converted tokenizers and built kernels are kept between starts."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tandem"


def kernels_choice() -> str:
    """What the worker's products are computed with: TANDEM_KERNELS, for tests and comparisons."""
    chosen = os.environ.get("TANDEM_KERNELS") or "auto"
    if chosen not in KERNELS:
        raise ConfigError(
            f"TANDEM_KERNELS is {chosen!r}: it takes {' or '.join(KERNELS)}"
            + _nearest(chosen, KERNELS)
        )
    return chosen


def child_environment() -> dict[str, str]:
    """The environment of a child process: ours, with this project importable from any folder."""
    root = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        "TOKENIZERS_PARALLELISM": "false",  # texts come one by one: its threads only pass them on
    }


def configs_dir() -> Path:
    """The folder of ready-made deployments and model presets."""
    return Path(__file__).resolve().parent.parent / "configs"


def flag(name: str) -> str:
    """How the command line spells an option."""
    return "--" + name.replace("_", "-")


def describe(name: str) -> str:
    """One line for help and the options page: meaning, unit, choices, default."""
    _, field = all_options()[name]
    meta = field.metadata
    text = str(meta["text"])
    notes = [f"in {meta['unit']}"] if meta["unit"] else []
    notes += [" | ".join(meta["choices"])] if meta["choices"] else []
    if field.default is not None and field.default is not MISSING:
        shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
        notes.append(f"default {shown}")
    return f"{text} ({'; '.join(notes)})" if notes else text


def type_name(part: str, name: str) -> str:
    """What an option takes, in words: "a whole number", "true or false", …"""
    return _article(_type_of(part, name))


def _type_of(part: str, name: str) -> type:
    """The option's type without its None."""
    hint = typing.get_type_hints(PARTS[part])[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
    return typing.cast(type, hint)


def _checked(name: str, value: Any, kind: type, meta: Mapping[str, Any]) -> Any:
    _, field = all_options()[name]
    if value is None and field.default is None:
        return None
    if name == "dtype":
        value = str(value).removeprefix("torch.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # then refused below as no number
            value = float(value)
    if isinstance(value, Path) and kind is str:
        value = str(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} is {value!r}: it takes {_article(kind)}")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"{name} is {value!r}: it takes {' or '.join(meta['choices'])}"
            + _nearest(str(value), meta["choices"])
        )
    _check_bounds(name, value, meta)
    return value


def _check_bounds(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    for limit, fits, word in (
        (meta["least"], operator.ge, "least"),
        (meta["most"], operator.le, "most"),
    ):
        if limit is not None and not fits(value, limit):
            unit = f" {meta['unit']}" if meta["unit"] else ""
            raise ConfigError(f"{name} is {value}: it must be at {word} {limit}{unit}")


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]


def _unknown(name: str, known: list[str], origin: str) -> str:
    return f"unknown {origin} {name!r}" + _nearest(name, known)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read_yaml(path: str) -> dict[str, Any]:
    """The options in a YAML file: one flat mapping, names with underscores or dashes."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config is {path!r}: there is no such file")
    try:
        data = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise ConfigError(f"{path} must hold option names and values, as in 'page_size: 16'")
    known = all_options()
    options = {key.replace("-", "_"): value for key, value in data.items()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{path}: " + _unknown(name, list(known), "key"))
    return options


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line that names the nearest option."""

    def error(self, message: str) -> typing.NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            name = unknown.split()[0]
            flags = [flag(n) for n in all_options()]
            close = difflib.get_close_matches(name.split("=")[0], flags, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]!r}?" if close else "; --help lists all"
            message = f"unknown option {name!r}{hint}"
        raise ConfigError(message)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Start a Tandem server: its HTTP, tokenizer, scheduler and worker processes.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of these options")
    for part, cls in PARTS.items():
        group = parser.add_argument_group(f"{part} options", (cls.__doc__ or "").strip())
        for field in fields(cls):
            _add_option(group, part, field.name)
    return parser


def _add_option(group: Any, part: str, name: str) -> None:
    kind = _type_of(part, name)
    text = describe(name).replace("%", "%%")
    if kind is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(flag(name), type=kind, metavar=metavar, help=text)
