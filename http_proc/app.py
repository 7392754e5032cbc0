"""The ASGI application: the door, then FastAPI with every endpoint and error."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from http_proc.complaints import complaint
from http_proc.door import Door
from http_proc.errors import HttpError, as_http_error, error_response
from http_proc.routes import Front, add_generation_routes, add_server_routes, tandem_version
from http_proc.schemas import (
    AbortBody,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
)
from runtime.errors import TandemError

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in {
        400: "the request can't be served as asked",
        401: "wrong or no API key",
        404: "no such model or path",
        405: "no such method",
        413: "the body is too large",
        429: "too many requests wait",
        503: "the server is shutting down, or not well",
    }.items()
}


_BODIES = (ChatCompletionBody, CompletionBody, TokenizeBody, DetokenizeBody, AbortBody, Message)
_FIELDS = list(dict.fromkeys(name for body in _BODIES for name in body.model_fields))
"""What a misspelled field may have been meant to be."""


def application(front: Front, api_key: str | None) -> ASGIApp:
    """The whole application."""
    return Door(api(front), api_key=api_key, is_draining=lambda: front.calls.are_closed)


def api(front: Front) -> FastAPI:
    """The endpoints, their errors and their OpenAPI schema."""
    app = FastAPI(
        title="Tandem",
        version=tandem_version(),
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        strict_content_type=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    # Into the app's own router: one that is included is gone through twice for each request.
    add_generation_routes(app.router, front)
    add_server_routes(app.router, front)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(Exception, _on_fault)
    return app


async def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(complaint(error.errors(), _FIELDS))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error)


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(as_http_error(error))


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours: uvicorn logs it."""
    return error_response(HttpError(500, f"the server failed: {type(error).__name__}: {error}"))
