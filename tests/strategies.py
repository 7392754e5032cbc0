"""The shared hypothesis strategies: values from annotations, messages and headers above all."""

import math
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from hypothesis import strategies as st

from runtime.codec import Header
from runtime.messages import CODEC
from runtime.sampling import (
    MAX_CHOICES,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)
from runtime.types import Epoch, FloatArray, IntArray, LongArray

VOCAB_SIZE = 1000
"""What valid_sampling() is valid for."""
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=40)
"""hypothesis' text has no surrogates by itself, which UTF-8 can't carry."""
_DTYPES = ((IntArray, np.int32), (LongArray, np.int64), (FloatArray, np.float32))
_LEAVES = st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | TEXT
JSON = st.dictionaries(
    TEXT,
    st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
HEADERS = st.builds(
    Header, sender=TEXT, epoch=st.integers(0, 2**31).map(Epoch), number=st.integers(0, 2**63 - 1)
)


def messages() -> st.SearchStrategy[Any]:
    """Any message that may cross a wire."""
    return st.sampled_from(CODEC.message_types()).flatmap(instances)


def instances(cls: type) -> st.SearchStrategy[Any]:
    """Instances of the dataclass `cls`, each field as its annotation says."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{f.name: from_hint(hints[f.name]) for f in fields(cls)})


def from_hint(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field annotated `hint`."""
    hint = getattr(hint, "__supertype__", hint)
    for alias, dtype in _DTYPES:
        if hint == alias:
            return arrays(dtype)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        num_rows = args[1].count
        return st.integers(0, 3).flatmap(
            lambda n: arrays(dict(_DTYPES)[args[0]], num_rows * n).map(
                lambda flat: flat.reshape(num_rows, n)
            )
        )
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(from_hint(arg) for arg in args))
    if origin is tuple:
        return st.lists(from_hint(args[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and is_dataclass(hint):
        return instances(hint)
    return _PLAIN[origin or hint]


def arrays(dtype: Any, size: int | None = None) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """One-dimensional arrays of `dtype`, of `size` or 0 to 8 entries."""
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        entries: st.SearchStrategy[Any] = st.integers(int(info.min), int(info.max))
    else:
        entries = st.floats(width=32, allow_nan=False)
    least, most = (0, 8) if size is None else (size, size)
    return st.lists(entries, min_size=least, max_size=most).map(lambda v: np.array(v, dtype))


def valid_sampling() -> st.SearchStrategy[SamplingParams]:
    """Sampling parameters that validate(VOCAB_SIZE) accepts."""
    ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5).map(tuple)
    penalties, counts = st.floats(-2, 2), st.none() | st.integers(0, MAX_LOGPROBS)
    return st.builds(
        SamplingParams,
        n=st.integers(1, MAX_CHOICES),
        max_tokens=st.none() | st.integers(10, MAX_COUNT),
        min_tokens=st.integers(0, 10),
        temperature=st.none() | st.floats(0, 1e6),
        top_k=st.none() | st.integers(-1, MAX_COUNT),
        top_p=st.none() | st.floats(0, 1, exclude_min=True),
        min_p=st.none() | st.floats(0, 1),
        seed=st.none() | st.integers(0, MAX_SEED),
        presence_penalty=penalties,
        frequency_penalty=penalties,
        repetition_penalty=st.none() | st.floats(0.01, 100),
        logit_bias=st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100) | st.just(-math.inf), max_size=5
        ),
        # Longer than all that may be forbidden together.
        allowed_token_ids=st.none() | st.just(tuple(range(20))),
        bad_token_ids=ids,
        stop=st.lists(st.text(min_size=1, max_size=MAX_STOP_CHARS), max_size=MAX_STOPS).map(tuple),
        stop_token_ids=ids,
        include_stop_str_in_output=st.booleans(),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
        logprobs=counts,
        prompt_logprobs=counts,
    )


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=8),
    dict: JSON,
    type(None): st.none(),
}
