"""Sampling parameters are refused at the boundary, by name, value and limit."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from runtime.errors import RequestError
from runtime.sampling import (
    MAX_COUNT,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from tests.strategies import VOCAB_SIZE, valid_sampling


def test_the_defaults_are_greedy_and_valid() -> None:
    params = SamplingParams()
    params.validate(VOCAB_SIZE)
    assert params.temperature == 0.0
    assert params.max_tokens is None


@given(valid_sampling())
def test_everything_in_bounds_is_accepted(params: SamplingParams) -> None:
    params.validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [1, MAX_COUNT, None]),
        ("temperature", [0, 0.0, 1, 1e-9, 100.0]),
        ("top_k", [1, MAX_COUNT, None]),
        ("top_p", [1, 1.0, 1e-9]),
        ("seed", [0, MAX_SEED, None]),
        ("stop", ["x", "x" * MAX_STOP_CHARS, ["a"] * MAX_STOPS, [], None]),
        ("stop_token_ids", [[0, VOCAB_SIZE - 1], [], None]),
    ],
)
def test_each_bound_is_itself_allowed(name: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{name: value}).validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, MAX_COUNT + 1, 1.0, True, "1"]),
        ("temperature", [-0.1, float("nan"), float("inf"), True, "0", None, 10**400]),
        ("top_k", [0, -1, MAX_COUNT + 1, 1.5, True, "1"]),
        ("top_p", [0, -0.1, 1.01, float("nan"), float("inf"), True, None]),
        ("seed", [-1, MAX_SEED + 1, 1.0, True]),
        ("stop", ["x" * (MAX_STOP_CHARS + 1), [""], ["a"] * (MAX_STOPS + 1), [1], [b"a"]]),
        (
            "stop_token_ids",
            [[-1], [VOCAB_SIZE], [1.0], [True], ["1"], [0] * (MAX_STOP_TOKEN_IDS + 1)],
        ),
    ],
)
def test_each_value_out_of_bounds_names_its_field_and_itself(name: str, values: list[Any]) -> None:
    """temperature=10**400 once escaped as OverflowError."""
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name} is ") as e:
            SamplingParams(**{name: value}).validate(VOCAB_SIZE)
        assert len(str(e.value)) < 250


def test_a_single_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_lists_and_tuples_mean_the_same_parameters() -> None:
    listed = SamplingParams(stop=["a"], stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert listed == SamplingParams(stop=("a",), stop_token_ids=(1, 2))
    assert hash(listed) == hash(SamplingParams(stop=("a",), stop_token_ids=(1, 2)))


def test_the_parameters_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
