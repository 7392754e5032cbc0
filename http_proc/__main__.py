"""`python -m http_proc`: the HTTP front end's shell. HTTP clients on one side, the server's ZMQ
endpoint on the other, where it is a client like any other.
"""

import argparse
import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from pathlib import Path

import uvicorn
import uvloop

from http_proc.app import application
from http_proc.calls import Calls
from http_proc.health import Health
from http_proc.link import Link
from http_proc.listening import BACKLOG, bound_socket, is_loopback, url_of
from http_proc.protocol import Protocol, look_after
from http_proc.routes import Front
from runtime.errors import ProcessDied
from runtime.messages import Begin, Drain, Silent
from runtime.process import ENDPOINT_FILE, HTTP_FILE, Process, Stopped, run

_LOG = logging.getLogger(__name__)

NEVER_S = 1 << 30
"""After this uvicorn itself closes connections that idle: `look_after` does it."""
CONTROL_S = 0.5
"""How often the supervisor's wire is looked at even if it seems quiet."""
SPARE_FILES = 64
"""Of those that the process may open, so many are not for connections of HTTP clients."""
LAST_BYTES_S = 0.2
"""How long the last events of a server that ends may take to leave."""


class Service:
    """The application among its sockets."""

    def __init__(self, process: Process, link: Link, begin: Begin, listener: socket.socket) -> None:
        options = process.instance.config.http
        self._process = process
        self._link = link
        self._listener = listener
        self._calls = Calls()
        self._health = Health(link)
        self._stopped: Stopped | None = None
        self._news = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        front = Front(
            link=link,
            calls=self._calls,
            health=self._health,
            model=process.instance.model.name,
            max_seq_len=begin.max_seq_len,
            started=int(time.time()),
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(front, options.api_key),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=NEVER_S,
            )
        )

    async def serve(self) -> None:
        """Until the supervisor ends it; then whoever waits is told why."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.control.fileno(), self._hear)
        # Not Server.serve, which takes the signals: here the supervisor says when to end.
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._listener])
        connections = self._server.server_state.connections
        chores = [
            asyncio.create_task(self._server.main_loop()),
            asyncio.create_task(look_after(connections, _most_connections())),
        ]
        self._process.ready(f"OpenAI's API at {url_of(self._listener)}/v1")
        while self._stopped is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), CONTROL_S)
            self._news.clear()
            self._hear()
            for chore in (chore for chore in chores if chore.done()):
                chore.result()  # it has failed
        for chore in chores:
            chore.cancel()
        await self._end(self._stopped.reason or "the server was shut down")
        raise self._stopped

    def _hear(self) -> None:
        """What the supervisor says."""
        try:
            for message in self._process.check_control():
                if isinstance(message, Drain):
                    self._draining = asyncio.create_task(self._drain(message))
                elif isinstance(message, Silent):
                    self._health.silent = message.names
        except Stopped as stop:
            self._stopped = stop
            self._news.set()

    async def _drain(self, drain: Drain) -> None:
        """Let nobody in; say so to the supervisor when the last request has ended."""
        self._calls.are_closed = True
        _LOG.info("draining: %d requests may run for %g s more", len(self._calls), drain.timeout_s)
        try:
            async with asyncio.timeout(drain.timeout_s):
                await self._calls.wait_until_none()
        except TimeoutError:
            await self._end(drain.end)
        await asyncio.sleep(LAST_BYTES_S)
        self._process.drained()

    async def _end(self, reason: str) -> None:
        """Give every open request its final error."""
        self._calls.are_closed = True
        self._calls.end_all(ProcessDied(reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_BYTES_S):
                await self._calls.wait_until_none()


async def serve(process: Process, listener: socket.socket) -> None:
    """Connect to the endpoint, then serve HTTP."""
    begin = process.loaded()
    instance = process.instance
    endpoint = (instance.folder / ENDPOINT_FILE).read_text()
    link = await Link.connect(endpoint, instance.config.server.startup_timeout)
    await Service(process, link, begin, listener).serve()


def main(process: Process, arguments: argparse.Namespace) -> None:
    options = process.instance.config.http
    listener = bound_socket(options)  # first: an address in use is told before anybody loads
    (process.instance.folder / HTTP_FILE).write_text(url_of(listener))
    if not is_loopback(listener) and options.api_key is None:
        _LOG.warning("HTTP listens at %s without an --api-key", url_of(listener))
    _allow_many_connections()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    # Left open: to cancel what still runs then would only make noise, the process ends next.
    loop.run_until_complete(serve(process, listener))


def _allow_many_connections() -> None:
    """The usual limit of 1024 open files would end the thousandth client."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _most_connections() -> int:
    """How many fit into the limit of open files, beside those that are open and the spare ones."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, most - len(list(Path("/proc/self/fd").iterdir())) - SPARE_FILES)


if __name__ == "__main__":
    run(lambda _: "http", main, argparse.ArgumentParser(prog="python -m http_proc"))
