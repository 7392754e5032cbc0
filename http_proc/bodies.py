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
from starlette.exceptions import HTTPException
from starlette.responses import Response


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
        return json.loads(body) if body and _is_json(request) else body
    except json.JSONDecodeError as e:
        wrong = {"type": "json_invalid", "loc": ("body", e.pos), "ctx": {"error": e.msg}}
        raise RequestValidationError([wrong]) from None
    except HTTPException:
        raise
    except Exception:
        raise HTTPException(400, "There was an error parsing the body") from None


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
