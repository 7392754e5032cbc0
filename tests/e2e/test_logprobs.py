"""Log probabilities of the whole system against transformers: cold, cached and in chunks."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from runtime import LLM, SamplingParams
from tests.reference import embedded_gguf, gguf_model, tiny_model
from tests.small_tokenizers import byte_level

PROMPT = [*range(1000, 1090), 504, 3575, 282, 4649, 314]
NUM_TOKENS = 12
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "SmolLM2-135M-Instruct", dtype="float32", threads=1, max_extend_tokens=20, page_size=1
    ) as made:
        yield made


@dataclass(frozen=True)
class Subject:
    """A server, the same model by transformers, and a prompt of many chunks or pages."""

    llm: LLM
    model: Any
    prompt: list[int]


QWEN3: dict[str, dict[str, Any]] = {
    "in chunks": {"max_extend_tokens": 20, "page_size": 1},
    "whole": {"page_size": 16},
    "by torch": {"max_extend_tokens": 20, "page_size": 16},
}


@pytest.fixture(scope="module", params=["smollm2", *QWEN3])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    if request.param == "smollm2":
        llm = request.getfixturevalue("llm")
        yield Subject(llm, gguf_model(embedded_gguf()), PROMPT)
        return
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = byte_level()
    model = tiny_model("Qwen3", vocab_size=400, tie_word_embeddings=False)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    prompt = np.random.default_rng(3).integers(3, tokenizer.get_vocab_size(), 95).tolist()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if request.param == "by torch":
            patch.setenv("TANDEM_KERNELS", "torch")
        llm = stack.enter_context(
            LLM(
                str(folder),
                dtype="float32",
                threads=1,
                num_page_override=512,
                **QWEN3[request.param],
            )
        )
        yield Subject(llm, model, prompt)


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """The log probabilities after each of the ids, float64 [len(ids), vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def check(told: list[dict[str, Any]], tokens: list[int], reference: torch.Tensor, top: int) -> None:
    """Each of `tokens` is told by its row of `reference`, and so are the likeliest."""
    assert [entry["token_id"] for entry in told] == tokens
    for entry, row in zip(told, reference, strict=True):
        likeliest = entry["top_logprobs"]
        assert len(likeliest) == top
        for one in (entry, *likeliest):
            assert abs(one["logprob"] - row[one["token_id"]]) < TOLERANCE
        values = [one["logprob"] for one in likeliest]
        assert values == sorted(values, reverse=True)
        assert abs(values[-1] - row.topk(top).values[-1]) < TOLERANCE


def test_they_are_the_models_whether_cold_cached_or_in_chunks(subject: Subject) -> None:
    llm, prompt = subject.llm, subject.prompt
    asked = SamplingParams(
        max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=2, ignore_eos=True,
        temperature=0.7, top_k=40, repetition_penalty=1.2, seed=4,
    )  # fmt: skip
    llm.flush_cache()
    (cold,) = llm.generate(prompt, asked)
    (told_again,) = llm.generate(prompt, asked)
    (cached,) = llm.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS, logprobs=3))
    assert (cold["cached_tokens"], told_again["cached_tokens"]) == (0, 0)
    page_size = llm._session.server.instance.config.scheduler.page_size
    assert cached["cached_tokens"] == (len(prompt) - 1) // page_size * page_size
    for result in (cold, told_again, cached):
        ids = prompt + result["token_ids"]
        rows = expected(subject.model, ids)
        check(result["logprobs"], result["token_ids"], rows[len(prompt) - 1 : -1], 3)
        if "prompt_logprobs" in result:
            first, *rest = result["prompt_logprobs"]
            assert first is None
            check(rest, prompt[1:], rows[: len(prompt) - 1], 2)


def test_outputs_of_one_call_share_the_prompt_and_differ_by_their_seeds(llm: LLM) -> None:
    llm.flush_cache()
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    (result,) = llm.generate(PROMPT, SamplingParams(n=4, seed=10, **asked))
    alone = [
        llm.generate(PROMPT, SamplingParams(seed=10 + i, **asked))[0]["token_ids"] for i in range(4)
    ]
    assert [choice["token_ids"] for choice in result["choices"]] == alone
    assert len({tuple(ids) for ids in alone}) == 4
    assert result["token_ids"] == alone[0]
    assert llm.stats()["prompt_tokens_computed"] < 3 * len(PROMPT) + 40


SEEDED = [PROMPT[-5 - n :] for n in range(6)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each of SEEDED by itself."""
    return [llm.generate([SEEDED[n]], seeded(n))[0]["token_ids"] for n in range(len(SEEDED))]


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=24, temperature=0.9, top_p=0.95, seed=seed, repetition_penalty=1.3,
        presence_penalty=0.6, frequency_penalty=0.4, min_tokens=12, min_p=0.02,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"page_size": 4, "num_page_override": 30, "max_seq_len_override": 120},
    ],
    ids=["no overlap", "a pool that forces retractions"],
)
def test_seeded_output_with_penalties_is_the_same_alone_and_in_any_company(
    alone: list[list[int]], options: dict[str, Any]
) -> None:
    each = [seeded(n) for n in range(len(SEEDED))]
    with LLM("SmolLM2-135M-Instruct", dtype="float32", threads=1, **options) as other:
        together = [result["token_ids"] for result in other.generate(SEEDED, each)]
        if "num_page_override" in options:
            assert other.stats()["retractions"] > 0
    assert together == alone
