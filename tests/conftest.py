"""Fixtures that tests of several rooms share."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from runtime.server import Server
from tests import fakes


def pytest_configure() -> None:
    """Programs that tests interrupt must hear it, also where the tests run in the background of a
    shell script: that ignores SIGINT, and so would all that is started from there.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def simulated_server() -> Iterator[Callable[..., Server]]:
    """Starts servers whose worker is simulated; they end with the test.

    simulated_server("--step-ms", "5", page_size=16): the worker's arguments (by default
    fakes.ECHO), then the server's options.
    """
    with ExitStack() as stack:

        def start(*worker: str, **options: Any) -> Server:
            return stack.enter_context(fakes.simulated_server(*worker, **options))

        yield start


@pytest.fixture(scope="module")
def echo_server() -> Iterator[Server]:
    """One server for the tests of a module, none of which may end it; it echoes the prompt."""
    with fakes.simulated_server() as server:
        yield server
