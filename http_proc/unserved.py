"""Fields that other servers know and this one does not serve, and what they may hold all the same.

Clients send defaults along, so a value that asks for nothing is the same as leaving the field out.
"""

from collections.abc import Mapping
from typing import Any

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_obfuscation": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Of each field the values, beside null, that ask for nothing. Without tools there is no choice of
them, and none that run side by side.
"""


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether the field is one of these, and might as well have been left out."""
    if name not in NEUTRAL_VALUES:
        return False
    return value is None or any(
        type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name]
    )
