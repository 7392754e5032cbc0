"""Checks of what users give; a refusal names the field, its value and its limit."""

from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError

SHOWN_CHARS = 80
"""So much of a value is repeated in its refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a field takes, from `least` to `most`.

    whole: no fractions. above: `least` itself is refused. optional: None is taken too. note: what
    the user should know of a limit.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    optional: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        """The rule in words."""
        kind = "a whole number" if self.whole else "a number"
        start = f"above {_plain(self.least)} and at most" if self.above else (
            f"from {_plain(self.least)} to"
        )  # fmt: skip
        none = ", or None" if self.optional else ""
        return f"must be {kind} {start} {_plain(self.most)}{none}{self.note}"

    def holds(self, value: object) -> bool:
        """Whether `value`, of any type, is one of them."""
        if value is None:
            return self.optional
        if not is_whole(value) and (self.whole or not isinstance(value, float)):
            return False
        number: Any = value
        return self.least <= number <= self.most and not (self.above and number == self.least)

    def check(self, name: str, value: object) -> None:
        """Raise RequestError unless it holds."""
        if not self.holds(value):
            check(False, name, value, self.text)


def is_whole(value: object) -> bool:
    """Whether it is an int, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise RequestError, with the value and the rule that it breaks, unless `ok`."""
    if not ok:
        shown = repr(value)
        cut = shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "…"
        raise RequestError(f"{name} is {cut}: {rule}", name)


def _plain(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"
