"""Fixtures that tests of several rooms share."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis
import pytest

from runtime.server import Server
from tests import fakes

# Tests assert no times: an example may take longer than hypothesis' 200 ms on a busy machine.
hypothesis.settings.register_profile("tandem", deadline=None)
hypothesis.settings.load_profile("tandem")


def pytest_configure() -> None:
    """Programs that tests interrupt must hear it, also where the tests run in the background of a
    shell script: that ignores SIGINT, and so would all that is started from there.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # torch's threads spin while they wait for one another, and others here need the cores.
        os.environ["OMP_NUM_THREADS"] = "1"


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
