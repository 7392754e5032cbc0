"""The HTTP requests that generate right now: each can be ended from outside, in whatever it waits.

Rule: a call that ends, however it does, leaves nothing running on the server.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from http_proc.errors import ClientGone
from runtime.client import Stream
from runtime.errors import TandemError

Receive = Callable[[], Awaitable[Any]]


class Calls:
    """All that are open."""

    def __init__(self) -> None:
        self.are_closed = False
        """Whether no new ones are let in."""
        self._open: set[Call] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def add(self, call: "Call") -> None:
        self._open.add(call)
        self._none_open.clear()

    def remove(self, call: "Call") -> None:
        self._open.discard(call)
        if not self._open:
            self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    async def abort(self, request_id: str) -> int:
        """End those of that id, which is a response's X-Request-Id or the `id` in its body, by the
        finish reason abort; how many.
        """
        meant = [call for call in self._open if request_id in (call.request_id, call.body_id)]
        for call in meant:
            await call.abort()
        return len(meant)

    def end_all(self, error: TandemError) -> None:
        """End each with `error`."""
        for call in list(self._open):
            call.end(error)

    async def wait_until_none(self) -> None:
        """Returns once none is open."""
        await self._none_open.wait()


class Call:
    """One HTTP request that generates: `async with` it, and what it waits for there ends when
    the client goes, or somebody calls `end`.
    """

    def __init__(self, calls: Calls, request_id: str, body_id: str, receive: Receive) -> None:
        """body_id: the `id` in the response's body."""
        self.request_id = request_id
        self.body_id = body_id
        self._calls = calls
        self._receive = receive
        self._error: TandemError | None = None
        self._streams: list[Stream] = []
        self._resources = AsyncExitStack()
        # A timeout without a time is asyncio's way to cancel a part of a task from outside.
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._calls.add(self)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._watcher.cancel()
        self._calls.remove(self)
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            await self._resources.aclose()

    async def add(self, starting: Awaitable[Stream]) -> Stream:
        """A stream of this call's: it is left when the call ends."""
        stream = await starting
        self._streams.append(stream)
        self._resources.push_async_callback(stream.leave)
        return stream

    async def abort(self) -> None:
        """End its requests; they still send their last chunks."""
        for stream in self._streams:
            await stream.abort()

    def end(self, error: TandemError) -> None:
        """Raise `error` in whoever is in the call; the first error counts."""
        if self._error is None:
            self._error = error
            with contextlib.suppress(RuntimeError):  # it is at its end already
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def _watch(self) -> None:
        """The body has been read: what comes next is the end of the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone("the client closed the connection"))
