"""Whether the whole server is well."""

import asyncio

from http_proc.link import Link
from runtime.errors import TandemError

ANSWER_S = 2.0
"""How long tokenizer and scheduler may take to answer."""
STEP_S = 10.0
"""How long a step may take: no plan sent and none answered for longer is a fault."""


class Health:
    """Knows who is silent, as the supervisor told, and asks the others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.silent: tuple[str, ...] = ()
        """Processes that were not heard for some seconds."""

    async def fault(self) -> str | None:
        """What is wrong; None if every process answers and steps move."""
        if self.silent:
            return f"{', '.join(self.silent)} is silent"
        try:
            async with asyncio.timeout(ANSWER_S):
                stats = await self._link.client.stats()
        except TimeoutError:
            return f"tokenizer or scheduler did not answer within {ANSWER_S:g} s"
        except TandemError as e:
            return str(e)
        if stats["in_flight"] and stats["since_last_move_s"] > STEP_S:
            return f"a step has taken {stats['since_last_move_s']:.0f} s already"
        return None
