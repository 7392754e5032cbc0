"""The counts of the stage 2 milestone, with Qwen's tokenizer: they must be exactly those of its
page.
"""

from examples.stage2_milestone import chunked, shared_head, throughput

QWEN = {"load_format": "dummy", "simulated": "--answers attend --vocab-size 151936"}
"""The counts are the scheduler's: no weights are needed for them."""


def test_a_naive_cache_computes_all_231_prompt_tokens() -> None:
    prefill, _ = shared_head("Qwen3-0.6B", "naive", **QWEN)
    assert (prefill.prompt_tokens, prefill.computed) == (231, 231)


def test_a_radix_cache_computes_73_of_them() -> None:
    prefill, _ = shared_head("Qwen3-0.6B", "radix", **QWEN)
    assert (prefill.prompt_tokens, prefill.computed) == (231, 73)


def test_the_long_prompt_of_302_tokens_takes_4_steps() -> None:
    prefill = chunked("Qwen3-0.6B", **QWEN)
    assert (prefill.prompt_tokens, prefill.steps) == (302, [96, 96, 96, 14])


def test_fewer_slots_and_overlap_give_the_same_text() -> None:
    texts = {
        throughput("Qwen3-0.6B", **QWEN, **options)[1]
        for options in ({}, {"max_running_req": 2}, {"overlap": True})
    }
    assert len(texts) == 1
