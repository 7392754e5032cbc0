"""Events and whole responses: the fast way writes what the slow one would."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_proc.outputs import Output, Usage
from http_proc.shapes import ChatShape, CompletionShape, Echo, Head
from runtime.logprobs import Logprobs
from runtime.messages import Chunk, FinishReason
from runtime.types import Json


def head(**asked: bool) -> Head:
    wants = {
        "include_usage": False,
        "continuous_usage": False,
        "return_token_ids": False,
        "has_logprobs": False,
        **asked,
    }
    return Head(id="cmpl-1", created=5, model='m"odel', **wants)


def chunk(text: str = "", ids: tuple[int, ...] = (), reason: str | None = None,
          **others: Any) -> Chunk:  # fmt: skip
    return Chunk(
        request=0, offset=0, token_ids=np.array(ids, np.int32), text=text,
        finish_reason=None if reason is None else FinishReason(reason),
        matched_stop=others.pop("matched_stop", None), num_prompt_tokens=7, num_cached_tokens=3,
        **others,
    )  # fmt: skip


def logprobs(*tokens: tuple[bytes, float]) -> Logprobs:
    """Of tokens of one entry each."""
    return Logprobs(
        counts=np.ones(len(tokens), np.int32),
        token_ids=np.arange(len(tokens), dtype=np.int32),
        values=np.array([value for _, value in tokens], np.float32),
        spelled=tuple(token for token, _ in tokens),
    )


def events(data: bytes) -> list[Json]:
    parts = data.split(b"\n\n")
    assert parts.pop() == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.booleans(), st.booleans())
def test_any_text_survives_its_event(text: str, usage: bool, is_chat: bool) -> None:
    shape = (ChatShape if is_chat else CompletionShape)(head(include_usage=usage), [Echo()] * 3)
    found = events(shape.delta(2, chunk(text, (1,))))
    assert len(found) == (1 if text else 0)
    for event in found:
        (choice,) = event.pop("choices")
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        fixed = {"id": "cmpl-1", "object": kind, "created": 5, "model": 'm"odel'}
        assert event == fixed | ({"usage": None} if usage else {})
        shown = {"delta": {"content": text}} if is_chat else {"text": text}
        assert choice == {"index": 2, **shown, "logprobs": None, "finish_reason": None}


def test_a_chat_begins_with_the_role_and_ends_with_a_reason() -> None:
    shape = ChatShape(head(), [Echo()])
    (first,) = events(shape.first(0))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text, end = events(shape.delta(0, chunk("a", (1,), "stop", matched_stop="END")))
    assert text["choices"][0]["delta"] == {"content": "a"}
    assert text["choices"][0]["finish_reason"] is None
    assert end["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "matched_stop": "END",
    }  # fmt: skip


def test_a_completion_begins_with_its_echo_if_there_is_one() -> None:
    shape = CompletionShape(head(), [Echo(text="once"), Echo()])
    assert events(shape.first(0))[0]["choices"][0]["text"] == "once"
    assert shape.first(1) == b""
    output = Output(0)
    output.add(chunk(" more", (1, 2), "length"))
    body = json.loads(shape.whole([output], {"total_tokens": 9}))
    assert body["choices"] == [
        {"index": 0, "text": "once more", "logprobs": None, "finish_reason": "length",
         "matched_stop": None}
    ]  # fmt: skip
    assert body["usage"] == {"total_tokens": 9}


def test_token_ids_come_where_they_are_asked_for() -> None:
    shape = ChatShape(head(return_token_ids=True), [Echo(token_ids=[7, 8])])
    (first,) = events(shape.first(0))
    assert first["choices"][0]["prompt_token_ids"] == [7, 8]
    (event,) = events(shape.delta(0, chunk("", (5,))))  # half a character has no text yet
    assert event["choices"][0]["token_ids"] == [5]
    output = Output(0)
    output.add(chunk("a", (5, 6), "stop"))
    (choice,) = json.loads(shape.whole([output], {}))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5, 6], [7, 8])


def test_log_probabilities_of_chats() -> None:
    shape = ChatShape(head(has_logprobs=True), [Echo()])
    part = chunk("é", (5,), logprobs=logprobs(("é".encode(), -0.5)))
    (event,) = events(shape.delta(0, part))
    assert event["choices"][0]["logprobs"] == {
        "content": [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}],
        "refusal": None,
    }


def test_log_probabilities_of_completions_go_on_from_event_to_event() -> None:
    shape = CompletionShape(head(has_logprobs=True), [Echo(text="ab", first_token=b"a")])
    whole = [
        chunk(prompt_logprobs=logprobs((b"b", -1.0))),
        chunk("é", (5, 6), logprobs=logprobs((b"\xc3", -2.0), (b"\xa9", -4.0))),
        chunk("c", (7,), "length", logprobs=logprobs((b"c", -8.0))),
    ]
    shown = [e["choices"][0]["logprobs"] for part in whole for e in events(shape.delta(0, part))]
    del shown[-1]  # the event of the end
    tokens = ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "c"]
    assert [token for part in shown for token in part["tokens"]] == tokens
    values = [None, -1.0, -2.0, -4.0, -8.0]
    assert [value for part in shown for value in part["token_logprobs"]] == values
    assert [offset for part in shown for offset in part["text_offset"]] == [0, 1, 2, 2, 3]
    output = Output(0)
    for part in whole:
        output.add(part)
    again = CompletionShape(head(has_logprobs=True), [Echo(text="ab", first_token=b"a")])
    (choice,) = json.loads(again.whole([output], {}))["choices"]
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -1.0}]


def test_prompt_log_probabilities_begin_with_none() -> None:
    shape = ChatShape(head(), [Echo()])
    parts = [chunk(prompt_logprobs=logprobs((b"b", -1.0))) for _ in range(2)]
    shown = [e["choices"][0]["prompt_logprobs"] for p in parts for e in events(shape.delta(0, p))]
    assert [len(part) for part in shown] == [2, 1]
    assert shown[0][0] is None
    assert shown[1][0]["token"] == "b"


def test_usage_counts_a_prompt_once_and_what_its_first_output_found_cached() -> None:
    usage = Usage()
    for job in (0, 0, 1):
        usage.count(job, chunk("a", (1, 2)))
        usage.count(job, chunk("a", (3,), "stop"))
    assert usage.as_json() == {
        "prompt_tokens": 14,
        "completion_tokens": 9,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_the_usage_event_has_no_choices(shape: Any) -> None:
    (event,) = events(shape(head(include_usage=True), [Echo()]).usage({"total_tokens": 1}))
    assert (event["choices"], event["usage"]) == ([], {"total_tokens": 1})
