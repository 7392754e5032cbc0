"""The whole system against transformers: the embedded model's greedy tokens, however they are
batched.
"""

from typing import Any

import pytest

from runtime import LLM, SamplingParams
from tests.reference import Greedy, embedded_gguf, gguf_model, greedy

NUM_TOKENS = 32
"""Two pages of 16."""
PROMPTS = [
    [504],  # a single token
    [504, 3575, 282, 4649, 314],
    [788, 3446, 1147, 2],
    [1, 4093, 198, 504, 3575, 282, 4649, 314],
    list(range(1000, 1040)),  # several pages of 16
    list(range(5000, 5017)),  # one more than a page
    list(range(7000, 7032)),  # exactly two pages
    list(range(300, 400)),
]


@pytest.fixture(scope="module")
def expected() -> list[Greedy]:
    return greedy(gguf_model(embedded_gguf()), PROMPTS, NUM_TOKENS)


def assert_equal(outputs: list[dict[str, Any]], expected: list[Greedy]) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        clear = reference.num_clear
        assert output["token_ids"][:clear] == reference.token_ids[:clear]
        assert len(output["token_ids"]) == NUM_TOKENS
    # The comparison is worth something only if near ties are few.
    assert sum(reference.num_clear for reference in expected) > len(expected) * NUM_TOKENS / 2


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "max_extend_tokens": 7},
        {"page_size": 16, "max_running_req": 3, "overlap": False, "cache_type": "naive"},
        {"page_size": 4, "num_page_override": 60, "max_seq_len_override": 200},
    ],
    ids=["chunks of 7", "3 slots, no overlap", "a pool that forces retractions"],
)
def test_greedy_tokens_equal_transformers(options: dict[str, Any], expected: list[Greedy]) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM("SmolLM2-135M-Instruct", dtype="float32", threads=1, **options) as llm:
        assert_equal(llm.generate(PROMPTS, sampling), expected)
        if "num_page_override" in options:
            assert llm.stats()["retractions"] > 0


def test_greedy_tokens_equal_transformers_in_one_batch_and_one_by_one(
    expected: list[Greedy],
) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM("SmolLM2-135M-Instruct", dtype="float32", page_size=16) as llm:
        assert_equal(llm.generate(PROMPTS, sampling), expected)
        llm.flush_cache()
        assert_equal([llm.generate([prompt], sampling)[0] for prompt in PROMPTS], expected)
