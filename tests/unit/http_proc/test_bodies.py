"""Bodies of requests: what is taken, and that what is not is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from http_proc.chat import chat_of
from http_proc.complaints import complaint, shown
from http_proc.errors import HttpError
from http_proc.schemas import Body, ChatCompletionBody, CompletionBody, GenerationBody
from http_proc.unserved import NEUTRAL_VALUES, asks_for_nothing
from runtime.errors import RequestError
from runtime.sampling import SamplingParams

HI = [{"role": "user", "content": "hi"}]
FIELDS = list(ChatCompletionBody.model_fields)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda s: st.lists(s, max_size=4) | st.dictionaries(st.text(), s, max_size=4),
    max_leaves=20,
)


def refused(body: type[Body], given: Any) -> HttpError:
    """What a client gets for a body."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate(given)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return complaint(errors, FIELDS)


def refusal(body: type[Body], given: Any) -> str:
    """The message of that."""
    message: str = refused(body, given).detail
    return message


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompts_come_in_four_forms(given: Any, prompts: Any) -> None:
    assert CompletionBody.model_validate({"prompt": given}).prompt == prompts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "prompt is empty"),
        (5, "prompt is 5: it takes a text, a list of texts, a list of token ids"),
        ([1, "a"], "prompt is a list of neither texts"),
        ([[1, "a"]], "prompt is a list of neither texts"),
        ([True, False], "prompt is a list of neither texts"),
        ([1.5], "prompt is a list of neither texts"),
        (["a"] * 3000, "prompt has 3000 prompts: at most 2048"),
    ],
)
def test_other_prompts_are_refused(given: Any, says: str) -> None:
    assert says in refusal(CompletionBody, {"prompt": given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': it takes a number"),
        ({"temperature": True}, "temperature is True: it takes a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: it takes a whole number"),
        ({"stream": "yes"}, "stream is 'yes': it takes true or false"),
        ({"stop": [1]}, "stop is [1]: it takes a string or a list of strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0] is 'a': it takes a whole number"),
        ({"logit_bias": {"5": "x"}}, "it takes a number"),
        ({"stream_options": {"include_usage": True}}, "stream_options goes with stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown field 'stream_options.x'"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"zzz": 1}, "unknown field 'zzz': leave it out"),
        ({"tools": [{"type": "function"}]}, "which this server does not support: leave it out"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format is {'type': 'json_object'}, which this server does not support: leave"
            ' it out, or give {"type": "text"}',
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role is 'king'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5: it takes"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content has part 0 of type 'image_url': only 'text' is served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content has part 0 that is not",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "'messages[0].mood'"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "give one"),
        ({"top_logprobs": 2}, "top_logprobs goes with logprobs: true"),
    ],
)
def test_a_bad_field_is_named_with_what_it_takes(given: Any, says: str) -> None:
    assert says in refusal(ChatCompletionBody, {"messages": HI, **given})


def test_what_is_no_object_is_refused() -> None:
    for given_ in ([], "x", 5, None):
        assert "must be a JSON object" in refusal(ChatCompletionBody, given_)


BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatCompletionBody, {"messages": HI}),
    (CompletionBody, {"prompt": "x"}),
]


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_what_asks_for_nothing_is_the_same_as_nothing(name: str) -> None:
    """Clients send the defaults of fields that are not served; nothing else of them is taken."""
    for body, needed in BODIES:
        bare = body.model_validate(needed)
        for neutral in (None, *NEUTRAL_VALUES[name]):
            assert body.model_validate({**needed, name: neutral}) == bare or name == "best_of"
        said = refused(body, {**needed, name: {"something": 1}})
        assert said.detail.startswith(f"{name} is {{'something': 1}}")
        assert said.param == name


OPENAIS_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0, "logit_bias": {}, "n": 1, "presence_penalty": 0, "stop": [],
    "stream": False, "stream_options": {"include_usage": False, "include_obfuscation": False},
    "temperature": 1, "top_p": 1, "user": "",
}  # fmt: skip
"""Of fields that are served."""
UNSERVED_DEFAULTS: dict[str, Any] = {
    "function_call": "none", "functions": [], "metadata": {}, "modalities": ["text"],
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "service_tier": "auto",
    "store": False, "tool_choice": "none", "tools": [], "verbosity": "medium",
}  # fmt: skip


def openais_fields(params: Any) -> set[str]:
    """All fields of a request in the official client's types."""
    return {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize(
    ("body", "needed", "params", "defaults"),
    [
        (
            *BODIES[0], chat_params.CompletionCreateParamsStreaming,
            {**OPENAIS_DEFAULTS, **UNSERVED_DEFAULTS, "logprobs": False, "top_logprobs": 0},
        ),
        (
            *BODIES[1], text_params.CompletionCreateParamsStreaming,
            {**OPENAIS_DEFAULTS, "best_of": 1, "echo": False, "suffix": ""},
        ),
    ],
)  # fmt: skip
def test_the_defaults_of_the_official_client_are_taken(
    body: type[GenerationBody], needed: Any, params: Any, defaults: Any
) -> None:
    """With each field of its types at its default, and with each at null."""
    fields = openais_fields(params)
    assert set(needed) | set(defaults) <= fields
    for given_ in (defaults, dict.fromkeys(fields)):
        body.model_validate({**given_, **needed}).sampling().validate(100)
    for name in fields - set(needed):
        body.model_validate({**needed, name: None})
        assert name in body.model_fields or name in NEUTRAL_VALUES


@given(st.sampled_from(sorted(NEUTRAL_VALUES)), JSON)
def test_only_the_listed_values_ask_for_nothing(name: str, value: Any) -> None:
    """Python finds 1 equal to True and 0 to False; a client that sends it means something else."""
    if asks_for_nothing(name, value):
        assert json.dumps(value) in [json.dumps(v) for v in (None, *NEUTRAL_VALUES[name])]


def test_the_best_of_n_is_taken_where_all_are_returned() -> None:
    CompletionBody.model_validate({"prompt": "x", "n": 2, "best_of": 2})
    for given_ in ({"n": 2, "best_of": 1}, {"best_of": 3}):
        said = refused(CompletionBody, {"prompt": "x", **given_})
        assert (said.param, said.code) == ("best_of", "invalid_value")


def test_an_answer_of_the_official_client_can_be_sent_back() -> None:
    """It writes all that it knows of a message."""
    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    body = ChatCompletionBody.model_validate({"messages": [*HI, answer]})
    assert chat_of(body)["messages"][1] == {"role": "assistant", "content": "hello"}
    part = {"type": "text", "text": "hello", "cache_control": None}
    body = ChatCompletionBody.model_validate({"messages": [{"role": "user", "content": [part]}]})
    assert chat_of(body)["messages"][0]["content"] == "hello"


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"tools": [1]}, "tools", "unsupported_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_value",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "invalid_value"),
    ],
)
def test_a_refusal_names_the_field_and_has_a_code(given: Any, param: str, code: str) -> None:
    said = refused(ChatCompletionBody, {"messages": HI, **given})
    assert (said.param, said.code) == (param, code)


def test_null_leaves_every_field_at_its_default() -> None:
    nulls = dict.fromkeys(FIELDS)
    body = ChatCompletionBody.model_validate({**nulls, "messages": HI})
    assert body.sampling() == SamplingParams()


def test_every_sampling_parameter_can_be_asked_for() -> None:
    given_ = {
        "n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
        "min_p": 0.1, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.5, "logit_bias": {"5": -1.0}, "allowed_token_ids": [5, 6],
        "bad_token_ids": [7], "stop": ["a"], "stop_token_ids": [8],
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "prompt_logprobs": 1,
    }  # fmt: skip
    body = CompletionBody.model_validate({"prompt": "x", "logprobs": 2, **given_})
    assert body.sampling() == SamplingParams(**given_, logprobs=2)
    assert set(given_) | {"logprobs"} == set(SamplingParams.__dataclass_fields__)


def test_chats_ask_for_log_probabilities_in_their_own_way() -> None:
    for given_, wanted in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ):
        body = ChatCompletionBody.model_validate({"messages": HI, **given_})
        assert body.sampling().logprobs == wanted


def test_echoed_prompts_come_with_log_probabilities_where_the_outputs_do() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "echo": True, "logprobs": 2})
    assert body.sampling().prompt_logprobs == 2


def test_a_chat_is_made_for_its_template() -> None:
    body = ChatCompletionBody.model_validate(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                {"role": "tool", "content": "5", "tool_call_id": "1"},
            ],
            "chat_template_kwargs": {"enable_thinking": False},
            "continue_final_message": True,
        }
    )
    assert chat_of(body) == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ],
        "enable_thinking": False,
        "continue_final_message": True,
    }


def test_the_template_may_not_bring_messages_of_its_own() -> None:
    body = ChatCompletionBody.model_validate(
        {"messages": HI, "chat_template_kwargs": {"messages": []}}
    )
    with pytest.raises(HttpError, match="may not hold 'messages'"):
        chat_of(body)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s, max_size=20)))
def test_a_value_is_shown_in_short(value: Any) -> None:
    assert len(shown(value)) < 120


@given(st.dictionaries(st.sampled_from([*FIELDS, "prompt", "tools", "x"]), JSON, max_size=6))
def test_any_body_is_taken_or_refused_in_words(body: dict[str, Any]) -> None:
    for kind in (ChatCompletionBody, CompletionBody):
        try:
            kind.model_validate(body).sampling().validate(100)
        except ValidationError as e:
            errors = [{**error, "loc": ("body", *error["loc"])} for error in e.errors()]
            assert complaint(errors, FIELDS).detail
        except RequestError as e:
            assert str(e)  # noqa: PT017
