"""Log probabilities through the scheduler: whose they are, each once, whatever happens."""

from typing import Any

import numpy as np
import pytest

from tests.scheduling import Harness
from worker_proc.simulated import Simulation

_PROMPT = list(range(100, 140))


def test_a_prompt_that_is_to_be_told_is_not_taken_from_the_cache() -> None:
    harness = Harness(200, max_extend_tokens=16)
    harness.ask(_PROMPT)
    asked = harness.submit(_PROMPT, prompt_logprobs=0)
    again = harness.submit(_PROMPT)
    harness.run_and_check()
    assert harness.prompt_told[asked] == _PROMPT[1:]
    assert (harness.cached[asked], harness.cached[again]) == (0, len(_PROMPT) - 1)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_retracted_request_tells_its_prompt_once(overlap: bool, page_size: int) -> None:
    harness = Harness(
        120 // page_size,
        page_size=page_size,
        overlap=overlap,
        max_extend_tokens=7,
        max_running_req=8,
    )
    requests = [
        harness.submit([n, *_PROMPT[: 20 + n]], 30, prompt_logprobs=0, logprobs=0) for n in range(8)
    ]
    harness.run_and_check()
    assert harness.scheduler.counters.retractions > 0
    for request in requests:
        prompt = harness.submits[request].token_ids.tolist()
        assert harness.prompt_told[request] == prompt[1:]
        assert harness.logprobs[request] == harness.outputs[request]


def test_a_request_preempted_while_its_prompt_is_told_is_told_on_not_anew() -> None:
    harness = Harness(400, policy="priority", max_running_req=1, max_extend_tokens=8)
    slow = harness.submit(_PROMPT, prompt_logprobs=0)
    harness.step()
    harness.step()
    before = len(harness.prompt_told[slow])
    assert 0 < before < len(_PROMPT) - 1
    harness.submit([1, 2, 3], priority=5)
    harness.run_and_check()
    assert harness.admissions[slow] == 2
    assert harness.prompt_told[slow] == _PROMPT[1:]
    # What was told need not be computed again: those pages are in the cache.
    segments = [pair for p in harness.plans for pair in zip(p.seg_starts, p.seg_lens, strict=True)]
    starts = [int(start) for start, length in segments if length > 3]
    assert starts == sorted(starts)


def test_log_probabilities_go_only_to_those_who_asked_and_to_their_tokenizer() -> None:
    harness = Harness(200)
    plain = [harness.submit([n, 2, 3], owner=n % 2) for n in range(4)]
    asked = [harness.submit([n, 4, 5], owner=n % 2, logprobs=n % 3) for n in range(4)]
    harness.run_and_check()
    assert set(harness.logprobs) == set(asked)
    assert all(harness.logprobs[request] == harness.outputs[request] for request in asked)
    assert all(harness.outputs[request] for request in plain)


def test_log_probabilities_of_one_that_was_aborted_are_dropped() -> None:
    harness = Harness(200, max_extend_tokens=8)
    request = harness.submit(_PROMPT, prompt_logprobs=0)
    harness.plan()
    harness.abort(request)
    harness.run()
    assert harness.prompt_told[request] == []
    harness.check_empty()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"bad_token_ids": (5,)}, [0, 6, 7, 0, 6]),
        ({"allowed_token_ids": (6, 9)}, [6, 6, 6, 6, 6]),
        ({"bad_token_ids": (5,), "logit_bias": {8: 3.0}}, [8, 6, 7, 8, 6]),
        ({"temperature": 2.0, "presence_penalty": 2.0, "top_k": 3}, [5, 6, 7, 5, 6]),
    ],
    ids=str,
)
def test_the_simulated_worker_keeps_bans_and_is_sure_otherwise(
    asked: dict[str, Any], expected: list[int]
) -> None:
    harness = Harness(50, simulation=Simulation(vocab_size=20, answers="echo"))
    request = harness.submit([5, 6, 7], 5, **asked)
    harness.run()
    assert harness.outputs[request] == expected


def test_ends_are_banned_from_the_first_min_tokens_also_after_retractions() -> None:
    harness = Harness(40, simulation=Simulation(vocab_size=20, answers="echo"), max_running_req=4)
    rng = np.random.default_rng(0)
    requests = [
        harness.submit([5, *rng.integers(8, 20, 6).tolist()], 16, stop_ids=(5,), min_tokens=10)
        for _ in range(4)
    ]
    harness.run()
    assert harness.scheduler.counters.retractions > 0
    for request in requests:
        outputs = harness.outputs[request]
        assert 5 not in outputs[:10]
        assert outputs.index(5) == len(outputs) - 1 == 14
