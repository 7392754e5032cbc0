"""Chat templates: what they are given, and what is refused."""

from typing import Any

import pytest

from runtime.errors import RequestError
from runtime.types import Json
from tests import small_tokenizers as small
from tokenizer_proc import chat as chat_module
from tokenizer_proc.chat import ChatTemplate
from tokenizer_proc.preset import CHAT_TEMPLATE

HI = [{"role": "user", "content": "hi"}]


def render(source: str, **chat: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render({"messages": HI, **chat})


def test_messages_and_special_tokens_reach_the_template() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}"
    assert render(source) == "<s>user:hi"


def test_a_generation_prompt_is_added_unless_refused() -> None:
    source = "{% if add_generation_prompt %}A:{% endif %}"
    assert render(source) == "A:"
    assert render(source, add_generation_prompt=False) == ""


def test_any_other_variable_reaches_the_template() -> None:
    assert (
        render("{{ enable_thinking }} {{ tools is none }}", enable_thinking=False) == "False True"
    )


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loops_may_break_and_continue() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
    assert render(source + "{% if i == 3 %}{% break %}{% endif %}{% endfor %}") == "023"


def test_tojson_keeps_letters_and_html_as_they_are() -> None:
    assert render("{{ tools | tojson }}", tools=[{"a": "é<b>"}]) == '[{"a": "é<b>"}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"


def test_the_generation_tag_renders_its_text_only() -> None:
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}c") == "ab<s>c"


def test_the_time_is_there_for_templates_that_write_the_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2025-01-31")


def test_values_that_are_none_are_left_out_of_messages() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ 'content' in messages[0] }}", messages=messages) == "False"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_the_names_that_templates_read(name: str) -> None:
    messages = [{"role": "assistant", "content": "a", name: "why"}]
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert render(source, messages=messages) == "why why"


def test_a_template_may_refuse_a_chat_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.further }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_whatever_a_template_does_wrong_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refused"):
        render(source)


def test_a_template_that_does_not_compile_refuses_chats_only_when_they_come() -> None:
    template = ChatTemplate("{% if %}", {})
    with pytest.raises(RequestError, match="can't be used"):
        template.render({"messages": HI})


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        [],
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": b"hi"}],
        [{"role": "user", "content": "hi", 3: 4}],
    ],
)
def test_malformed_messages_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        render("x", messages=messages)


def test_a_chat_that_is_no_mapping_is_refused() -> None:
    not_a_chat: Any = HI
    with pytest.raises(RequestError, match="list"):
        ChatTemplate("x", {}).render(not_a_chat)


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_what_would_be_dropped_silently_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        render("x", **{name: "y"})


def nested(depth: int) -> Json:
    inner: Json = {}
    for _ in range(depth):
        inner = {"x": inner}
    return inner


@pytest.mark.parametrize(
    "chat",
    [
        {"messages": HI * (chat_module.MAX_MESSAGES + 1)},
        {"tools": nested(chat_module.MAX_DEPTH + 2)},
        {"tools": nested(100_000)},
        {"tools": [0] * chat_module.MAX_VALUES},
        {"messages": [{"role": "user", "content": "a" * (chat_module.MAX_CHARS + 1)}]},
    ],
    ids=["messages", "depth", "extreme depth", "values", "characters"],
)
def test_a_chat_too_large_is_refused(chat: Json) -> None:
    with pytest.raises(RequestError, match=r"at most|deep"):
        render("x", **chat)


def test_a_text_too_long_is_refused_while_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_CHARS", 1000)
    with pytest.raises(RequestError, match="longer than"):
        render("{% for i in range(99999) %}{{ bos_token }}{% endfor %}")


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        small.wrap(small.bare()).render_chat({"messages": HI})


def test_a_chat_gets_no_second_bos() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = small.wrap(small.llama_style(), source)
    ids, text = tokenizer.encode_chat({"messages": HI})
    assert text == "<s>hi"
    assert ids.tolist().count(1) == 1
    assert tokenizer.encode(text).tolist() == ids.tolist()


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s> hi", ""])
def test_a_text_gets_one_bos_whether_or_not_it_spells_it(text: str) -> None:
    ids = small.wrap(small.llama_style()).encode(text).tolist()
    assert (ids[0], ids.count(1)) == (1, 1)


def test_a_bos_that_a_user_wrote_further_on_stays() -> None:
    """It is a control string like any other."""
    ids = small.wrap(small.llama_style()).encode("a <s> b").tolist()
    assert ids.count(1) == 2


def test_qwen_leaves_out_the_reasoning_of_earlier_turns() -> None:
    old = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes"}
    text = render(CHAT_TEMPLATE, messages=[*HI, old, *HI])
    user = "<|im_start|>user\nhi<|im_end|>\n"
    middle = "<|im_start|>assistant\nyes<|im_end|>\n"
    assert text == user + middle + user + "<|im_start|>assistant\n"


def test_qwen_answers_without_thinking_when_asked() -> None:
    assert render(CHAT_TEMPLATE, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert render(CHAT_TEMPLATE, enable_thinking=True).endswith("<|im_start|>assistant\n")


def goes_on(content: str, **chat: Any) -> str:
    messages = [*HI, {"role": "assistant", "content": content}]
    return render(CHAT_TEMPLATE, messages=messages, continue_final_message=True, **chat)


def test_a_final_message_is_continued_where_it_ends() -> None:
    whole = render(CHAT_TEMPLATE, messages=[*HI, {"role": "assistant", "content": "Once "}])
    assert goes_on("Once ") == whole[: whole.index("Once ") + len("Once ")]


def test_only_an_assistants_text_can_be_continued() -> None:
    with pytest.raises(RequestError, match="of the role 'assistant' with a text: it is 'user'"):
        render(CHAT_TEMPLATE, continue_final_message=True)
    with pytest.raises(RequestError, match="exclude each other"):
        goes_on("Once", add_generation_prompt=True)
    with pytest.raises(RequestError, match="it takes true or false"):
        render(CHAT_TEMPLATE, continue_final_message="yes")
    with pytest.raises(RequestError, match="it drops its end"):
        render(
            "no messages",
            messages=[{"role": "assistant", "content": "x"}],
            continue_final_message=True,
        )
