"""What is wrong with a request's body, in one sentence that names the field."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from http_proc.errors import HttpError

UNSUPPORTED = frozenset(
    {
        "audio", "best_of", "function_call", "functions", "guided_choice", "guided_grammar",
        "guided_json", "guided_regex", "metadata", "modalities", "moderation",
        "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort",
        "response_format", "safety_identifier", "service_tier", "store", "structured_outputs",
        "suffix", "tool_choice", "tools", "verbosity", "web_search_options",
    }
)  # fmt: skip
"""What other servers take and this one does not; null is the same as leaving it out."""
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


def complaint(errors: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> HttpError:
    """The 400 that names the first of pydantic's `errors`; `fields` are those that there are."""
    first = errors[0]
    path = _path(first["loc"])
    kind, value = first["type"], first.get("input")
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it can't be decoded")
        return HttpError(400, f"the body is not valid JSON: {reason}")
    if kind == "value_error":
        return HttpError(
            400, f"{path or 'the request'} {first['ctx']['error']}", param=path or None
        )
    if not path:
        return HttpError(
            400, "the body must be a JSON object: send one, with Content-Type: application/json"
        )
    if kind == "extra_forbidden":
        return HttpError(400, _unknown(path, fields), param=path, code="unknown_parameter")
    if kind == "missing":
        return HttpError(400, f"{path} is missing: the request needs it", param=path)
    same = [error for error in errors if _path(error["loc"]) == path]
    wanted = dict.fromkeys(_EXPECTED.get(e["type"], e["msg"]) for e in same)
    return HttpError(400, f"{path} is {shown(value)}: it takes {' or '.join(wanted)}", param=path)


def shown(value: object) -> str:
    """A value as an error shows it: not more than it takes to recognise it."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} values"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _unknown(path: str, fields: Sequence[str]) -> str:
    name = path.rpartition(".")[2]
    if name in UNSUPPORTED:
        return f"{path} is not supported by this server: leave it out"
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
    return f"unknown field {path[:SHOWN_CHARS]!r}{hint}"


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
