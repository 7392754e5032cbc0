"""Frozen dataclasses to msgpack and back, checked field by field.

A message is one flat msgpack array: [version, sender, epoch, number, code, field, field, …]. Arrays
are raw little-endian bytes inside that one frame. How each field is packed follows from its
annotation once, at import; a value that does not fit its annotation is a ProtocolError, whoever
sent it.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np

from runtime.errors import ProtocolError
from runtime.types import Epoch, FloatArray, IntArray, LongArray

VERSION = 3
_HEADER_FIELDS = 5
_Convert = Callable[[Any], Any]
_T = TypeVar("_T", bound=type)


class Header(NamedTuple):
    """Who sent a message, in which incarnation, and its place in that sender's sequence, from 0."""

    sender: str
    epoch: Epoch
    number: int


@dataclass(frozen=True, slots=True)
class _Field:
    """How a value crosses the wire. Back: a `wire_type` by `convert`, anything else by `other`."""

    pack: _Convert | None
    """From the attribute to what msgpack takes; None where that is the same."""
    wire_type: type | None
    """What msgpack gives for most values that fit; None: not looked at."""
    convert: _Convert | None
    """From that to the attribute; None where it is the same."""
    other: _Convert
    """From a value of another type, raising TypeError or ValueError for what does not fit."""

    def unpack(self, value: Any) -> Any:
        """The attribute."""
        if type(value) is self.wire_type:
            return value if self.convert is None else self.convert(value)
        return self.other(value)


@dataclass(frozen=True, slots=True)
class _Layout:
    cls: type
    code: int
    values: Callable[[Any], tuple[Any, ...]]
    packs: tuple[tuple[int, _Convert], ...]
    parts: tuple[tuple[Callable[[Any, Any], None], type | None, _Convert | None, _Convert], ...]
    """Of each field: what sets it, and how it is unpacked, as in _Field."""
    normalise: Callable[[Any], None] | None
    """The class's __post_init__."""


class Codec:
    """The messages that may cross a wire, each under its own number."""

    def __init__(self) -> None:
        self._by_code: dict[int, _Layout] = {}
        self._by_class: dict[type, _Layout] = {}

    def register(self, code: int) -> Callable[[_T], _T]:
        """Class decorator: `cls` crosses the wire as number `code`. Codes are never reused."""

        def add(cls: _T) -> _T:
            if code in self._by_code:
                raise ValueError(f"message code {code} is taken by {self._by_code[code].cls}")
            layout = _layout(cls, code)
            self._by_code[code] = self._by_class[cls] = layout
            return cls

        return add

    def message_types(self) -> list[type]:
        """Every registered class, by ascending code."""
        return [self._by_code[code].cls for code in sorted(self._by_code)]

    def encode(self, message: object, header: Header) -> bytes:
        """One frame."""
        layout = self._by_class[type(message)]
        return msgpack.packb(  # type: ignore[no-any-return]
            [
                VERSION,
                header.sender,
                header.epoch,
                header.number,
                layout.code,
                *_pack_fields(layout, message),
            ]
        )

    def decode(self, frame: bytes) -> tuple[Header, Any]:
        """The message in `frame`; ProtocolError if it is not exactly one of ours."""
        try:
            items = msgpack.unpackb(frame)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
            raise ProtocolError(f"undecodable frame of {len(frame)} bytes: {e}") from None
        if type(items) is not list or len(items) < _HEADER_FIELDS:
            raise ProtocolError(f"undecodable frame of {len(frame)} bytes: no header")
        version, sender, epoch, number, code, *values = items
        if type(version) is not int or version != VERSION:
            raise ProtocolError(
                f"protocol version {_shown(version)}: this end speaks {VERSION};"
                " update the older end"
            )
        if type(sender) is not str or type(epoch) is not int or type(number) is not int:
            raise ProtocolError("undecodable frame: the header's fields have the wrong types")
        layout = self._by_code.get(code) if type(code) is int else None
        if layout is None:
            raise ProtocolError(f"unknown message code {_shown(code)}")
        try:
            message = _unpack_fields(layout, values)
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            raise ProtocolError(f"undecodable {layout.cls.__name__}: {e!s:.200}") from None
        return Header(sender, Epoch(epoch), number), message


def _shown(value: object) -> str:
    """A number as it is, anything else by its type: the repr of a deeply nested list overflows."""
    return str(value) if type(value) is int else type(value).__name__


def _pack_fields(layout: _Layout, message: object) -> list[Any]:
    values = list(layout.values(message))
    for index, pack in layout.packs:
        values[index] = pack(values[index])
    return values


def _unpack_fields(layout: _Layout, values: list[Any]) -> Any:
    """The message of its fields as they came.

    A frozen dataclass's own __init__ would take three times as long as setting the slots directly,
    and a call for every field that is right as it came twice as long again.
    """
    if len(values) != len(layout.parts):
        raise ValueError(f"expected {len(layout.parts)} fields")
    made: Any = object.__new__(layout.cls)
    for (set_field, wire_type, convert, other), value in zip(layout.parts, values, strict=False):
        if type(value) is not wire_type:
            set_field(made, other(value))
        elif convert is None:
            set_field(made, value)
        else:
            set_field(made, convert(value))
    if layout.normalise is not None:
        layout.normalise(made)
    return made


def _layout(cls: type, code: int) -> _Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(f.name for f in fields(cls))
    converters = [_field(hints[name]) for name in names]
    getter = attrgetter(*names) if names else lambda _: ()
    return _Layout(
        cls=cls,
        code=code,
        values=getter if len(names) != 1 else lambda m: (getter(m),),
        packs=tuple((i, c.pack) for i, c in enumerate(converters) if c.pack is not None),
        parts=tuple(
            (cls.__dict__[name].__set__, c.wire_type, c.convert, c.other)
            for name, c in zip(names, converters, strict=True)
        ),
        normalise=getattr(cls, "__post_init__", None),
    )


def _field(hint: Any) -> _Field:
    """How a field annotated `hint` crosses the wire."""
    hint = getattr(hint, "__supertype__", hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _rows(_DTYPES[args[0]], args[1].count)
    if hint in _DTYPES:
        return _array(_DTYPES[hint])
    if origin in (typing.Union, types.UnionType):
        return _optional(args)
    if origin is tuple:
        return _tuple(_field(args[0]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Field(lambda e: e.value, None, None, hint)
    if is_dataclass(hint) and isinstance(hint, type):
        layout = _layout(hint, code=0)
        return _Field(
            lambda m: _pack_fields(layout, m),
            list,
            lambda v: _unpack_fields(layout, v),
            _refuses(f"a {hint.__name__} must be a list"),
        )
    return _plain(dict if origin is dict else hint)


_DTYPES: dict[Any, np.dtype[Any]] = {
    IntArray: np.dtype("<i4"),
    LongArray: np.dtype("<i8"),
    FloatArray: np.dtype("<f4"),
}


def _array(dtype: np.dtype[Any]) -> _Field:
    """Arrays are read-only views into the frame; many are empty, so those cost nothing."""
    empty = np.frombuffer(b"", dtype)
    frombuffer = np.frombuffer

    def pack(value: Any) -> bytes:
        if value.dtype != dtype or value.ndim != 1:
            raise TypeError(f"a {value.ndim}-d array of {value.dtype} where 1-d {dtype} is due")
        return value.tobytes()  # type: ignore[no-any-return]

    def convert(value: Any) -> Any:
        return frombuffer(value, dtype) if value else empty

    return _Field(pack, bytes, convert, _refuses("an array must be bytes"))


def _rows(dtype: np.dtype[Any], count: int) -> _Field:
    """The same for arrays [count, n], row by row."""
    empty = np.frombuffer(b"", dtype).reshape(count, 0)
    ndarray, bytes_each = np.ndarray, count * dtype.itemsize

    def pack(value: Any) -> bytes:
        if value.dtype != dtype or value.ndim != 2 or len(value) != count:
            raise TypeError(
                f"an array {value.shape} of {value.dtype} where [{count}, n] of {dtype} is due"
            )
        return value.tobytes()  # type: ignore[no-any-return]

    def convert(value: bytes) -> Any:
        if not value:
            return empty
        length = len(value) // bytes_each
        if length * bytes_each != len(value):
            raise ValueError(f"{len(value)} bytes are not {count} rows")
        return ndarray((count, length), dtype, value)

    return _Field(pack, bytes, convert, _refuses("an array must be bytes"))


def _optional(args: tuple[Any, ...]) -> _Field:
    """One type or None; or one of several plain ones."""
    hint, *others = (a for a in args if a is not type(None))
    if others:
        return _plain_of((hint, *others))
    inner = _field(hint)
    pack = inner.pack
    return _Field(
        None if pack is None else lambda v: None if v is None else pack(v),
        type(None),
        None,
        inner.unpack,
    )


def _tuple(inner: _Field) -> _Field:
    pack = inner.pack
    return _Field(
        list if pack is None else lambda v: [pack(item) for item in v],
        list,
        lambda v: tuple([inner.unpack(item) for item in v]) if v else (),
        _refuses("expected a list"),
    )


def _plain(cls: type) -> _Field:
    refuse = _refuses(f"expected {cls.__name__}")
    return _Field(None, cls, None, refuse if cls is not float else _float)


def _plain_of(kinds: tuple[type, ...]) -> _Field:
    """None, or a value of one of the types that msgpack gives as they are."""

    def check(value: Any) -> Any:
        if type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"expected {wanted}, not {type(value).__name__}")
        return value

    return _Field(None, type(None), None, check)


def _float(value: Any) -> float:
    """A whole number is one too."""
    if type(value) is not int:
        raise TypeError(f"expected float, not {type(value).__name__}")
    return float(value)


def _refuses(what: str) -> Callable[[Any], NoReturn]:
    """A TypeError for whatever it is given."""

    def refuse(value: Any) -> NoReturn:
        raise TypeError(f"{what}, not {type(value).__name__}")

    return refuse
