"""`LLM` over its real processes, the worker simulated: it echoes the prompt."""

import asyncio
import gc
import os
import shlex
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from runtime import LLM, ConfigError, ModelNotFound, ProcessDied, RequestError, SamplingParams
from runtime.errors import TooLong
from tests.fakes import ECHO, Script, is_gone, wait_until_gone

PRELUDE = """
from functools import partial
from runtime import LLM, SamplingParams
LLM = partial(LLM, simulated="--answers echo --vocab-size 49152")
"""


EchoLLM = partial(LLM, simulated=shlex.join(ECHO))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with EchoLLM() as made:
        yield made


def params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


def test_results_come_in_prompt_order(llm: LLM) -> None:
    prompts = [[n + 5] * (1 + n % 7) for n in range(100)]
    each = [params(100 - n) for n in range(100)]
    results = llm.generate(prompts, each)
    assert [r["token_ids"] for r in results] == [[n + 5] * (100 - n) for n in range(100)]


def test_a_batch_begins_in_one_step(llm: LLM) -> None:
    """The first prompt alone, with a token of its own before the others came, cost two steps."""
    prompts = [[n + 5] * 3 for n in range(60)]
    for _ in range(5):
        llm.generate(prompts, params(1))
        assert llm.stats()["prefill_steps"][-1][1] == 180, "all prompts' tokens"
        llm.flush_cache()


def test_a_result_says_everything(llm: LLM) -> None:
    llm.flush_cache()
    (result,) = llm.generate("alpha beta", params(50, stop="beta"))
    assert result == {
        "text": "alpha ",
        "token_ids": llm.tokenizer.encode("alpha beta"),
        "finish_reason": "stop",
        "matched_stop": "beta",
        "prompt_tokens": len(llm.tokenizer.encode("alpha beta")),
        "cached_tokens": 0,
    }


def test_a_stop_token_is_told_by_its_id(llm: LLM) -> None:
    (result,) = llm.generate([5, 6, 7, 8], params(50, stop_token_ids=[7]))
    assert (result["token_ids"], result["finish_reason"]) == ([5, 6, 7], "stop")
    assert result["matched_stop"] == 7


def test_a_refusal_says_which_field_is_at_fault(llm: LLM) -> None:
    for given, field in (
        (params(5, temperature=-1.0), "temperature"),
        (params(1 << 30), "max_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate(["a", "b"], given)
        assert caught.value.field == field
        assert isinstance(caught.value, TooLong) == (field == "max_tokens")


def test_one_prompt_or_many_text_or_ids(llm: LLM) -> None:
    assert len(llm.generate("a b", params(1))) == 1
    assert len(llm.generate([5, 6], params(1))) == 1
    assert [r["token_ids"] for r in llm.generate([[5], [6]], params(1))] == [[5], [6]]
    assert len(llm.generate(["a", [5, 6]], params(1))) == 2
    assert llm.generate([]) == []


def test_ids_may_be_numpys(llm: LLM) -> None:
    for ids in (np.array([5, 6]), [np.int64(5), np.int64(6)]):
        assert llm.generate(ids, params(2))[0]["token_ids"] == [5, 6]


def test_a_batch_may_be_longer_than_the_servers_queue() -> None:
    """5,000 prompts used to lose against a queue of 4,096, and all of them with it."""
    with EchoLLM(max_running_req=2, max_queued_req=8) as llm:
        prompts = [[number] for number in range(60)]
        outputs = llm.generate(prompts, params(1))
    assert [output["token_ids"] for output in outputs] == prompts


def test_a_pool_beyond_the_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_page_override is 2000000000: .* holds \d+ pages"):
        LLM(num_page_override=2_000_000_000)


def test_chat_takes_one_chat_or_several(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert len(llm.chat(chat, params(2))) == 1
    assert len(llm.chat([chat, chat], params(2))) == 2


def test_the_tokenizer_is_the_servers(llm: LLM) -> None:
    assert llm.tokenizer("a text").input_ids == llm.tokenizer.encode("a text")
    ids = llm.tokenizer.encode("some words")
    assert llm.tokenizer.decode(ids) == "some words"
    chat = [{"role": "user", "content": "hi"}]
    text = llm.tokenizer.apply_chat_template(chat, tokenize=False)
    assert llm.tokenizer.apply_chat_template(chat) == llm.tokenizer.encode(str(text), False)
    assert llm.tokenizer.vocab_size == 49152


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((["a", "b"], [params(1)]), "2 prompts came with 1 sampling parameters"),
        ((["a", ""], params(1)), "prompt 1: the prompt is empty"),
        ((["a", "b"], [params(1), params(0)]), "prompt 1: max_tokens is 0"),
        (("a", {"max_tokens": 1}), "SamplingParams"),
        (("a", [{"max_tokens": 1}]), "SamplingParams"),
        ((5, params(1)), "prompts is of type int"),
        (([True], params(1)), "token ids must be"),
        (([None], params(1)), "token ids must be"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(
    llm: LLM, given: tuple[Any, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(*given)
    assert llm.generate("a b", params(2))[0]["finish_reason"] == "length"


def test_a_refused_batch_leaves_nothing_running(llm: LLM) -> None:
    long = params(30_000)
    with pytest.raises(RequestError, match="prompt 3"):
        llm.generate(["a b", "c d", "e f", ""], [long] * 4)
    assert llm.generate("a b", params(1))
    while llm.stats()["running"]:
        pass


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"no_such_option": 1}, ConfigError),
        ({"page_sise": 16}, ConfigError),
        ({"page_size": 0}, ConfigError),
        ({"page_size": "16"}, ConfigError),
        ({"model": "./no/such/model"}, ModelNotFound),
        ({"endpoint": "nonsense"}, ConfigError),
        ({"num_page_override": 1, "page_size": 1}, ConfigError),
    ],
)
def test_bad_options_are_errors(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        EchoLLM(**options)


def test_generate_takes_no_unknown_argument(llm: LLM) -> None:
    with pytest.raises(TypeError):
        llm.generate("a", temprature=1)  # type: ignore[call-arg]


def test_two_at_once_and_another_afterwards(llm: LLM) -> None:
    with EchoLLM() as second:
        assert set(second.pids.values()).isdisjoint(llm.pids.values())
        assert second.generate([5], params(2)) == llm.generate([5], params(2))
        folder = second._session.server.instance.folder
    assert is_gone(folder)
    with EchoLLM() as third:
        assert third.generate([5], params(2))[0]["token_ids"] == [5, 5]


def test_it_works_while_an_asyncio_loop_runs_in_this_thread() -> None:
    """As in a notebook."""

    async def cell() -> list[int]:
        with EchoLLM() as llm:
            return list(llm.generate([5], params(3), use_tqdm=False)[0]["token_ids"])

    assert asyncio.run(cell()) == [5, 5, 5]


def test_one_that_is_dropped_ends_its_processes() -> None:
    llm = EchoLLM()
    folder = llm._session.server.instance.folder
    del llm
    gc.collect()
    wait_until_gone(folder)


def test_after_shutdown_it_says_so() -> None:
    llm = EchoLLM()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RequestError, match="shut down"):
        llm.generate("a")
    with pytest.raises(RequestError, match="shut down"):
        llm.tokenizer.encode("a")


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate("a b", params(50))


@pytest.mark.parametrize("name", ["worker-0", "tokenizer-0", "scheduler"])
def test_a_death_while_idle_is_named_by_the_next_call(name: str) -> None:
    with EchoLLM() as llm:
        os.kill(llm.pids[name], signal.SIGKILL)
        with pytest.raises(ProcessDied, match=f"{name} died"):
            generate_for_ever(llm)
        with pytest.raises(ProcessDied, match=f"{name} died"):
            llm.stats()
        with pytest.raises(ProcessDied, match=f"{name} died"):
            llm.tokenizer.encode("a")


def test_a_script_needs_no_main_guard_and_prints_only_its_own() -> None:
    code = (
        PRELUDE
        + """
first = LLM()
print(first.generate([5], SamplingParams(max_tokens=2))[0]["token_ids"], flush=True)
with LLM() as second:
    print(second.generate([6], SamplingParams(max_tokens=2))[0]["token_ids"], flush=True)
"""
    )
    with Script(code) as script:
        assert script.wait() == 0, script.everything()
        assert script.out == ["[5, 5]\n", "[6, 6]\n"]
        assert script.err == []


def test_a_script_may_have_modules_named_like_ours(tmp_path: Any) -> None:
    for name in ("runtime", "worker_proc", "messages"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    code = PRELUDE + "print(LLM().generate([5], SamplingParams(max_tokens=1))[0]['token_ids'])"
    code = "import sys; sys.path.remove('')\n" + code
    with Script(code, cwd=tmp_path) as script:
        assert script.wait() == 0, script.everything()
        assert script.out == ["[5]\n"]


def test_verbose_shows_the_ready_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with EchoLLM(verbose=True):
        err = capsys.readouterr().err
    assert [name for name in ("worker-0", "tokenizer-0", "scheduler") if f"{name} ready: " in err]
    assert "\r" not in err


def test_an_interrupt_ends_the_call_and_the_server_goes_on() -> None:
    code = (
        PRELUDE
        + """
llm = LLM()
llm.generate([5], SamplingParams(max_tokens=1))
print("asks", flush=True)
try:
    llm.generate(["some words"] * 5, SamplingParams(max_tokens=30_000))
except KeyboardInterrupt:
    print(llm.generate([6], SamplingParams(max_tokens=2))[0]["token_ids"], flush=True)
    while llm.stats()["running"]:
        pass
    print("idle", flush=True)
"""
    )
    with Script(code) as script:
        script.line("asks")
        script.signal(signal.SIGINT)
        assert script.wait() == 0, script.everything()
        assert script.out[1:] == ["[6, 6]\n", "idle\n"]
        assert script.err == []
