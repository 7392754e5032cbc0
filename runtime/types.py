"""The words of docs/architecture.md as types, so that a page can't be passed for a slot."""

from dataclasses import dataclass
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

RequestId = NewType("RequestId", int)
"""What names a request on the internal wires: owner · 2^40 + counter (see `owner_of`)."""
Slot = NewType("Slot", int)
"""The row of the page table and of the token table that a running request owns."""
Page = NewType("Page", int)
"""page_size cells of the KV pool."""
Epoch = NewType("Epoch", int)
"""A process's incarnation: bumped at each restart."""

IntArray: TypeAlias = npt.NDArray[np.int32]
LongArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """In a message's annotation, Annotated[IntArray, Rows(3)]: an array [3, n]."""

    count: int


Json: TypeAlias = dict[str, Any]
"""Nested str, int, float, bool, None, list and dict: what msgpack carries as it is."""

_COUNTER_BITS = 40


def request_id(owner: int, counter: int) -> RequestId:
    """The id of the `counter`-th request of tokenizer number `owner`."""
    return RequestId(owner << _COUNTER_BITS | counter)


def owner_of(request: RequestId) -> int:
    """Which tokenizer every message about `request` goes through."""
    return request >> _COUNTER_BITS


def owners_of(requests: LongArray) -> LongArray:
    """`owner_of` each of `requests`, int64 [n]."""
    return requests >> _COUNTER_BITS
