"""How a body comes to the endpoints that generate: parsed and checked as FastAPI does it.

FastAPI's own way also solves dependencies, of which there are none here. That took a quarter of
this process's time until a prompt was on its way.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from http_proc.errors import HttpError


class BodyRoute(APIRoute):
    """A route whose endpoint is called with (body, request) and nothing else, and makes its own
    Response.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI asks for it."""
        endpoint, model = self.endpoint, self.endpoint.__annotations__["body"]

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(await _body(request, model), request)
            return response

        return handle


async def _body(request: Request, model: type[BaseModel]) -> BaseModel:
    """The body as `model`; RequestValidationError, as FastAPI raises it, if it is none."""
    given = await _given(request)
    try:
        return model.model_validate(given)
    except ValidationError as e:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors) from None


async def _given(request: Request) -> Any:
    """The JSON in the body; what is said to be something else stays bytes, which fit no model."""
    try:
        body = await request.body()
    except ClientDisconnect:
        # Nobody reads this answer: it is no fault, which would be logged.
        raise HttpError(400, "the client closed the connection within the request") from None
    if not body or not _is_json(request):
        return body
    try:
        return json.loads(body)
    except json.JSONDecodeError as e:
        reason = e.msg
    except UnicodeDecodeError:
        reason = "it is no UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:  # the one that is left: Python's limit of an integer's digits
        reason = "a number in it has too many digits"
    wrong = {"type": "json_invalid", "loc": ("body",), "ctx": {"error": reason}}
    raise RequestValidationError([wrong])


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
