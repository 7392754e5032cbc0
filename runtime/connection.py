"""One connection to one tokenizer: its calls, its heartbeats, and how the end of either side shows.

Rule: every call ends: by its answer, by an error that the server sent, or by ConnectionLost when
the server is gone.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from runtime.async_transport import AsyncDealer
from runtime.errors import ConnectionLost, InternalError, ProtocolError, TandemError, from_kind
from runtime.messages import (
    Abort,
    Chunk,
    Chunks,
    Detokenized,
    Failed,
    Flushed,
    Grant,
    Hello,
    StatsReply,
    Tokenized,
    Welcome,
)
from runtime.types import RequestId

HEARTBEAT_S = 2.0
SILENCE_S = 10.0
"""A server that says nothing for this long is taken for gone."""
LAST_MESSAGES_S = 0.2
"""How long a closed connection's last messages may still be on their way to us."""
_T = TypeVar("_T")


class Mailbox:
    """What has come for one request and was not taken yet: at most CREDIT chunks and the end."""

    def __init__(self) -> None:
        self.num_taken = 0
        """Chunks taken since the server was last granted as many."""
        self._waiting: list[Chunk] = []
        self._error: TandemError | None = None
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        """How many chunks were not taken yet."""
        return len(self._waiting)

    def put(self, news: Chunk | TandemError) -> None:
        """The connection has news of the request."""
        if isinstance(news, TandemError):
            self._error = self._error or news
        else:
            self._waiting.append(news)
        self._arrival.set()

    async def take(self) -> list[Chunk]:
        """The chunks that have come, at least one; after them the error, if the request ended by
        one.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._arrival.clear()
            await self._arrival.wait()
        batch, self._waiting = self._waiting, []
        self.num_taken += len(batch)
        return batch


class Connection:
    """A connection and the calls that are open on it."""

    def __init__(self, endpoint: str, dealer: AsyncDealer) -> None:
        self.endpoint = endpoint
        self.broken: TandemError | None = None
        """Why it is of no more use."""
        self._breaking = asyncio.Event()
        self._dealer = dealer
        self._mailboxes: dict[int, Mailbox] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._last_heard_s = asyncio.get_running_loop().time()
        self._farewells: set[asyncio.Task[None]] = set()
        self._tasks = [
            asyncio.create_task(self._guard(work))
            for work in (self._receive(), self._beat(), self._watch())
        ]

    async def welcome(self, timeout_s: float) -> Welcome:
        """What the server says of itself; ConnectionLost if it says nothing in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._welcomed)
        except TimeoutError:
            raise ConnectionLost(
                f"no server answers at {self.endpoint} within {timeout_s:g} s: is it running?"
            ) from None

    async def lost(self) -> TandemError:
        """What broke the connection, once something has."""
        await self._breaking.wait()
        assert self.broken is not None
        return self.broken

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._mailboxes) + len(self._answers)

    def check_open(self) -> None:
        """Raise what broke the connection, if anything has."""
        if self.broken is not None:
            raise self.broken

    async def start(self, number: int, message: object) -> Mailbox:
        """Send a call; its news come to the mailbox, until `leave`."""
        self.check_open()
        mailbox = self._mailboxes[number] = Mailbox()
        try:
            await self._dealer.send(message)
        except BaseException:
            del self._mailboxes[number]
            raise
        return mailbox

    async def ask(self, number: int, message: object, reply: type[_T]) -> _T:
        """Send a call and wait for its one answer, a `reply`."""
        self.check_open()
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._dealer.send(message)
            result: _T = await answer
            return result
        finally:
            del self._answers[number]

    async def abort(self, number: int) -> None:
        """End the request with that number; nothing if this connection has none such."""
        if number in self._mailboxes and self.broken is None:
            await self._dealer.send(Abort(request=RequestId(number)))

    async def grant(self, number: int) -> None:
        """Let the server send as many more chunks of a stream as were taken of it."""
        mailbox = self._mailboxes.get(number)
        if mailbox is not None and self.broken is None:
            chunks, mailbox.num_taken = mailbox.num_taken, 0
            await self._dealer.send(Grant(request=number, chunks=chunks))

    async def leave(self, number: int, *, is_done: bool) -> None:
        """Nobody listens to that request any more: end it if it runs."""
        if not is_done and self.broken is None:
            await self.abort(number)
        self._mailboxes.pop(number, None)

    def abandon(self, number: int) -> None:
        """`leave`, if nobody has left it before, without waiting."""
        if number in self._mailboxes:
            task = asyncio.create_task(self.leave(number, is_done=False))
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """Abort what is open and disconnect; every call ends."""
        if self.broken is None:
            for number in list(self._mailboxes):
                await self.abort(number)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        is_lost = isinstance(self.broken, ConnectionLost)
        self._break(ConnectionLost("the client was closed"))
        self._dealer.close(deliver=not is_lost)

    # ---- inside ---------------------------------------------------------------------------

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
        self.broken = self.broken or error
        self._breaking.set()
        for mailbox in list(self._mailboxes.values()):
            mailbox.put(error)
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
                    if (mailbox := self._mailboxes.get(chunk.request)) is not None:
                        mailbox.put(chunk)
            case Failed(request=None):
                raise from_kind(message.kind, message.text)
            case Failed(request=int(number)):
                error = from_kind(message.kind, message.text, message.field)
                if (mailbox := self._mailboxes.get(number)) is not None:
                    mailbox.put(error)
                else:
                    self._answer(number, lambda answer: answer.set_exception(error))
            case Welcome():
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
            case Tokenized() | Detokenized() | StatsReply() | Flushed():
                self._answer(message.request, lambda answer: answer.set_result(message))
            case _:
                raise ProtocolError(f"the server sent a {type(message).__name__} to a client")

    def _answer(self, number: int, give: Callable[["asyncio.Future[Any]"], None]) -> None:
        """Give the call its answer, if somebody still waits for it."""
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            give(answer)

    async def _beat(self) -> None:
        """Say hello again and again; the answers show that the server lives."""
        now = asyncio.get_running_loop().time
        while True:
            await self._dealer.send(Hello())
            for number in [n for n, mailbox in self._mailboxes.items() if mailbox.num_taken]:
                await self.grant(number)  # a slow reader is a reader too
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
