"""The connection to the server's ZMQ endpoint, made anew when it is lost."""

import asyncio
import logging

from runtime.client import AsyncClient
from runtime.errors import ConnectionLost, TandemError

_LOG = logging.getLogger(__name__)
RETRY_S = 0.5


class Link:
    """A client that is there again some time after its connection was lost."""

    def __init__(self, endpoint: str, client: AsyncClient) -> None:
        """Use `connect`."""
        self._endpoint = endpoint
        self._client: AsyncClient | None = client
        self._keeper = asyncio.create_task(self._keep(client))

    @classmethod
    async def connect(cls, endpoint: str, timeout_s: float) -> "Link":
        return cls(endpoint, await AsyncClient.connect(endpoint, timeout_s))

    @property
    def client(self) -> AsyncClient:
        """The client; ConnectionLost while there is none."""
        if self._client is None:
            raise ConnectionLost("the server is not reached at the moment: try again")
        return self._client

    async def close(self) -> None:
        """Abort what is open and disconnect."""
        self._keeper.cancel()
        if self._client is not None:
            await self._client.close()

    async def _keep(self, client: AsyncClient) -> None:
        while True:
            error = await client.lost()
            _LOG.warning("the connection to the tokenizer is made anew: %s", error)
            self._client = None
            await client.close()
            while self._client is None:
                try:
                    self._client = await AsyncClient.connect(self._endpoint)
                except TandemError:
                    await asyncio.sleep(RETRY_S)
            client = self._client
