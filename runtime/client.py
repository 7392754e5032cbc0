"""`AsyncClient`: the ZMQ endpoint for asyncio programs. `runtime.sync_client` is the same for
threads.

Rule: every call ends: by its answer, by an error that the server sent, or by ConnectionLost when
the server is gone.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import numpy as np

from runtime.errors import (
    ConnectionLost,
    InternalError,
    ProtocolError,
    RequestError,
    TandemError,
    from_kind,
)
from runtime.messages import (
    Abort,
    Chunk,
    Chunks,
    Detokenize,
    Detokenized,
    Failed,
    FinishReason,
    FlushCache,
    Flushed,
    Generate,
    Hello,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Welcome,
)
from runtime.sampling import SamplingParams
from runtime.transport import AsyncDealer
from runtime.types import IntArray, Json, RequestId

HEARTBEAT_S = 2.0
SILENCE_S = 10.0
"""A server that says nothing for this long is taken for gone."""
LAST_MESSAGES_S = 0.2
"""How long a closed connection's last messages may still be on their way to us."""

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request.

    token_ids: the output's, the end-of-sequence token included. cached_tokens: prompt tokens that
    were not computed.
    matched_stop: the stop string that ended the text, if one did.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    matched_stop: str | None
    prompt_tokens: int
    cached_tokens: int


class Stream:
    """A running request's chunks: `async for chunk in stream`. Left early, or by `abort`, it ends
    on the server too.
    """

    def __init__(self, client: "AsyncClient", request: int, num_outputs: int = 1) -> None:
        self.request = request
        self._client = client
        self._waiting: list[Chunk] = []
        self._error: TandemError | None = None
        self._arrival = asyncio.Event()
        self._num_left = num_outputs
        """Outputs whose last chunk has not been taken."""

    def put(self, news: Chunk | TandemError) -> None:
        """The connection has news of this request."""
        if isinstance(news, TandemError):
            self._error = news
        else:
            self._waiting.append(news)
        self._arrival.set()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def abort(self) -> None:
        """End the request; its last chunk still comes, with finish_reason abort."""
        await self._client.abort(self.request)

    async def whole(self) -> Completion:
        """Everything, once it has ended."""
        chunks = [chunk async for chunk in self]
        last = chunks[-1]
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[i for chunk in chunks for i in chunk.token_ids.tolist()],
            finish_reason=last.finish_reason or FinishReason.ERROR,
            matched_stop=last.matched_stop,
            prompt_tokens=last.num_prompt_tokens,
            cached_tokens=last.num_cached_tokens,
        )

    async def batches(self) -> AsyncGenerator[list[Chunk], None]:
        """The same chunks, all that have come since the last batch at once."""
        try:
            while not self.is_done:
                await self._arrival.wait()
                self._arrival.clear()
                batch, self._waiting = self._waiting, []
                self._num_left -= sum(chunk.finish_reason is not None for chunk in batch)
                if batch:
                    yield batch
                if self._error is not None and not self.is_done:
                    self._num_left = 0
                    raise self._error
        finally:
            await self.leave()

    async def leave(self) -> None:
        """End the request if it still runs: nobody listens to it any more."""
        await self._client.leave(self)

    async def _chunks(self) -> AsyncIterator[Chunk]:
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk

    @property
    def is_done(self) -> bool:
        """Whether its last chunks, or an error, have been taken."""
        return self._num_left == 0


class AsyncClient:
    """One connection to a server, for any number of calls at once."""

    def __init__(self, endpoint: str, dealer: AsyncDealer) -> None:
        """Use `connect`."""
        self.endpoint = endpoint
        self.server: Welcome | None = None
        """What the server says of itself."""
        self._dealer = dealer
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._broken: TandemError | None = None
        self._breaking = asyncio.Event()
        self._last_heard_s = asyncio.get_running_loop().time()
        self._tasks = [
            asyncio.create_task(self._guard(work))
            for work in (self._receive(), self._beat(), self._watch())
        ]

    @classmethod
    async def connect(cls, endpoint: str, timeout_s: float = 10.0) -> Self:
        """A client of the server at `endpoint`; ConnectionLost if none answers in time."""
        client = cls(endpoint, AsyncDealer(endpoint, "client"))
        try:
            async with asyncio.timeout(timeout_s):
                client.server = await client._welcomed
        except TimeoutError:
            await client.close()
            raise ConnectionLost(
                f"no server answers at {endpoint} within {timeout_s:g} s: is it running?"
            ) from None
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what is open and disconnect."""
        if self._broken is None:
            for number in self._streams:
                await self.abort(number)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        is_lost = isinstance(self._broken, ConnectionLost)
        self._break(ConnectionLost("the client was closed"))
        self._dealer.close(deliver=not is_lost)

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
        """Complete a text or token ids: a Completion, or with `stream` a Stream of chunks.

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
        self._check_open()
        number = next(self._numbers)
        is_ids = chat is None and not isinstance(prompt, str)
        checked = self._checked(sampling)
        message = Generate(
            request=number,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=as_ids(prompt) if is_ids else None,
            chat=chat,
            sampling=checked,
            stream=deltas,
            timeout_s=timeout_s,
            priority=priority,
        )
        stream = self._streams[number] = Stream(self, number, checked.n)
        try:
            await self._dealer.send(message)
        except BaseException:
            del self._streams[number]
            raise
        return stream

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
        ids = as_ids(token_ids)
        reply = await self._ask(
            lambda n: Detokenize(request=n, token_ids=ids, skip_special_tokens=skip_special_tokens),
            Detokenized,
        )
        return reply.text

    async def abort(self, request: int) -> None:
        """End the request with that number (`Stream.request`); nothing if it has ended."""
        await self._dealer.send(Abort(request=RequestId(request)))

    async def stats(self) -> Json:
        """The scheduler's counters; docs/interfaces.md explains each."""
        reply = await self._ask(lambda n: Stats(request=RequestId(n)), StatsReply)
        return reply.stats

    async def flush_cache(self) -> int:
        """Forget all cached pages that no running request uses; how many."""
        reply = await self._ask(lambda n: FlushCache(request=RequestId(n)), Flushed)
        return reply.num_pages

    async def health(self, timeout_s: float = 5.0) -> bool:
        """Whether tokenizer and scheduler answer and steps move where there is work."""
        try:
            async with asyncio.timeout(timeout_s):
                stats = await self.stats()
        except (TandemError, TimeoutError):
            return False
        return not stats["in_flight"] or stats["since_last_move_s"] < timeout_s

    async def lost(self) -> TandemError:
        """Why the connection is of no more use, once it is."""
        await self._breaking.wait()
        assert self._broken is not None
        return self._broken

    async def leave(self, stream: Stream) -> None:
        """Nobody listens to this stream any more: end its request if it runs."""
        is_open = self._streams.pop(stream.request, None) is not None and not stream.is_done
        if is_open and self._broken is None:
            await self.abort(stream.request)

    # ---- inside ---------------------------------------------------------------------------

    async def _generate(
        self, stream: bool, sampling: SamplingParams | None, timeout_s: float | None,
        priority: int, *, prompt: Prompt | None = None, chat: Json | None = None,
    ) -> Completion | Stream:  # fmt: skip
        news = await self.submit(
            prompt, sampling, chat=chat, deltas=stream, timeout_s=timeout_s, priority=priority
        )
        return news if stream else await news.whole()

    async def _ask(self, message_of: Any, reply: type[_T]) -> _T:
        """Send a call and wait for its one answer, a `reply`."""
        self._check_open()
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._dealer.send(message_of(number))
            result: _T = await answer
            return result
        finally:
            del self._answers[number]

    def _checked(self, sampling: SamplingParams | None) -> SamplingParams:
        """Refuse here what can be known here: the error is raised where the mistake is."""
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise RequestError(
                f"sampling is of type {type(sampling).__name__}: it takes SamplingParams"
            )
        if self.server is not None:
            sampling.validate(self.server.vocab_size)
        return sampling

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one of the connection's tasks; if it fails, every open call does."""
        try:
            await work
        except TandemError as e:
            self._break(e)
        except Exception as e:
            self._break(InternalError(f"the client failed: {type(e).__name__}: {e}"))
            raise

    def _break(self, error: TandemError) -> None:
        """The connection is of no more use: end every call with `error`."""
        self._broken = self._broken or error
        self._breaking.set()
        for stream in self._streams.values():
            stream.put(error)
        for answer in (*self._answers.values(), self._welcomed):
            if not answer.done():
                answer.set_exception(error)
        if not self._welcomed.cancelled():
            self._welcomed.exception()  # seen: nobody may be waiting for it any more

    async def _receive(self) -> None:
        while True:
            message = await self._dealer.receive()
            self._last_heard_s = asyncio.get_running_loop().time()
            self._on_message(message)

    def _on_message(self, message: Any) -> None:
        match message:
            case Chunks():
                for chunk in message.items:
                    if (stream := self._streams.get(chunk.request)) is not None:
                        stream.put(chunk)
            case Failed(request=None):
                raise from_kind(message.kind, message.text)
            case Failed(request=int(number)):
                error = from_kind(message.kind, message.text)
                if (stream := self._streams.get(number)) is not None:
                    stream.put(error)
                elif (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_exception(error)
            case Welcome():
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
            case Tokenized() | Detokenized() | StatsReply() | Flushed():
                answer = self._answers.get(message.request)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                raise ProtocolError(f"the server sent a {type(message).__name__} to a client")

    async def _beat(self) -> None:
        """Say hello again and again; the answers show that the server lives."""
        now = asyncio.get_running_loop().time
        while True:
            await self._dealer.send(Hello())
            due_s = now() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            # While the loop stood still, in other code of the user's, nothing could be heard.
            self._last_heard_s += max(0.0, now() - due_s)
            silence = now() - self._last_heard_s
            if silence > SILENCE_S and self._welcomed.done():
                raise ConnectionLost(
                    f"the server at {self.endpoint} has been silent for {silence:.0f} s"
                )

    async def _watch(self) -> None:
        await self._dealer.disconnected()
        await asyncio.sleep(LAST_MESSAGES_S)
        raise ConnectionLost(f"the server at {self.endpoint} closed the connection")


def as_ids(token_ids: object) -> IntArray:
    """Token ids as int32 [n]; RequestError for anything that is not a sequence of such ids."""
    try:
        ids = np.asarray(token_ids)
        whole = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        if whole and (not ids.size or (ids.min() >= 0 and ids.max() < 1 << 31)):
            return ids.astype(np.int32)
    except ValueError:
        pass
    raise RequestError("token ids must be one list of whole numbers from 0 to 2147483647")
