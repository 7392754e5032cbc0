"""OpenAI's API as tests of several files ask it: the official client, and raw posts."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.fakes import HttpPeer

PROMPT = "one two three"
MODEL = "SmolLM2-135M-Instruct"
HI = [{"role": "user", "content": "Hi"}]


def client_of(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def complete(api: OpenAI, stream: bool, **fields: Any) -> Any:
    """A completion, or what its stream adds up to, in the same form."""
    extra = {k: fields.pop(k) for k in list(fields) if k not in KNOWN}
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "extra_body": extra} | fields
    if not stream:
        return api.completions.create(**given)
    given["stream_options"] = {"include_usage": True}
    return joined(list(api.completions.create(stream=True, **given)))


KNOWN = {"model", "prompt", "max_tokens", "n", "echo", "stop", "seed", "temperature", "top_p",
         "user", "logit_bias", "presence_penalty", "frequency_penalty", "logprobs"}  # fmt: skip


def joined(chunks: list[Any]) -> Any:
    """One completion of its events; the last of them has the usage and no choices."""
    whole = chunks[-1]
    assert whole.choices == []
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        mine = next((c for c in whole.choices if c.index == choice.index), None)
        if mine is None:
            whole.choices.append(choice)
        else:
            assert mine.finish_reason is None
            mine.text += choice.text
            mine.finish_reason = choice.finish_reason
            mine.matched_stop = getattr(choice, "matched_stop", None)
    whole.choices.sort(key=lambda c: c.index)
    return whole


MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def chat(api: OpenAI, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "skip_special_tokens": False, **fields.pop("extra_body", {})}
    given = {"model": MODEL, "messages": HI, "max_tokens": 500, "extra_body": extra} | fields
    return api.chat.completions.create(**given)


def post(url: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of a response, whose body has a length."""
    with HttpPeer(url) as peer:
        peer.post(path, body, connection="close", **headers)
        head, _, data = peer.rest().partition(b"\r\n\r\n")
    assert len(data) < 4096 or head.startswith(b"HTTP/1.1 2")
    return int(head.split()[1]), json.loads(data)
