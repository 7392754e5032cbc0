"""`Client`: the ZMQ endpoint for programs without asyncio; usable from any number of threads at
once.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar, overload

from runtime.client import AsyncClient, Prompt, Stream
from runtime.completion import Completion
from runtime.errors import ConnectionLost
from runtime.messages import Chunk, Tokenized, Welcome
from runtime.sampling import SamplingParams
from runtime.types import Json

_T = TypeVar("_T")
END_S = 1.0
"""How long the calls of other threads may take to end once the client is closed."""


class _LoopThread:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="tandem client", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Start `work` on the loop; ConnectionLost if that is closed."""
        with self._lock:
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ConnectionLost("the client was closed")

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result; an interrupt of the waiting thread cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """`run` for what the garbage collector may call too, on any thread and at any time."""
        with contextlib.suppress(ConnectionLost):
            future = self.submit(work)
            if threading.current_thread() is not self._thread:
                future.result()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Do `last`, let every other call end by it, and end the thread; not twice."""
        with self._lock:
            is_first, self._is_open = self._is_open, False
        if not is_first:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await last
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                _, late = await asyncio.wait(others, timeout=END_S)
                for task in late:
                    task.cancel()
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.call_soon(self._loop.stop)


class SyncStream:
    """A running request's chunks: `for chunk in stream`."""

    def __init__(self, loop: _LoopThread, stream: Stream) -> None:
        self.request = stream.request
        self._loop = loop
        self._stream = stream

    def __iter__(self) -> Iterator[Chunk]:
        chunks, turn = aiter(self._stream), asyncio.Lock()
        try:
            while (chunk := self._loop.run(_next(chunks, turn))) is not None:
                yield chunk
        finally:
            self._loop.clean_up(_close(chunks, turn))

    def abort(self) -> None:
        """End the request; its last chunk still comes, with finish_reason abort."""
        self._loop.run(self._stream.abort())


async def _next(chunks: AsyncIterator[Chunk], turn: asyncio.Lock) -> Chunk | None:
    async with turn:
        return await anext(chunks, None)


async def _close(chunks: AsyncIterator[Chunk], turn: asyncio.Lock) -> None:
    async with turn:  # what an interrupt has cancelled may only be beginning
        await chunks.aclose()  # type: ignore[attr-defined]


class Client:
    """One connection to a server. The calls are those of AsyncClient, and wait."""

    def __init__(self, endpoint: str, timeout_s: float = 10.0) -> None:
        """Connect to `endpoint`; ConnectionLost if no server answers in time."""
        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(AsyncClient.connect(endpoint, timeout_s))
        except BaseException:
            self._loop.close(_nothing())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is open and disconnect; a second call does nothing."""
        self._loop.close(self._client.close())

    @property
    def server(self) -> Welcome:
        """What the server says of itself."""
        assert self._client.server is not None
        return self._client.server

    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[False] = False,
    ) -> Completion: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[True],
    ) -> SyncStream: ...  # fmt: skip
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: bool = False,
    ) -> Completion | SyncStream:  # fmt: skip
        """Complete a text or token ids: a Completion, or with `stream` a stream of chunks."""
        if stream:
            work = self._client.generate(
                prompt, sampling, timeout_s=timeout_s, priority=priority, stream=True
            )
            return SyncStream(self._loop, self._loop.run(work))
        whole = self._client.generate(prompt, sampling, timeout_s=timeout_s, priority=priority)
        return self._loop.run(whole)

    @overload
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[False] = False,
        **template: Any,
    ) -> Completion: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[True],
        **template: Any,
    ) -> SyncStream: ...  # fmt: skip
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: bool = False,
        **template: Any,
    ) -> Completion | SyncStream:  # fmt: skip
        """`generate` the answer to a chat: [{"role": …, "content": …}, …]."""
        client = self._client
        if stream:
            work = client.chat(
                messages, sampling, timeout_s=timeout_s, priority=priority, stream=True, **template
            )
            return SyncStream(self._loop, self._loop.run(work))
        whole = client.chat(
            messages, sampling, timeout_s=timeout_s, priority=priority, stream=False, **template
        )
        return self._loop.run(whole)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self._loop.run(self._client.tokenize(text, add_special_tokens=add_special_tokens))

    def tokenize_chat(self, messages: Sequence[Json], **template: Any) -> Tokenized:
        """The prompt that `chat` would send: its token_ids (int32) and its text."""
        return self._loop.run(self._client.tokenize_chat(messages, **template))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._loop.run(
            self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def abort(self, request: int) -> None:
        """End the request with that number (a stream's `request`); nothing if it has ended."""
        self._loop.run(self._client.abort(request))

    def stats(self) -> Json:
        """The scheduler's counters; docs/interfaces.md explains each."""
        return self._loop.run(self._client.stats())

    def flush_cache(self) -> int:
        """Forget all cached pages that no running request uses; how many."""
        return self._loop.run(self._client.flush_cache())

    def health(self, timeout_s: float = 5.0) -> bool:
        """Whether tokenizer and scheduler answer and steps move where there is work."""
        return self._loop.run(self._client.health(timeout_s))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine that uses `async_client` on this client's loop."""
        return self._loop.run(work)

    @property
    def async_client(self) -> AsyncClient:
        """The client underneath, for coroutines given to `run`."""
        return self._client


async def _nothing() -> None:
    """There is nothing left to do."""
