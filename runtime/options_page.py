"""The options page: `python -m runtime.options_page > docs/options.md` writes it anew."""

import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from runtime.config import flag, type_name
from runtime.options import PARTS

_HEAD = """\
# Options

Written by `python -m runtime.options_page > docs/options.md`; a test holds it to the definitions in
`runtime/options.py`. The command line takes `--page-size 16`, a YAML file (`--config FILE`)
`page_size: 16`, and Python `LLM(page_size=16)`. The command line wins over the file. Yes-or-no
options are switched with `--overlap` and `--no-overlap`. An unknown name, or a value out of bounds,
is an error that says what was expected.
"""
_COLUMNS = ("option", "takes", "default", "unit", "meaning")


def page() -> str:
    """The whole page, in Markdown: one table per part."""
    return "\n".join([_HEAD, *(_table(part, cls) for part, cls in PARTS.items())])


def _table(part: str, cls: type) -> str:
    rows = [_row(part, field) for field in fields(cls)]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"## {part.capitalize()}\n\n{(cls.__doc__ or '').strip()}\n\n{table}\n"


def _row(part: str, field: Field[Any]) -> tuple[str, ...]:
    meta = field.metadata
    default = "" if field.default is None else f"`{_spelled(field.default)}`"
    takes = ", ".join(_takes(part, field))
    return f"`{flag(field.name)}`", takes, default, meta["unit"], meta["text"].replace("|", "\\|")


def _takes(part: str, field: Field[Any]) -> Iterator[str]:
    meta = field.metadata
    yield " or ".join(f"`{c}`" for c in meta["choices"]) or type_name(part, field.name)
    if meta["least"] is not None:
        yield f"at least {meta['least']}"
    if meta["most"] is not None:
        yield f"at most {meta['most']}"


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.stdout.write(page())
