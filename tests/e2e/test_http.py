"""HTTP as the official OpenAI client uses it, streamed and whole, against a worker that echoes."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from http_proc.link import Link
from runtime import LLM
from runtime.errors import ConnectionLost
from runtime.server import Server
from runtime.sync_client import Client
from tests.fakes import ECHO, SLOW_ECHO, HttpPeer, get, simulated_server
from tests.openai_api import HI, MODEL, MODES, PROMPT, chat, client_of, complete, post


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with simulated_server(http=True, http_port=0, max_seq_len_override=512, page_size=1) as running:
        yield running


# ---- completions ------------------------------------------------------------------------------


@MODES
def test_a_prompt_is_completed(api: OpenAI, stream: bool) -> None:
    done = complete(api, stream)
    (choice,) = done.choices
    assert (PROMPT * 6).startswith(choice.text)
    assert choice.finish_reason == "length"
    assert choice.matched_stop is None
    assert done.model == MODEL
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")
    assert done.usage.completion_tokens == 6
    assert done.usage.total_tokens == done.usage.prompt_tokens + 6


@MODES
def test_prompts_come_in_four_forms(api: OpenAI, server: Server, stream: bool) -> None:
    with Client(server.endpoint) as client:
        a, b = (client.tokenize(text) for text in ("one two", "three four"))
    for prompt, texts in (
        ("one two", ["one two"]),
        (["one two", "three four"], ["one two", "three four"]),
        (a, ["one two"]),
        ([a, b], ["one two", "three four"]),
    ):
        done = complete(api, stream, prompt=prompt, max_tokens=2)
        assert [choice.text for choice in done.choices] == texts
        assert done.usage.completion_tokens == 2 * len(texts)


@MODES
def test_echo_begins_with_the_prompt(api: OpenAI, stream: bool) -> None:
    done = complete(api, stream, prompt=["a b", "c d"], echo=True, max_tokens=2)
    assert [choice.text for choice in done.choices] == ["a ba b", "c dc d"]
    text = complete(api, stream, prompt=[500, 600], echo=True, max_tokens=2).choices[0].text
    assert text == text[: len(text) // 2] * 2


@MODES
def test_a_stop_string_ends_it_and_is_told(api: OpenAI, stream: bool) -> None:
    done = complete(api, stream, prompt="a b c d", stop=["c", "x"], max_tokens=20)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason) == ("a b ", "stop")
    assert choice.matched_stop == "c"


@MODES
def test_a_stop_token_ends_it_and_is_told(api: OpenAI, server: Server, stream: bool) -> None:
    with Client(server.endpoint) as client:
        ids = client.tokenize("a b c d")
    done = complete(api, stream, prompt=ids, stop_token_ids=[ids[2]], max_tokens=20)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason) == ("a b", "stop")
    assert choice.matched_stop == ids[2]


@MODES
def test_cached_prompt_tokens_are_told(api: OpenAI, stream: bool) -> None:
    prompt = "a prompt that nobody else sends, " * 3 + str(stream)
    first, second = (complete(api, stream, prompt=prompt).usage for _ in range(2))
    assert second.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1


@MODES
def test_several_outputs_of_several_prompts_are_numbered(api: OpenAI, stream: bool) -> None:
    done = complete(api, stream, prompt=["a b", "c d"], n=2, max_tokens=2)
    assert [choice.text for choice in done.choices] == ["a b", "a b", "c d", "c d"]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]


@MODES
def test_what_only_this_server_has_is_taken_too(api: OpenAI, stream: bool) -> None:
    done = complete(
        api, stream, user="me", seed=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1,
        min_tokens=2, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
        logit_bias={"5": 1}, bad_token_ids=[7], stop_token_ids=[9], ignore_eos=True,
        skip_special_tokens=False, include_stop_str_in_output=True, priority=3,
    )  # fmt: skip
    assert done.choices[0].finish_reason == "length"


@MODES
def test_token_ids_are_returned_where_asked_for(api: OpenAI, server: Server, stream: bool) -> None:
    with Client(server.endpoint) as client:
        ids = client.tokenize("one two")
    if stream:
        chunks = list(api.completions.create(
            model=MODEL, prompt="one two", max_tokens=2, stream=True,
            extra_body={"return_token_ids": True},
        ))  # fmt: skip
        found = [i for c in chunks for i in getattr(c.choices[0], "token_ids", ())]
        prompt = chunks[0].choices[0].prompt_token_ids
    else:
        (choice,) = complete(
            api, False, prompt="one two", max_tokens=2, return_token_ids=True
        ).choices
        found, prompt = choice.token_ids, choice.prompt_token_ids
    assert (found, prompt) == (ids, ids)


@MODES
@pytest.mark.parametrize("prompt", ["one two three", "one"])
def test_log_probabilities_of_completions(api: OpenAI, stream: bool, prompt: str) -> None:
    """The prompt of one token has none of its own."""
    words = re.findall(r" ?\w+", prompt)
    given = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True}
    if stream:
        choices = [c.choices[0] for c in api.completions.create(**given, stream=True)]
    else:
        choices = api.completions.create(**given).choices
    found = [c.logprobs for c in choices if c.logprobs is not None]
    tokens = [token for part in found for token in part.tokens]
    assert tokens == (words * 3)[: len(words) + 2]
    values = [value for part in found for value in part.token_logprobs]
    assert values == [None] + [-1.0] * (len(tokens) - 1)
    offsets = [offset for part in found for offset in part.text_offset]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


@MODES
def test_log_probabilities_of_chats(api: OpenAI, stream: bool) -> None:
    done = chat(api, max_tokens=3, logprobs=True, top_logprobs=2, stream=stream)
    parts = [c.choices[0].logprobs for c in done] if stream else [done.choices[0].logprobs]
    entries = [entry for part in parts if part is not None for entry in part.content]
    assert [entry.token for entry in entries] == ["<|im_start|>", "system", "\n"]
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
    asked = chat(api, max_tokens=1, extra_body={"prompt_logprobs": 0})
    told = asked.choices[0].prompt_logprobs
    assert told[0] is None
    assert len(told) == asked.usage.prompt_tokens


# ---- chats ------------------------------------------------------------------------------------


def prompt_of(api: OpenAI, **fields: Any) -> str:
    """The prompt that a chat becomes: as many tokens of the echo as it has."""
    count = chat(api, max_tokens=1, **fields).usage.prompt_tokens
    text: str = chat(api, max_tokens=count, **fields).choices[0].message.content
    return text


def test_a_chat_is_answered_whole_and_streamed(api: OpenAI) -> None:
    whole = chat(api, max_tokens=12)
    assert whole.object == "chat.completion"
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].message.role == "assistant"
    chunks = list(chat(api, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_messages_of_every_role_and_parts_reach_the_template(api: OpenAI) -> None:
    prompt = prompt_of(
        api,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("p", "q")]},
            {"role": "assistant", "content": "r"},
            {"role": "tool", "content": "s", "tool_call_id": "1"},
        ],
    )
    said = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    assert said == [
        ("system", "be brief"), ("user", "p\nq"), ("assistant", "r"), ("tool", "s")
    ]  # fmt: skip
    assert prompt.endswith("<|im_start|>assistant\n")


def test_a_final_message_is_continued(api: OpenAI) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    prompt = prompt_of(api, messages=messages, extra_body={"continue_final_message": True})
    assert prompt.endswith("assistant\nOnce upon")
    prompt = prompt_of(api, messages=messages, extra_body={"add_generation_prompt": False})
    assert prompt.endswith("Once upon<|im_end|>\n")


def test_either_name_of_the_limit_is_taken(api: OpenAI) -> None:
    done = chat(api, max_tokens=openai.omit, max_completion_tokens=3)
    assert done.usage.completion_tokens == 3


def test_several_answers_are_streamed_side_by_side(api: OpenAI) -> None:
    chunks = list(chat(api, max_tokens=5, n=3, stream=True))
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [c.delta.role for c in mine].count("assistant") == 1
        assert mine[-1].finish_reason == "length"


def test_every_event_tells_the_usage_so_far_where_asked_for(api: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(api, max_tokens=4, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)
    assert {c.usage.prompt_tokens for c in chunks} == {chunks[-1].usage.prompt_tokens}


@MODES
def test_a_client_that_sends_every_default_is_served(api: OpenAI, stream: bool) -> None:
    defaults: Any = {
        "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "logprobs": False,
        "metadata": {}, "modalities": ["text"], "n": 1, "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "service_tier": "auto", "stop": None, "store": False,
        "temperature": 1, "tool_choice": "none", "tools": [], "top_p": 1, "verbosity": "medium",
        "stream_options": {"include_usage": True} if stream else None, "prediction": None,
        "reasoning_effort": None, "audio": None, "functions": [], "seed": None,
    }  # fmt: skip
    done = chat(api, max_tokens=3, stream=stream, **defaults)
    usage = list(done)[-1].usage if stream else done.usage
    assert usage.completion_tokens == 3


# ---- recorded events --------------------------------------------------------------------------


CHAT_EVENTS = """
{"id":"chatcmpl-me","object":"chat.completion.chunk","created":0,"model":"M","choices":\
[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],\
"usage":null}
{"id":"chatcmpl-me","object":"chat.completion.chunk","created":0,"model":"M","choices":\
[{"index":0,"delta":{"content":"system"},"logprobs":null,"finish_reason":null}],"usage":null}
{"id":"chatcmpl-me","object":"chat.completion.chunk","created":0,"model":"M","choices":\
[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","matched_stop":null}],"usage":null}
{"id":"chatcmpl-me","object":"chat.completion.chunk","created":0,"model":"M","choices":[],\
"usage":{"prompt_tokens":31,"completion_tokens":2,"total_tokens":33,\
"prompt_tokens_details":{"cached_tokens":0}}}
[DONE]
"""
TEXT_EVENTS = """
{"id":"cmpl-me","object":"text_completion","created":0,"model":"M","choices":\
[{"index":0,"text":"one","logprobs":null,"finish_reason":null}]}
{"id":"cmpl-me","object":"text_completion","created":0,"model":"M","choices":\
[{"index":0,"text":"","logprobs":null,"finish_reason":"length","matched_stop":null}]}
[DONE]
"""


@pytest.mark.parametrize(
    ("path", "body", "recorded"),
    [
        (
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 2, "stream_options": {"include_usage": True}},
            CHAT_EVENTS,
        ),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, TEXT_EVENTS),
    ],
)
def test_events_are_as_recorded(
    server: Server, url: str, path: str, body: Any, recorded: str
) -> None:
    with Client(server.endpoint) as client:
        client.flush_cache()
    with HttpPeer(url) as peer:
        peer.post(path, {**body, "stream": True}, x_request_id="me")
        head = peer.until(b"\r\n\r\n").lower()
        assert b"content-type: text/event-stream" in head
        assert b"x-request-id: me" in head
        raw = peer.until(b"0\r\n\r\n").decode()
    events = "\n".join(re.findall(r"^data: (.*)$", raw, re.MULTILINE))
    events = re.sub(r'"created":\d+', '"created":0', events).replace(f'"{MODEL}"', '"M"')
    assert events == recorded.strip()


# ---- everything else --------------------------------------------------------------------------


def test_the_model_is_listed(api: OpenAI) -> None:
    (model,) = api.models.list().data
    assert model.id == MODEL
    assert api.models.retrieve(MODEL).max_model_len == 512  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        api.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        complete(api, False, model="gpt-9")


def test_texts_become_tokens_and_tokens_texts(server: Server, url: str) -> None:
    with Client(server.endpoint) as client:
        ids = client.tokenize(PROMPT)
        chat_ids = client.tokenize_chat(HI).token_ids.tolist()
    status, body = post(url, "/tokenize", {"prompt": PROMPT})
    assert (status, body) == (200, {"tokens": ids, "count": len(ids), "max_model_len": 512})
    assert post(url, "/tokenize", {"messages": HI})[1]["tokens"] == chat_ids
    assert post(url, "/detokenize", {"tokens": ids}) == (200, {"prompt": PROMPT})
    for bad in ({}, {"prompt": "x", "messages": HI}, {"messages": HI, "add_special_tokens": True}):
        assert post(url, "/tokenize", bad)[0] == 400
    assert post(url, "/detokenize", {"tokens": [1 << 40]})[0] == 400


def test_health_version_and_cache(url: str) -> None:
    assert get(f"{url}/health") == (200, {"status": "ok"})
    assert set(get(f"{url}/version")[1]) == {"version"}
    status, body = post(url, "/flush_cache", b"")
    assert status == 200
    assert body["pages"] >= 0


def test_a_running_request_is_aborted_by_either_of_its_ids() -> None:
    with simulated_server(*SLOW_ECHO, http=True, http_port=0) as server:
        url = str(server.http_url)
        with client_of(url) as api:
            given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30_000, "stream": True}
            for name in ("mine", "cmpl-mine"):
                stream = api.completions.create(**given, extra_headers={"X-Request-Id": "mine"})
                chunks = iter(stream)
                assert next(chunks).id == "cmpl-mine"
                assert post(url, "/abort", {"request_id": name}) == (200, {"aborted": 1})
                assert list(chunks)[-1].choices[0].finish_reason == "abort"
        assert post(url, "/abort", {"request_id": "mine"}) == (200, {"aborted": 0})


def test_a_script_serves_http_only_if_asked_to() -> None:
    worker = " ".join(ECHO)
    with LLM(simulated=worker) as llm:
        assert llm.http_url is None
        assert "http" not in llm.pids
    with LLM(simulated=worker, http_port=0) as llm:
        assert get(f"{llm.http_url}/health")[0] == 200
        assert "http" in llm.pids


def test_a_lost_connection_to_the_tokenizer_is_made_anew(server: Server) -> None:
    async def lose() -> None:
        link = await Link.connect(server.endpoint, 10)
        lost = link.client
        lost._connections[0]._break(ConnectionLost("cut for a test"))
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(ConnectionLost):
                    if link.client is not lost:
                        break
                await asyncio.sleep(0.01)
        assert await link.client.tokenize("a")
        await link.close()

    asyncio.run(lose())
