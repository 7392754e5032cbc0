"""Sampling parameters are refused at the boundary, by name, value and limit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from runtime.errors import RequestError
from runtime.sampling import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_IDS,
    SamplingParams,
    TokenBias,
)
from tests.strategies import VOCAB_SIZE, valid_sampling


def test_the_defaults_are_greedy_and_valid() -> None:
    params = SamplingParams()
    params.validate(VOCAB_SIZE)
    assert params.with_defaults(SamplingParams()).temperature == 0.0
    assert params.max_tokens is None


@given(valid_sampling())
def test_everything_in_bounds_is_accepted(params: SamplingParams) -> None:
    params.validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, MAX_CHOICES]),
        ("max_tokens", [1, MAX_COUNT, None]),
        ("min_tokens", [0, MAX_COUNT]),
        ("temperature", [0, 0.0, 1, 1e-9, 100.0, 1e6, None]),
        ("top_k", [0, -1, 1, MAX_COUNT, None]),
        ("top_p", [1, 1.0, 1e-9, None]),
        ("min_p", [0, 0.0, 1, None]),
        ("seed", [0, MAX_SEED, None]),
        ("presence_penalty", [-2, 0.0, 2.0]),
        ("frequency_penalty", [-2, 0.0, 2.0]),
        ("repetition_penalty", [0.01, 1, 100, None]),
        ("logit_bias", [{0: -100}, {VOCAB_SIZE - 1: 100.0}, {5: float("-inf")}, {}, None]),
        ("allowed_token_ids", [[0], range(VOCAB_SIZE), None]),
        ("bad_token_ids", [[0], range(VOCAB_SIZE - 1), None]),
        ("logprobs", [0, MAX_LOGPROBS, None]),
        ("prompt_logprobs", [0, MAX_LOGPROBS, None]),
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
        ("n", [0, -1, MAX_CHOICES + 1, 1.0, True, None]),
        ("max_tokens", [0, -1, MAX_COUNT + 1, 1.0, True, "1"]),
        ("min_tokens", [-1, MAX_COUNT + 1, 1.0, True, None]),
        ("temperature", [-0.1, 1e7, float("nan"), float("inf"), True, "0", 10**400]),
        ("top_k", [-2, MAX_COUNT + 1, 1.5, -1.0, True, "1"]),
        ("top_p", [0, -0.1, 1.01, float("nan"), float("inf"), True]),
        ("min_p", [-0.1, 1.01, float("nan"), True, "0"]),
        ("seed", [-1, MAX_SEED + 1, 1.0, True]),
        ("presence_penalty", [-2.01, 2.01, float("nan"), True, None]),
        ("frequency_penalty", [-2.01, 2.01, float("inf"), True, None]),
        ("repetition_penalty", [0, 0.009, 101, float("nan"), True]),
        ("logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("prompt_logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("include_stop_str_in_output", [None, 1, "no"]),
        ("ignore_eos", [None, 1, "no"]),
        ("skip_special_tokens", [None, 1, "no"]),
        ("stop", ["x" * (MAX_STOP_CHARS + 1), [""], ["a"] * (MAX_STOPS + 1), [1], [b"a"]]),
        ("stop", [5, 1.5, True, b"a", {"a": 1}]),
        ("stop_token_ids", [5, {5: 1}, b"a", [-1], [VOCAB_SIZE], [1.0], [True], ["1"]]),
        ("stop_token_ids", [[0] * (MAX_STOP_TOKEN_IDS + 1)]),
        ("allowed_token_ids", [5, [], [-1], [VOCAB_SIZE], ["1"], [0] * (MAX_TOKEN_IDS + 1)]),
        ("bad_token_ids", [5, [-1], [VOCAB_SIZE], ["1"], range(VOCAB_SIZE)]),
        ("logit_bias", [5, [5], {VOCAB_SIZE: 1}, {-1: 1}, {"a": 1}, {1.5: 1}, {True: 1}]),
        ("logit_bias", [{5: 101}, {5: float("inf")}, {5: float("nan")}, {5: "1"}, {5: True}]),
        ("logit_bias", [{"5": 1, 5: 1}, dict.fromkeys(range(MAX_BIASES + 1), 0)]),
    ],
)
def test_each_value_out_of_bounds_names_its_field_and_itself(name: str, values: list[Any]) -> None:
    """temperature=10**400 once escaped as OverflowError, stop=5 as TypeError."""
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


def test_a_mapping_of_biases_may_have_the_string_keys_of_json() -> None:
    biases = (TokenBias(token=5, bias=-1.5), TokenBias(token=7, bias=2))
    for written in ({5: -1.5, 7: 2}, {"5": -1.5, "7": 2}, biases):
        assert SamplingParams(logit_bias=written).logit_bias == biases  # type: ignore[arg-type]


def test_ids_may_be_numpys() -> None:
    ids: Any = np.array([1, 2])
    params = SamplingParams(stop_token_ids=ids, bad_token_ids=ids, allowed_token_ids=ids)
    assert params.stop_token_ids == params.bad_token_ids == params.allowed_token_ids == (1, 2)
    assert {type(i) for i in params.stop_token_ids} == {int}


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": (1, 2), "bad_token_ids": (2, 1)},
        {"allowed_token_ids": (1,), "logit_bias": {1: float("-inf")}},
        {"allowed_token_ids": (1, 9), "min_tokens": 1, "stop_token_ids": (1,)},
        {"bad_token_ids": range(VOCAB_SIZE - 1), "min_tokens": 1},
    ],
    ids=str,
)
def test_parameters_that_leave_no_token_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"must be left"):
        SamplingParams(**given).validate(VOCAB_SIZE, eos_token_ids=(9, VOCAB_SIZE - 1))


def test_end_of_sequence_ids_may_be_all_that_is_allowed_where_they_do_not_end() -> None:
    params = SamplingParams(allowed_token_ids=(9,), min_tokens=3, ignore_eos=True)
    params.validate(VOCAB_SIZE, eos_token_ids=(9,))


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(RequestError, match=r"min_tokens is 5: .* max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4).validate(VOCAB_SIZE)


def test_what_is_left_open_is_the_models_then_neutral() -> None:
    models = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    found = SamplingParams(top_k=0, seed=4).with_defaults(models)
    assert found == SamplingParams(
        temperature=0.6, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.1, seed=4
    )
