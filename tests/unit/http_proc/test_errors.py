"""Errors keep OpenAI's shape and stay small, whatever they tell."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_proc.errors import HttpError, as_http_error, error_body, error_response
from runtime.errors import (
    ConnectionLost,
    InternalError,
    Overloaded,
    ProcessDied,
    RequestAborted,
    RequestError,
    TandemError,
)


@given(st.text() | st.text(alphabet="😀\x00\ud800\\", min_size=3000, max_size=5000), st.text())
def test_an_error_is_always_less_than_4_kb(text: str, param: str) -> None:
    body = error_body(HttpError(400, text, param=param, code="unknown_parameter"))
    assert len(body) < 4096
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text.startswith(error["message"].removesuffix("…"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x"), 400),
        (Overloaded("x"), 429),
        (RequestAborted("x"), 503),
        (ConnectionLost("x"), 503),
        (ProcessDied("x"), 503),
        (InternalError("x"), 500),
    ],
)
def test_an_error_of_the_server_has_its_status(error: TandemError, status: int) -> None:
    assert as_http_error(error).status_code == status


@pytest.mark.parametrize("status", [429, 503])
def test_who_may_try_again_is_told_when(status: int) -> None:
    assert error_response(HttpError(status, "x")).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(HttpError(400, "x")).headers
