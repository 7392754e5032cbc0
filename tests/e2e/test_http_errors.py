"""What HTTP clients are told when something is wrong: status, shape, code and field."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from runtime.server import Server
from runtime.sync_client import Client
from tests.fakes import SLOW_ECHO, HttpPeer, get, simulated_server, until
from tests.openai_api import HI, MODEL, MODES, PROMPT, client_of, complete, post


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with simulated_server(http=True, http_port=0, max_seq_len_override=512) as running:
        yield running


BAD: dict[str, tuple[Any, int, str]] = {
    "bad JSON": (b'{"prompt": ', 400, "the body is not valid JSON"),
    "no JSON": (b'{"prompt": "\xe9"}', 400, "it is no UTF-8"),
    "too deep": (b"[" * 100_000, 400, "it is nested too deeply"),
    "a huge number": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "too many digits"),
    "no object": ([], 400, "must be a JSON object"),
    "an empty prompt": ({"prompt": ""}, 400, "the prompt is empty"),
    "no ids": ({"prompt": []}, 400, "prompt is empty"),
    "an unknown id": ({"prompt": [49152]}, 400, "token id 49152 is outside the vocabulary"),
    "half a pair": (b'{"prompt": "\\ud800"}', 400, ""),
    "too long": ({"prompt": "a b " * 1000}, 400, "this server takes 512"),
    "absurdly long": ({"prompt": "a" * 100_000}, 400, "100000 characters were given"),
    "too many tokens": ({"prompt": "x", "max_tokens": 513}, 400, "together 514"),
    "a bad value": ({"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
    "no number": (b'{"prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
    "too large": ({"prompt": "a" * (4 << 20)}, 413, "this server takes 4194304"),
    "too many outputs": ({"prompt": ["x"] * 2000, "n": 2}, 400, "are 4000 outputs"),
    "tools": ({"prompt": "x", "tools": [{}]}, 400, "which this server does not support"),
    "a form": (
        {"prompt": "x", "response_format": {"type": "json_object"}},
        400,
        "response_format is {'type': 'json_object'}",
    ),
}


FAULTS = {
    "bad JSON": (None, None),
    "an empty prompt": ("prompt", "invalid_value"),
    "no ids": ("prompt", "invalid_value"),
    "an unknown id": ("prompt", "invalid_value"),
    "too long": ("prompt", "context_length_exceeded"),
    "absurdly long": ("prompt", "context_length_exceeded"),
    "too many tokens": ("max_tokens", "context_length_exceeded"),
    "a bad value": ("temperature", "invalid_value"),
    "too large": (None, None),
    "too many outputs": ("n", "invalid_value"),
    "tools": ("tools", "unsupported_value"),
    "a form": ("response_format", "unsupported_value"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_have_openais_codes_and_name_the_field(url: str, name: str) -> None:
    error = post(url, "/v1/completions", BAD[name][0])[1]["error"]
    assert (error["param"], error["code"]) == FAULTS[name]


CHAT_FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"messages": [{"role": "user", "content": "a b " * 1000}]},
        "messages", "context_length_exceeded", "this server takes 512",
    ),
    (
        {"max_completion_tokens": 600},
        "max_completion_tokens", "context_length_exceeded", "this server takes 512",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value",
     "max_completion_tokens is 0: must be"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "max_tokens is 0: must be"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value",
     "top_logprobs is 21: must be"),
    ({"priority": 101}, "priority", "invalid_value", "priority is 101"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value",
     "may not hold 'messages'"),
    ({"model": "gpt-9"}, "model", "model_not_found", "'gpt-9' is not served here"),
]  # fmt: skip


@MODES
@pytest.mark.parametrize(("given", "param", "code", "says"), CHAT_FAULTS)
def test_a_chats_errors_name_the_field_as_its_client_does(
    api: OpenAI, given: Any, param: str, code: str, says: str, stream: bool
) -> None:
    """Also those that only the server behind can find."""
    with pytest.raises(openai.APIStatusError, match=says) as caught:
        api.chat.completions.create(model=MODEL, messages=HI, stream=stream, extra_body=given)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_ids_that_are_no_tokens_are_named_as_their_endpoint_does(url: str) -> None:
    for ids in ([1 << 40], [49152]):
        error = post(url, "/detokenize", {"tokens": ids})[1]["error"]
        assert (error["param"], error["code"]) == ("tokens", "invalid_value")


@pytest.mark.parametrize(("body", "status", "says"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_told(url: str, body: Any, status: int, says: str) -> None:
    code, answer = post(url, "/v1/completions", body)
    assert code == status, answer
    assert says in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_template_that_refuses_a_chat_says_why(url: str) -> None:
    message = {"role": "user", "content": None}
    code, answer = post(url, "/v1/chat/completions", {"messages": [message]})
    assert code == 400
    assert "message 0 ('user') has no 'content'" in answer["error"]["message"]


def test_paths_and_methods_that_are_not_there_have_errors_of_the_same_shape(url: str) -> None:
    assert post(url, "/v1/nothing", {})[0] == 404
    status, body = get(f"{url}/v1/completions")
    assert (status, body["error"]["type"]) == (405, "invalid_request_error")


def test_a_body_in_chunks_is_limited_too(url: str) -> None:
    with HttpPeer(url) as peer:
        peer.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        for _ in range(5):
            peer.send(piece)
        peer.send(b"0\r\n\r\n")
        assert peer.until(b"\r\n").startswith(b"HTTP/1.1 413")


def test_what_is_no_request_is_refused_in_the_same_shape(url: str) -> None:
    endless = b"GET /health HTTP/1.1\r\n" + b"a: " + b"b" * 200_000
    for sent, status in ((b"nonsense\r\n\r\n", b"400"), (endless, b"431")):
        with HttpPeer(url) as peer:
            peer.send(sent[:100_000])
            if status == b"431":
                peer.send(sent[100_000:])
            head, _, body = peer.rest().partition(b"\r\n\r\n")
        assert head.split()[1] == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    with HttpPeer(url) as peer:  # many requests on one connection are not one long head
        for _ in range(4):
            peer.post("/tokenize", {"prompt": "a" * 20_000})
            assert peer.until(b"\r\n").startswith(b"HTTP/1.1 200")
            peer.until(b"max_model_len")
            peer.until(b"}")


def test_the_key_is_asked_for() -> None:
    with simulated_server(http=True, http_port=0, api_key="sesame") as server:
        url = str(server.http_url)
        with client_of(url, "sesame") as api:
            assert complete(api, False).choices
        with client_of(url, "guess") as api:
            with pytest.raises(openai.AuthenticationError, match="wrong or no API key") as caught:
                complete(api, False)
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                api.models.list()
        assert post(url, "/flush_cache", b"")[0] == 401
        assert get(f"{url}/health")[0] == 200


def test_a_full_queue_is_told_with_when_to_try_again() -> None:
    with (
        simulated_server(
            *SLOW_ECHO, http=True, http_port=0, max_running_req=1, max_queued_req=1
        ) as server,
        client_of(str(server.http_url)) as api,
        Client(server.endpoint) as client,
        HttpPeer(str(server.http_url)) as runs,
        HttpPeer(str(server.http_url)) as waits,
    ):
        for peer, key in ((runs, "running"), (waits, "waiting")):
            peer.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 30_000})
            until(lambda key=key: client.stats()[key] == 1, f"one is {key}")  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError, match="1 requests wait already") as caught:
            complete(api, True)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
