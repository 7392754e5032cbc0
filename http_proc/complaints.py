"""What is wrong with a request's body, in one sentence that names the field."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from http_proc.errors import HttpError
from http_proc.unserved import NEUTRAL_VALUES

SHOWN_CHARS = 80

_EXPECTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "string_unicode": "valid Unicode, without half of a surrogate pair",
}
"""By pydantic's type of an error; its own message where there is none."""


class Misfit(ValueError):
    """A field doesn't go with the others: for validators that see them all."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def complaint(errors: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> HttpError:
    """The 400 that names the first of pydantic's `errors`; `fields` are those that there are."""
    first = errors[0]
    path = _path(first["loc"])
    kind, value = first["type"], first.get("input")
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it can't be decoded")
        return HttpError(400, f"the body is not valid JSON: {reason}")
    if kind == "value_error":
        error = first["ctx"]["error"]
        if isinstance(error, Misfit):
            path = f"{path}.{error.field}" if path else error.field
        return HttpError(400, f"{path} {error}", param=path, code="invalid_value")
    if not path:
        return HttpError(
            400, "the body must be a JSON object: send one, with Content-Type: application/json"
        )
    if kind == "extra_forbidden":
        return _not_taken(path, value, fields)
    if kind == "missing":
        text = f"{path} is missing: the request needs it"
        return HttpError(400, text, param=path, code="missing_required_parameter")
    same = [error for error in errors if _path(error["loc"]) == path]
    wanted = dict.fromkeys(_EXPECTED.get(e["type"], e["msg"]) for e in same)
    text = f"{path} is {shown(value)}: it takes {' or '.join(wanted)}"
    code = "invalid_type" if any(e["type"] in _EXPECTED for e in same) else "invalid_value"
    return HttpError(400, text, param=path, code=code)


def shown(value: object) -> str:
    """A value as an error shows it: not more than it takes to recognise it."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} values"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _not_taken(path: str, value: object, fields: Sequence[str]) -> HttpError:
    """Of a field that there is not."""
    name = path.rpartition(".")[2]
    if (neutral := NEUTRAL_VALUES.get(name)) is not None:
        allowed = f", or give {' or '.join(map(json.dumps, neutral))}" if neutral else ""
        text = f"{path} is {shown(value)}, which this server does not support: leave it out"
        return HttpError(400, text + allowed, param=path, code="unsupported_value")
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
    text = f"unknown field {path[:SHOWN_CHARS]!r}{hint}"
    return HttpError(400, text, param=path, code="unknown_parameter")


def _path(loc: Sequence[int | str]) -> str:
    """("body", "messages", 0, "role") as users write it: messages[0].role."""
    path = ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() or not part.isascii():
            path += f".{part}" if path else part
        # Else it is pydantic's name for one of several types, as in list[str].
        if part in ("str", "int", "float", "bool"):
            path = path.rpartition(".")[0]
    return path
