"""What the blocking client does between its threads."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime.sync_client import _close, _LoopThread, _next


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stream_is_closed_after_the_wait_that_was_cancelled(has_begun: bool) -> None:
    """Ctrl-C that came just after a wait was asked for ended the shell: the stream was closed while
    the wait, whose cancellation came late, was only beginning.
    """
    loop, ended = _LoopThread(), threading.Event()

    async def stream() -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            ended.set()

    chunks, turn = stream(), asyncio.Lock()
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait()

    if has_begun:
        waiting = loop.submit(_next(chunks, turn))
        loop.run(_nothing())
    loop._loop.call_soon_threadsafe(hold)
    is_held.wait()
    if not has_begun:
        waiting = loop.submit(_next(chunks, turn))
    waiting.cancel()
    closing = loop.submit(_close(chunks, turn))
    go_on.set()
    closing.result(timeout=60)
    assert ended.is_set()
    loop.close(_nothing())
