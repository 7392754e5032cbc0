"""What several files ask of their own `server`, where they have one."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from runtime.server import Server
from tests.openai_api import client_of


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return str(server.http_url)


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[OpenAI]:
    with client_of(url) as client:
        yield client
