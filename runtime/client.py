"""`AsyncClient`: the ZMQ endpoint for asyncio programs. `runtime.sync_client` is the same for
threads, `runtime.connection` what is below both.
"""

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import numpy as np

from runtime.async_transport import AsyncTransport
from runtime.completion import Completion, completion_of
from runtime.connection import Connection, Mailbox
from runtime.errors import RequestAborted, RequestError, TandemError
from runtime.messages import (
    CREDIT,
    Chunk,
    Detokenize,
    Detokenized,
    FlushCache,
    Flushed,
    Generate,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Welcome,
)
from runtime.sampling import SamplingParams
from runtime.types import IntArray, Json, RequestId

JOIN_S = 10.0
"""How long a server's other tokenizers may take to answer; later they are done without."""

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
_T = TypeVar("_T")


class Stream:
    """A running request's chunks: `async for chunk in stream`. Left early or dropped, or by
    `abort`, it ends on the server too.
    """

    def __init__(
        self, connection: Connection, request: int, mailbox: Mailbox, sampling: SamplingParams
    ) -> None:
        self.request = request
        self._sampling = sampling
        self._num_left = sampling.n
        """Outputs whose last chunk was not taken yet."""
        self._connection = connection
        self._mailbox = mailbox
        self._is_left = False
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _abandon, loop, connection, request).atexit = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def abort(self) -> None:
        """End the request; its last chunk still comes, with finish_reason abort."""
        await self._connection.abort(self.request)

    async def whole(self) -> Completion:
        """Everything, once it has ended."""
        return completion_of([chunk async for chunk in self], self._sampling)

    async def batches(self) -> AsyncGenerator[list[Chunk], None]:
        """The same chunks, all that have come since the last batch at once."""
        if self._is_left:
            raise RequestAborted("the stream was left before its end, which ended its request")
        try:
            while self._num_left:
                try:
                    batch = await self._mailbox.take()
                except TandemError:
                    self._num_left = 0
                    raise
                self._num_left -= sum(chunk.finish_reason is not None for chunk in batch)
                if self._mailbox.num_taken >= CREDIT // 2 and self._num_left:
                    await self._connection.grant(self.request)
                yield batch
        finally:
            await self.leave()

    async def leave(self) -> None:
        """End the request, if it still runs: nobody listens to it any more."""
        self._is_left = self._num_left > 0
        await self._connection.leave(self.request, is_done=not self._is_left)

    async def _chunks(self) -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk


def _abandon(loop: asyncio.AbstractEventLoop, connection: Connection, request: int) -> None:
    """A stream was dropped, on whatever thread: its request need not go on."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
        loop.call_soon_threadsafe(connection.abandon, request)


class AsyncClient:
    """One server, for any number of calls at once.

    Where the server has several tokenizers there is a connection to each that can be reached, and
    a call goes to the one that has the fewest open.
    """

    def __init__(self, endpoint: str, transport: AsyncTransport) -> None:
        """Use `connect`."""
        self.endpoint = endpoint
        self.server: Welcome | None = None
        """What the server says of itself."""
        self._transport = transport
        self._numbers = itertools.count()
        self._connections = [Connection(endpoint, transport.dealer(endpoint))]
        """The first is the one that was asked for; the client is of no use without it."""
        self._joining: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, endpoint: str, timeout_s: float = 10.0) -> Self:
        """A client of the server at `endpoint`; ConnectionLost if none answers in time."""
        transport = AsyncTransport("client")
        try:
            client = cls(endpoint, transport)
        except BaseException:
            transport.close()
            raise
        try:
            client.server = await client._connections[0].welcome(timeout_s)
        except BaseException:
            await client.close()
            raise
        client._joining = [
            asyncio.create_task(client._join(other, client.server.server_id))
            for other in client.server.endpoints
        ]
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what is open and disconnect."""
        for task in self._joining:
            task.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._transport.close()

    # ---- calls ----------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, Completion]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[True],
    ) -> Coroutine[Any, Any, Stream]: ...  # fmt: skip
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: bool = False,
    ) -> Coroutine[Any, Any, Completion | Stream]:  # fmt: skip
        """Complete a text or token ids: a Completion, or with `stream` a Stream of chunks (with n
        above 1 those of all outputs, told apart by their `index`).

        timeout_s: abort it after so long. priority: where the server's policy is "priority", the
        higher goes first. Raises RequestError, Overloaded, ProcessDied,
        ConnectionLost.
        """
        return self._generate(stream, sampling, timeout_s, priority, prompt=prompt)

    @overload
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[False] = False,
        **template: Any,
    ) -> Coroutine[Any, Any, Completion]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: Literal[True],
        **template: Any,
    ) -> Coroutine[Any, Any, Stream]: ...  # fmt: skip
    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams | None = None, *,
        timeout_s: float | None = None, priority: int = 0, stream: bool = False,
        **template: Any,
    ) -> Coroutine[Any, Any, Completion | Stream]:  # fmt: skip
        """`generate` the answer to a chat: [{"role": …, "content": …}, …].

        template: what else the model's chat template is given, for example enable_thinking=False.
        """
        chat = {"messages": list(messages), **template}
        return self._generate(stream, sampling, timeout_s, priority, chat=chat)

    async def submit(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, *,
        chat: Json | None = None, deltas: bool = True,
        timeout_s: float | None = None, priority: int = 0,
    ) -> Stream:  # fmt: skip
        """`generate`, or `chat` with {"messages": …, and what else the template is given}, as a
        Stream in any case; without `deltas` one chunk brings all of an output.
        """
        connection = self._least_busy()
        number = next(self._numbers)
        is_ids = chat is None and not isinstance(prompt, str)
        message = Generate(
            request=number,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=as_ids(prompt, "prompt") if is_ids else None,
            chat=chat,
            sampling=self._checked(sampling),
            stream=deltas,
            timeout_s=timeout_s,
            priority=priority,
        )
        mailbox = await connection.start(number, message)
        return Stream(connection, number, mailbox, message.sampling)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, as `generate` would compute them."""
        reply = await self._ask(
            lambda n: Tokenize(
                request=n, text=text, chat=None, add_special_tokens=add_special_tokens
            ),
            Tokenized,
        )
        ids: list[int] = reply.token_ids.tolist()
        return ids

    async def tokenize_chat(self, messages: Sequence[Json], /, **template: Any) -> Tokenized:
        """The prompt that `chat` would send: its token_ids (int32) and its text."""
        chat = {"messages": list(messages), **template}
        return await self._ask(
            lambda n: Tokenize(request=n, text=None, chat=chat, add_special_tokens=False),
            Tokenized,
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        ids = as_ids(token_ids, "token_ids")
        reply = await self._ask(
            lambda n: Detokenize(request=n, token_ids=ids, skip_special_tokens=skip_special_tokens),
            Detokenized,
        )
        return reply.text

    async def abort(self, request: int) -> None:
        """End the request with that number (`Stream.request`); nothing if it has ended."""
        for connection in self._connections:
            await connection.abort(request)

    async def stats(self) -> Json:
        """The scheduler's counters; docs/interfaces.md explains each."""
        return await self._stats_of(self._least_busy())

    async def flush_cache(self) -> int:
        """Forget all cached pages that no running request uses; how many."""
        reply = await self._ask(lambda n: FlushCache(request=RequestId(n)), Flushed)
        return reply.num_pages

    async def health(self, timeout_s: float = 5.0, step_s: float | None = None) -> bool:
        """Whether tokenizers and scheduler answer and steps move where there is work.

        step_s: how long a step may take; as long as an answer unless given.
        """
        try:
            async with asyncio.timeout(timeout_s):
                stats, *_ = await asyncio.gather(
                    *(self._stats_of(connection) for connection in self._usable())
                )
        except (TandemError, TimeoutError):
            return False
        return not stats["in_flight"] or stats["since_last_move_s"] < (step_s or timeout_s)

    async def lost(self) -> TandemError:
        """Why this client is of no more use, once it is."""
        return await self._connections[0].lost()

    # ---- inside ---------------------------------------------------------------------------

    async def _generate(
        self, stream: bool, sampling: SamplingParams | None, timeout_s: float | None,
        priority: int, *, prompt: Prompt | None = None, chat: Json | None = None,
    ) -> Completion | Stream:  # fmt: skip
        news = await self.submit(
            prompt, sampling, chat=chat, deltas=stream, timeout_s=timeout_s, priority=priority
        )
        return news if stream else await news.whole()

    async def _ask(self, message_of: Callable[[int], object], reply: type[_T]) -> _T:
        """Send a call and wait for its one answer, a `reply`."""
        number = next(self._numbers)
        return await self._least_busy().ask(number, message_of(number), reply)

    async def _stats_of(self, connection: Connection) -> Json:
        number = next(self._numbers)
        reply = await connection.ask(number, Stats(request=RequestId(number)), StatsReply)
        return reply.stats

    def _least_busy(self) -> Connection:
        """The connection for the next call."""
        return min(self._usable(), key=lambda connection: connection.num_open)

    def _usable(self) -> list[Connection]:
        """The connections that calls may go to; raises what broke the first one."""
        self._connections[0].check_open()
        return [connection for connection in self._connections if connection.broken is None]

    async def _join(self, endpoint: str, server_id: str) -> None:
        """Use another tokenizer of the server as well; nothing if it can't be reached.

        Through a tunnel, say, which leads to the first one only; something else may be there.
        """
        with contextlib.suppress(TandemError):
            connection = Connection(endpoint, self._transport.dealer(endpoint))
            try:
                if (await connection.welcome(JOIN_S)).server_id == server_id:
                    self._connections.append(connection)
            finally:
                if connection not in self._connections:
                    await connection.close()

    def _checked(self, sampling: SamplingParams | None) -> SamplingParams:
        """Refuse here what can be known here: the error is raised where the mistake is."""
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise RequestError(
                f"sampling is of type {type(sampling).__name__}: it takes SamplingParams",
                "sampling",
            )
        if self.server is not None:
            sampling.validate(self.server.vocab_size, self.server.eos_token_ids)
        return sampling


def as_ids(token_ids: object, name: str) -> IntArray:
    """Token ids as int32 [n]; RequestError for anything that is not a sequence of such ids.

    name: the argument that they are.
    """
    try:
        ids = np.asarray(token_ids)
        whole = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        if whole and (not ids.size or (ids.min() >= 0 and ids.max() < 1 << 31)):
            return ids.astype(np.int32)
    except ValueError:
        pass
    raise RequestError("token ids must be one list of whole numbers from 0 to 2147483647", name)
