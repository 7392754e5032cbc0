"""The response to a request that generates: whole, or as server-sent events."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from http_proc.calls import Call, Calls
from http_proc.errors import ClientGone, as_http_error, error_body
from http_proc.outputs import Output, Usage
from http_proc.shapes import DONE, Shape
from runtime.client import AsyncClient, Prompt, Stream
from runtime.errors import TandemError
from runtime.sampling import SamplingParams
from runtime.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt, or one chat; it has `n` outputs, numbered from `first` among the response's."""

    prompt: Prompt | None = None
    chat: Json | None = None
    n: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a client wants computed."""

    jobs: Sequence[Job]
    sampling: SamplingParams
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    names: Mapping[str, str] = field(default_factory=dict)
    """Of fields that the client knows by another name than SamplingParams."""


class Answer(Response):
    """Computes when it is sent: so it hears when its client goes, at any time."""

    def __init__(
        self, client: AsyncClient, calls: Calls, request_id: str, body_id: str,
        order: Order, shape: Shape,
    ) -> None:  # fmt: skip
        super().__init__()
        self._client = client
        self._calls = calls
        self._request_id = request_id
        self._body_id = body_id
        self._order = order
        self._shape = shape
        self._usage = Usage()
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Errors before the first byte are raised: they become responses of their own."""
        try:
            async with Call(self._calls, self._request_id, self._body_id, receive) as call:
                streams = [await call.add(self._start(job)) for job in self._order.jobs]
                if self._order.stream:
                    await self._send_events(streams, send)
                else:
                    await self._send_whole(streams, send)
        except ClientGone:
            return
        except TandemError as e:
            if not self._has_begun:
                raise as_http_error(e, self._order.names) from None
            if self._order.stream:
                body = b"data: " + error_body(as_http_error(e)) + b"\n\n" + DONE
                with contextlib.suppress(ClientGone):
                    await _send_body(send, body, more=False)

    async def _start(self, job: Job) -> Stream:
        return await self._client.submit(
            job.prompt,
            self._order.sampling,
            chat=job.chat,
            deltas=self._order.stream,
            priority=self._order.priority,
        )

    # ---- whole ----------------------------------------------------------------------------

    async def _send_whole(self, streams: Sequence[Stream], send: Send) -> None:
        outputs = [Output(index) for index in range(sum(job.n for job in self._order.jobs))]
        for number, stream in enumerate(streams):
            first = self._order.jobs[number].first
            async for chunk in stream:
                outputs[first + chunk.index].add(chunk)
                self._usage.count(number, chunk)
        body = self._shape.whole(outputs, self._usage.as_json())
        self._has_begun = True
        await _send_head(send, b"application/json", (b"content-length", b"%d" % len(body)))
        await _send_body(send, body, more=False)

    # ---- as events ------------------------------------------------------------------------

    async def _send_events(self, streams: Sequence[Stream], send: Send) -> None:
        """Each stream's chunks as they come. The head is sent with the first of them: until then
        the request may be refused with a status of its own.
        """
        if len(streams) == 1:
            await self._pump(0, streams[0], send)
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, stream in enumerate(streams):
                        group.create_task(self._pump(number, stream, send))
            except BaseExceptionGroup as e:
                raise e.exceptions[0] from None
        usage = self._shape.usage(self._usage.as_json()) if self._order.include_usage else b""
        await _send_body(send, usage + DONE, more=False)

    async def _pump(self, number: int, stream: Stream, send: Send) -> None:
        """One stream's chunks, in one write for all that have come meanwhile."""
        shape, usage, job = self._shape, self._usage, self._order.jobs[number]
        for index in range(job.first, job.first + job.n):
            shape.prepare(index)
        begun: set[int] = set()
        async for chunks in stream.batches():
            events = []
            for chunk in chunks:
                index = job.first + chunk.index
                usage.count(number, chunk)
                if self._order.continuous_usage:
                    shape.tell_usage(usage.as_json())
                if index not in begun:
                    begun.add(index)
                    events.append(shape.first(index))
                events.append(shape.delta(index, chunk))
            if not self._has_begun:
                self._has_begun = True
                await _send_head(send, b"text/event-stream; charset=utf-8", _NO_CACHE)
            if body := b"".join(events):
                await _send_body(send, body, more=True)


_NO_CACHE = (b"cache-control", b"no-cache")


async def _send_head(send: Send, content_type: bytes, header: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", content_type), header]
    await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await _send(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except RuntimeError as e:  # uvloop's way to say that the connection was closed meanwhile
        raise ClientGone(f"the client closed the connection: {e}") from None
