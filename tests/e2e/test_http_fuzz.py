"""Whatever is sent, the answer is 2xx or 4xx, and no process dies of it."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from http_proc.schemas import ChatCompletionBody, CompletionBody
from http_proc.unserved import NEUTRAL_VALUES
from runtime.server import Server
from tests.fakes import simulated_server

FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, *HealthCheck],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its context is short, so that a request without a limit ends soon."""
    with simulated_server(http=True, http_port=0, max_seq_len_override=48) as running:
        yield running
        assert running.supervisor.error is None


@pytest.fixture(scope="module")
def connection(server: Server) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(str(server.http_url))
    made = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    yield made
    made.close()


def status_of(connection: http.client.HTTPConnection, path: str, body: bytes) -> int:
    """The status of a POST; its answer is JSON or events, and an error of the right shape."""
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status >= 400:
        assert len(data) < 4096
        assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
    elif response.getheader("content-type") == "application/json":
        json.loads(data)
    else:
        assert data.endswith(b"data: [DONE]\n\n")
    return response.status


@pytest.mark.filterwarnings("ignore")
def test_the_schema_describes_what_is_taken(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.http_url}/openapi.json")
    paths = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)

        @settings(FUZZ, max_examples=20)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            assert case.call().status_code < 500

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/abort"} <= paths


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text() | st.lists(st.integers(-1, 50_000)) | st.lists(st.text(), max_size=3)
    | st.lists(st.lists(st.integers(0, 49151), min_size=1, max_size=4), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]),
                "content": st.none() | st.text()
                | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
            }
        ),
        max_size=4,
    ),
    "stop": st.text() | st.lists(st.text(), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 50_000).map(str), st.floats(), max_size=3),
    "chat_template_kwargs": st.dictionaries(st.text(), st.integers() | st.text(), max_size=3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "model": st.sampled_from(["SmolLM2-135M-Instruct", "other"]),
    "n": st.integers(-1, 5),
}  # fmt: skip
NUMBERS = st.integers(-2, 60) | st.floats() | st.integers()
IDS = st.lists(st.integers(-1, 50_000), max_size=3)
ANY = st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | IDS


def bodies(fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly plausible values of mostly known fields."""
    optional = {
        name: VALUES.get(name, st.booleans() | NUMBERS | IDS)
        | st.sampled_from([None, *NEUTRAL_VALUES.get(name, ())])
        | ANY
        for name in (*fields, "response_format", "tools", "logit_processor")
    }
    return st.fixed_dictionaries({}, optional=optional)


@FUZZ
@given(body=bodies(CompletionBody.model_fields))
def test_any_completion_is_answered_or_refused(
    connection: http.client.HTTPConnection, body: dict[str, Any]
) -> None:
    assert status_of(connection, "/v1/completions", json.dumps(body).encode()) < 500


@FUZZ
@given(
    prompt=VALUES["prompt"],
    wanted=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(1, 8), "n": st.integers(1, 4), "stream": st.booleans(),
            "echo": st.booleans(), "logprobs": st.integers(0, 3), "seed": st.integers(0, 9),
            "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1),
            "stop": st.text("ab", min_size=1),
            "return_token_ids": st.booleans(), "min_tokens": st.integers(0, 3),
            "prompt_logprobs": st.integers(0, 2), "ignore_eos": st.booleans(),
        },
    ),
)  # fmt: skip
def test_any_sensible_completion_is_answered_or_refused(
    connection: http.client.HTTPConnection, prompt: Any, wanted: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": prompt, **wanted}).encode()
    assert status_of(connection, "/v1/completions", body) < 500


@FUZZ
@given(body=bodies(ChatCompletionBody.model_fields))
def test_any_chat_is_answered_or_refused(
    connection: http.client.HTTPConnection, body: dict[str, Any]
) -> None:
    assert status_of(connection, "/v1/chat/completions", json.dumps(body).encode()) < 500


@FUZZ
@given(body=st.binary(max_size=100))
def test_any_bytes_are_refused(connection: http.client.HTTPConnection, body: bytes) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/abort"):
        assert status_of(connection, path, body) == 400
