"""Every endpoint: a request's body to what is asked of the server, and its response."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from http_proc.answers import Answer, Job, Order
from http_proc.bodies import BodyRoute
from http_proc.calls import Calls
from http_proc.chat import chat_of
from http_proc.errors import HttpError, as_http_error
from http_proc.health import Health
from http_proc.link import Link
from http_proc.prompts import chat_ids, echo_of, token_ids
from http_proc.schemas import (
    MAX_CHOICES,
    AbortBody,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from http_proc.shapes import ChatShape, CompletionShape, Echo, Head, Shape
from runtime.errors import RequestError
from runtime.types import Json

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What the endpoints work with."""

    link: Link
    calls: Calls
    health: Health
    model: str
    max_seq_len: int
    started: int
    """Unix time, seconds."""


def add_generation_routes(router: APIRouter, front: Front) -> None:
    """Chats and completions."""

    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        """Answer a chat."""
        _check_model(front, body.model)
        chat = chat_of(body)
        n = _n_of(body, 1)
        head = _head(front, body, f"chatcmpl-{request.state.request_id}")
        ids = await chat_ids(front.link.client, chat) if body.return_token_ids else None
        shape = ChatShape(head, [Echo(token_ids=ids)] * n)
        return _answer(front, request, body, [Job(chat=chat, n=n, first=0)], head, shape)

    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete one prompt or many."""
        _check_model(front, body.model)
        n = _n_of(body, len(body.prompt))
        jobs = [Job(prompt=p, n=n, first=i * n) for i, p in enumerate(body.prompt)]
        head = _head(front, body, f"cmpl-{request.state.request_id}")
        echoes = [await echo_of(front.link.client, body, prompt) for prompt in body.prompt]
        shape = CompletionShape(head, [echo for echo in echoes for _ in range(n)])
        return _answer(front, request, body, jobs, head, shape)

    for path, endpoint in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
    ):
        router.add_api_route(path, endpoint, methods=["POST"], route_class_override=BodyRoute)


def add_server_routes(router: APIRouter, front: Front) -> None:
    """Everything else."""

    @router.get("/v1/models")
    async def models() -> Json:
        """The models that are served: one."""
        return {"object": "list", "data": [_model(front)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Json:
        """One model."""
        _check_model(front, model)
        return _model(front)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        """The token ids of a text, or of the prompt that a chat becomes."""
        _check_model(front, body.model)
        ids = await token_ids(front.link.client, body)
        return {"tokens": ids, "count": len(ids), "max_model_len": front.max_seq_len}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        """The text of token ids."""
        _check_model(front, body.model)
        skip = body.skip_special_tokens or False
        try:
            text = await front.link.client.detokenize(body.tokens, skip_special_tokens=skip)
        except RequestError as e:
            raise as_http_error(e, {"token_ids": "tokens"}) from None
        return {"prompt": text}

    @router.get("/health")
    async def health() -> Response:
        """200 while every process answers and steps move, else 503."""
        if (fault := await front.health.fault()) is not None:
            raise HttpError(503, fault)
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def version_() -> Json:
        """The version of Tandem."""
        return {"version": tandem_version()}

    @router.post("/flush_cache")
    async def flush_cache() -> Json:
        """Forget cached prefixes that no running request uses."""
        return {"pages": await front.link.client.flush_cache()}

    @router.post("/abort")
    async def abort(body: AbortBody) -> Json:
        """End a running request, by its X-Request-Id or the id in its response."""
        return {"aborted": await front.calls.abort(body.request_id)}


def tandem_version() -> str:
    """As its package says; "unknown" where it runs from a folder that was never installed."""
    try:
        return version("tandem-llm")
    except PackageNotFoundError:
        return "unknown"


def _answer(
    front: Front, request: Request, body: GenerationBody, jobs: Sequence[Job], head: Head,
    shape: Shape,
) -> Answer:  # fmt: skip
    if body.user is not None:
        _LOG.debug("%s is of user %.200r", head.id, body.user)
    order = Order(
        jobs=jobs,
        sampling=body.sampling(),
        priority=body.priority or 0,
        stream=body.stream or False,
        include_usage=head.include_usage,
        continuous_usage=head.continuous_usage,
        names=body.names(),
    )
    return Answer(front.link.client, front.calls, request.state.request_id, head.id, order, shape)


def _head(front: Front, body: GenerationBody, body_id: str) -> Head:
    options = body.stream_options
    return Head(
        id=body_id,
        created=int(time.time()),
        model=front.model,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        return_token_ids=body.return_token_ids or False,
        has_logprobs=body.num_logprobs() is not None,
    )


def _n_of(body: GenerationBody, num_prompts: int) -> int:
    n = body.n or 1
    if n * num_prompts > MAX_CHOICES:
        raise HttpError(
            400, f"{num_prompts} prompts with n={n} are {n * num_prompts} outputs: at most"
            f" {MAX_CHOICES} are taken at once", param="n",
        )  # fmt: skip
    return n


def _check_model(front: Front, name: str | None) -> None:
    if name is not None and name != front.model:
        raise HttpError(
            404, f"the model {name[:80]!r} is not served here; {front.model!r} is",
            param="model", code="model_not_found",
        )  # fmt: skip


def _model(front: Front) -> Json:
    return {
        "id": front.model,
        "object": "model",
        "created": front.started,
        "owned_by": "tandem",
        "max_model_len": front.max_seq_len,
    }
