"""Every message survives the wire, and no frame does more harm than a ProtocolError."""

import struct
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.codec import VERSION, Codec, Header
from runtime.errors import ProtocolError
from runtime.messages import CODEC, FlushCache, Hello, StatsReply, Welcome
from runtime.types import Epoch, IntArray, Rows
from tests.strategies import HEADERS, JSON, instances, messages

SAMPLES = Codec()


@SAMPLES.register(1)
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A message of the tests' own, so that they do not depend on the fields of the real ones."""

    tokens: IntArray
    seconds: float


@SAMPLES.register(2)
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The same with an array of three rows."""

    pages: Annotated[IntArray, Rows(3)]


HEADER = Header(sender="tokenizer-0", epoch=Epoch(3), number=17)
FRAMES = messages().map(lambda message: CODEC.encode(message, HEADER))


def same(a: Any, b: Any) -> bool:
    """Equality of messages, arrays by dtype and entries."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def decode_or_refuse(frame: bytes) -> None:
    """A message or a ProtocolError; anything else escapes and fails the test."""
    try:
        _, message = CODEC.decode(frame)
    except ProtocolError:
        return
    assert type(message) in CODEC.message_types()


def frame_of(*items: Any, code: int, version: Any = VERSION) -> bytes:
    packed = msgpack.packb([version, "peer", 0, 0, code, *items])
    assert isinstance(packed, bytes)
    return packed


@pytest.mark.parametrize("cls", CODEC.message_types(), ids=lambda cls: cls.__name__)
def test_every_message_type_comes_back_equal(cls: type) -> None:
    @given(message=instances(cls), header=HEADERS)
    def round_trip(message: Any, header: Header) -> None:
        came_header, came = CODEC.decode(CODEC.encode(message, header))
        assert came_header == header
        assert same(came, message)

    round_trip()


@given(FRAMES)
def test_every_truncated_frame_is_a_protocol_error(frame: bytes) -> None:
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            CODEC.decode(frame[:end])


@given(FRAMES, st.binary(min_size=1, max_size=4))
def test_bytes_after_the_message_are_a_protocol_error(frame: bytes, tail: bytes) -> None:
    with pytest.raises(ProtocolError):
        CODEC.decode(frame + tail)


@given(FRAMES, st.data())
def test_changed_bytes_never_raise_anything_else(frame: bytes, data: st.DataObject) -> None:
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(changed))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_raise_anything_else(frame: bytes) -> None:
    decode_or_refuse(frame)


@given(messages(), st.data())
def test_a_wrong_field_never_raises_anything_else(message: Any, data: st.DataObject) -> None:
    items = msgpack.unpackb(CODEC.encode(message, HEADER))
    index = data.draw(st.integers(0, len(items) - 1))
    items[index] = data.draw(JSON | st.binary(max_size=9) | st.lists(st.integers(0, 9), max_size=3))
    decode_or_refuse(msgpack.packb(items))


@given(messages(), st.integers(-3, 3).filter(bool))
def test_a_missing_or_extra_field_is_a_protocol_error(message: Any, more: int) -> None:
    items = msgpack.unpackb(CODEC.encode(message, HEADER))
    changed = items + [None] * more if more > 0 else items[:more]
    with pytest.raises(ProtocolError):
        CODEC.decode(msgpack.packb(changed))


@pytest.mark.parametrize("depth", [50, 400, 900, 1100, 100_000])
@pytest.mark.parametrize("place", range(6))
def test_deep_nesting_anywhere_is_a_protocol_error(depth: int, place: int) -> None:
    """A deep list as the version or the code once raised RecursionError, from its own repr."""
    deep = b"\x91" * depth + b"\xc0"
    good = [msgpack.packb(item) for item in (VERSION, "peer", 0, 0, 41, 5, 1)]
    frame = b"\x97" + b"".join(deep if i == place else item for i, item in enumerate(good))
    with pytest.raises(ProtocolError):
        CODEC.decode(frame)


def test_a_deep_list_where_an_enum_belongs_is_a_protocol_error() -> None:
    deep: Any = None
    for _ in range(600):
        deep = [deep]
    with pytest.raises(ProtocolError):
        CODEC.decode(frame_of(7, deep, None, code=61))


@pytest.mark.parametrize("kind", [0xC6, 0xC9, 0xDB, 0xDD, 0xDF])
@pytest.mark.parametrize("claimed", [2**16, 2**31 - 1, 2**32 - 1])
def test_huge_claimed_lengths_are_a_protocol_error(kind: int, claimed: int) -> None:
    claim = bytes([kind]) + struct.pack(">I", claimed)
    for frame in (claim, claim * 100, b"\x96\x01\xa1p\x00\x00\x01" + claim):
        with pytest.raises(ProtocolError):
            CODEC.decode(frame)


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None, True, 1.0, [1]])
def test_another_version_is_refused_with_a_way_out(version: Any) -> None:
    with pytest.raises(ProtocolError, match="update the older end"):
        CODEC.decode(frame_of(code=1, version=version))


@pytest.mark.parametrize("code", [0, 999, -1, True, "1", 1.0, None])
def test_an_unknown_code_is_refused(code: Any) -> None:
    with pytest.raises(ProtocolError, match="unknown message code"):
        CODEC.decode(frame_of(code=code))


def test_the_class_and_its_numbers_are_told_for_a_field_that_does_not_fit() -> None:
    with pytest.raises(ProtocolError, match="undecodable FlushCache: expected int, not str"):
        CODEC.decode(frame_of("one", code=7))


def test_true_is_no_number_and_one_is_no_truth() -> None:
    with pytest.raises(ProtocolError, match="expected int, not bool"):
        CODEC.decode(frame_of(True, code=7))
    with pytest.raises(ProtocolError, match="expected bool, not int"):
        CODEC.decode(frame_of(1, None, None, 1, code=4))


def test_a_whole_number_is_taken_for_a_float() -> None:
    _, sample = SAMPLES.decode(frame_of(b"", 2, code=1))
    assert type(sample.seconds) is float


def test_an_array_whose_bytes_are_no_whole_entries_is_refused() -> None:
    with pytest.raises(ProtocolError, match="undecodable Sample"):
        SAMPLES.decode(frame_of(b"\0" * 6, 2.0, code=1))


def test_arrays_cross_as_little_endian_bytes_inside_the_one_frame() -> None:
    sample = Sample(tokens=np.array([1, -2], np.int32), seconds=0.0)
    assert b"\x01\0\0\0\xfe\xff\xff\xff" in SAMPLES.encode(sample, HEADER)


def test_a_part_of_an_array_is_packed_alone() -> None:
    ids = np.arange(6, dtype=np.int32)[1:3]
    _, came = SAMPLES.decode(SAMPLES.encode(Sample(tokens=ids, seconds=0.0), HEADER))
    assert came.tokens.tolist() == [1, 2]


def test_an_array_of_another_type_or_shape_is_not_sent() -> None:
    """A wider one used to wrap in silence, and a 2-d one to come out flat."""
    for ids in (np.array([1 << 32], np.int64), np.zeros((2, 2), np.int32)):
        with pytest.raises(TypeError, match="array"):
            SAMPLES.encode(Sample(tokens=ids, seconds=0.0), HEADER)  # type: ignore[arg-type]


def test_rows_come_back_as_rows_whatever_their_order_in_memory() -> None:
    by_entry = np.array([(1, 2, 3), (4, 5, 6)], np.int32)
    _, came = SAMPLES.decode(SAMPLES.encode(Table(pages=by_entry.T), HEADER))
    assert came.pages.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert not came.pages.flags.writeable
    _, none = SAMPLES.decode(SAMPLES.encode(Table(pages=by_entry[:0].T), HEADER))
    assert none.pages.shape == (3, 0)


@pytest.mark.parametrize("wrong", [b"\0" * 16, b"\0" * 6, "text", 1, None, [1, 2, 3]])
def test_what_is_no_rows_is_refused(wrong: Any) -> None:
    with pytest.raises(ProtocolError, match="undecodable Table"):
        SAMPLES.decode(frame_of(wrong, code=2))


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int32), np.zeros((2, 3), np.int32)])
def test_an_array_with_other_rows_is_not_sent(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"where \[3, n\] of int32 is due"):
        SAMPLES.encode(Table(pages=wrong), HEADER)


def test_a_code_is_given_once() -> None:
    codec = Codec()
    codec.register(1)(Hello)
    with pytest.raises(ValueError, match="message code 1 is taken"):
        codec.register(1)(FlushCache)


def test_no_two_message_types_share_a_code() -> None:
    names = [cls.__name__ for cls in CODEC.message_types()]
    assert len(set(names)) == len(names)
    assert {Hello, Welcome, StatsReply} <= set(CODEC.message_types())
