"""How a body comes to an endpoint that generates."""

import asyncio
from typing import Any

import pytest
from fastapi import Request, Response

from http_proc.bodies import BodyRoute
from http_proc.errors import HttpError
from http_proc.schemas import CompletionBody


def given(*parts: dict[str, Any] | Exception) -> CompletionBody:
    """What the endpoint gets of a request that comes as these ASGI messages, or fails so."""
    seen: list[CompletionBody] = []
    coming = iter(parts)

    async def endpoint(body: CompletionBody, request: Request) -> Response:
        seen.append(body)
        return Response()

    async def receive() -> dict[str, Any]:
        part = next(coming)
        if isinstance(part, Exception):
            raise part
        return part

    route = BodyRoute("/", endpoint, methods=["POST"])
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(route.get_route_handler()(Request(scope, receive)))
    return seen[0]


def part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_parts_is_one() -> None:
    body = given(part(b'{"prompt": ', more=True), part(b'"x"}', more=False))
    assert body.prompt == ["x"]


def test_a_client_that_goes_within_its_body_is_no_fault_of_the_server() -> None:
    with pytest.raises(HttpError, match="closed the connection") as caught:
        given(part(b'{"prompt": ', more=True), {"type": "http.disconnect"})
    assert caught.value.status_code == 400


def test_a_fault_of_ours_is_not_taken_for_a_bad_body() -> None:
    with pytest.raises(AssertionError, match="a fault"):
        given(AssertionError("a fault"))
