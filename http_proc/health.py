"""Whether the whole server is well."""

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
            is_well = await self._link.client.health(ANSWER_S, STEP_S)
        except TandemError as e:
            return str(e)
        if not is_well:
            return (
                f"a tokenizer or the scheduler did not answer within {ANSWER_S:g} s, or a step"
                f" takes longer than {STEP_S:g} s"
            )
        return None
