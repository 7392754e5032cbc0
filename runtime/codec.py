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
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np

from runtime.errors import ProtocolError
from runtime.types import Epoch, FloatArray, IntArray, LongArray

VERSION = 2
_HEADER_FIELDS = 5
_Convert = Callable[[Any], Any]
_T = TypeVar("_T", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who sent a message, in which incarnation, and its place in that sender's sequence, from 0."""

    sender: str
    epoch: Epoch
    number: int


@dataclass(frozen=True, slots=True)
class _Field:
    pack: _Convert | None
    """From the attribute to what msgpack takes; None where that is the same."""
    unpack: _Convert
    """Back, raising TypeError or ValueError for what does not fit."""


@dataclass(frozen=True, slots=True)
class _Layout:
    cls: type
    code: int
    names: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    packs: tuple[tuple[int, _Convert], ...]
    unpacks: tuple[_Convert, ...]
    build: Callable[[list[Any]], Any]
    """The message of its field values, in order."""


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
        if not isinstance(items, list) or len(items) < _HEADER_FIELDS:
            raise ProtocolError(f"undecodable frame of {len(frame)} bytes: no header")
        version, sender, epoch, number, code = items[:_HEADER_FIELDS]
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
            message = _unpack_fields(layout, items[_HEADER_FIELDS:])
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            raise ProtocolError(f"undecodable {layout.cls.__name__}: {e!s:.200}") from None
        return _header([sender, epoch, number]), message


def _shown(value: object) -> str:
    """A number as it is, anything else by its type: the repr of a deeply nested list overflows."""
    return str(value) if type(value) is int else type(value).__name__


def _pack_fields(layout: _Layout, message: object) -> list[Any]:
    values = list(layout.values(message))
    for index, pack in layout.packs:
        values[index] = pack(values[index])
    return values


def _unpack_fields(layout: _Layout, values: Any) -> Any:
    if type(values) is not list or len(values) != len(layout.names):
        raise ValueError(f"expected {len(layout.names)} fields")
    return layout.build([f(value) for f, value in zip(layout.unpacks, values, strict=False)])


def _layout(cls: type, code: int) -> _Layout:
    hints = typing.get_type_hints(cls)
    names = tuple(f.name for f in fields(cls))
    converters = [_field(hints[name]) for name in names]
    getter = attrgetter(*names) if names else lambda _: ()
    return _Layout(
        cls=cls,
        code=code,
        names=names,
        values=getter if len(names) != 1 else lambda m: (getter(m),),
        packs=tuple((i, c.pack) for i, c in enumerate(converters) if c.pack is not None),
        unpacks=tuple(c.unpack for c in converters),
        build=_builder(cls, names),
    )


def _builder(cls: type, names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    """What makes a `cls` of its field values.

    A frozen dataclass's own __init__ takes 1.9 µs for the 14 fields of a StepPlan; setting the
    slots directly takes 0.7. Classes that normalise their fields when made (__post_init__) are made
    the ordinary way.
    """
    if hasattr(cls, "__post_init__"):
        return lambda values: cls(**dict(zip(names, values, strict=True)))
    new = object.__new__
    setters = tuple(cls.__dict__[name].__set__ for name in names)

    def build(values: list[Any]) -> Any:
        made: Any = new(cls)
        for set_field, value in zip(setters, values, strict=False):
            set_field(made, value)
        return made

    return build


def _field(hint: Any) -> _Field:
    """How a field annotated `hint` crosses the wire."""
    hint = getattr(hint, "__supertype__", hint)
    for alias, dtype in ((IntArray, "<i4"), (LongArray, "<i8"), (FloatArray, "<f4")):
        if hint == alias:
            return _array(dtype)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(args)
    if origin is tuple:
        return _tuple(_field(args[0]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Field(lambda e: e.value, hint)
    if is_dataclass(hint) and isinstance(hint, type):
        layout = _layout(hint, code=0)
        return _Field(lambda m: _pack_fields(layout, m), lambda v: _unpack_fields(layout, v))
    return _Field(None, _plain(dict if origin is dict else hint))


def _array(code: str) -> _Field:
    """Arrays are read-only views into the frame; most of a plan's are empty, so those cost
    nothing.
    """
    dtype = np.dtype(code)
    empty = np.frombuffer(b"", dtype)
    frombuffer = np.frombuffer

    def pack(value: Any) -> bytes:
        if value.dtype != dtype or value.ndim != 1:
            raise TypeError(f"a {value.ndim}-d array of {value.dtype} where 1-d {dtype} is due")
        return value.tobytes()  # type: ignore[no-any-return]

    def unpack(value: Any) -> Any:
        if type(value) is not bytes:
            raise TypeError(f"an array must be bytes, not {type(value).__name__}")
        return frombuffer(value, dtype) if value else empty

    return _Field(pack, unpack)


def _optional(args: tuple[Any, ...]) -> _Field:
    (hint,) = (a for a in args if a is not type(None))
    inner = _field(hint)
    pack = inner.pack
    return _Field(
        None if pack is None else lambda v: None if v is None else pack(v),
        lambda v: None if v is None else inner.unpack(v),
    )


def _tuple(inner: _Field) -> _Field:
    def unpack(value: Any) -> Any:
        if type(value) is not list:
            raise TypeError(f"expected a list, not {type(value).__name__}")
        return tuple([inner.unpack(item) for item in value])

    pack = inner.pack
    return _Field(list if pack is None else lambda v: [pack(item) for item in v], unpack)


def _plain(cls: type) -> _Convert:
    def unpack(value: Any) -> Any:
        if type(value) is cls:
            return value
        if cls is float and type(value) is int:
            return float(value)
        raise TypeError(f"expected {cls.__name__}, not {type(value).__name__}")

    return unpack


_header = _builder(Header, ("sender", "epoch", "number"))
