"""The engine against transformers: logits of tiny and real models, greedy texts, every batching."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runtime.instance import ModelFiles
from runtime.types import IntArray
from tests.plans import PlanMaker
from tests.recorder import Recorder
from tests.reference import TINY, embedded_gguf, gguf_model, tiny_model
from worker_proc.engine import Engine
from worker_proc.native import build

_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-linear-bias": (
        "Llama",
        {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-one-group": ("Llama", {"num_key_value_heads": 8}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied-yarn": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
}


@pytest.fixture(params=["torch", *(variant.name for variant in build.runnable())], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: each in turn."""
    monkeypatch.setenv("TANDEM_KERNELS", request.param)
    name: str = request.param
    return name


def recorded(files: ModelFiles, dtype: str) -> tuple[Engine, Recorder]:
    """The engine of `files`, and what its sampler sees."""
    loaded = Engine.load(files, dtype=dtype)
    recorder = Recorder(loaded.computation)
    return Engine(loaded.config, recorder, loaded.dtype), recorder


def begin(engine: Engine, page_size: int, max_seq_len: int = 256) -> PlanMaker:
    """Room for four sequences, in a pool poisoned with NaN."""
    engine.begin(-(-max_seq_len // page_size) * 4, page_size, 4, max_seq_len)
    for cells in engine.computation.pool():
        cells.fill_(float("nan"))
    return PlanMaker(page_size)


def pages_of(engine: Engine, slot: int, page_size: int) -> list[int]:
    """A quarter of the pool for each slot, in an order that is no range."""
    per_slot = engine.tables.page_table.shape[1]
    order = np.random.default_rng(page_size).permutation(per_slot * 4)
    return [int(page) for page in order[slot * per_slot : (slot + 1) * per_slot]]


def prompt(length: int, vocab_size: int = TINY["vocab_size"], seed: int = 0) -> list[int]:
    """Random ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab_size, length)]


def worst(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return float((ours.float() - reference.float()).abs().max() / reference.float().abs().max())


@pytest.fixture(scope="module", params=list(_CASES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved checkpoint of random weights, of one family and one set of features."""
    family, features = _CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(family, **features).save_pretrained(folder)
    return folder


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(name="tiny", path=str(folder), format="hf")


@cache
def reference_of(folder: Path, dtype: str) -> Any:
    """transformers' model of a checkpoint, loaded once, whatever computes ours."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("dtype", list(_TOLERANCE))
def test_logits_of_every_position_equal_transformers(tiny: Path, dtype: str) -> None:
    ids = prompt(140)
    with torch.inference_mode():
        expected = reference_of(tiny, dtype)(torch.tensor([ids])).logits[0]
    engine, recorder = recorded(files_of(tiny), dtype)
    plans = begin(engine, 16)
    plans.admit(0, ids, pages_of(engine, 0, 16))
    lens = [100, 1, 2, 1, 30, *[1] * 6]
    for start, length in zip(np.cumsum([0, *lens]), lens, strict=False):
        # The ids are teacher-forced: the token that the last step sampled is written over.
        plans.write(0, int(start), ids[start : start + length])
        engine.execute(plans.plan((0, int(start), length, True)))
    ends = np.cumsum(lens) - 1
    assert worst(torch.cat(recorder.seen), expected[ends]) < _TOLERANCE[dtype]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_and_decodes_mix_in_one_step(tiny: Path, page_size: int) -> None:
    """Four sequences of unequal length run through each other, as a scheduler would have them."""
    ids = [prompt(length, seed=length) for length in (70, 5, 131, 33)]
    model = reference_of(tiny, "float32")
    engine, recorder = recorded(files_of(tiny), "float32")
    plans = begin(engine, page_size)
    for slot in (0, 1, 2):
        plans.admit(slot, ids[slot], pages_of(engine, slot, page_size))
    engine.execute(plans.plan((0, 0, 69, False), (1, 0, 4, False), (2, 0, 64, False)))
    engine.execute(plans.plan((2, 64, 66, False), (1, 4, 1, True)))
    plans.admit(3, ids[3], pages_of(engine, 3, page_size))
    engine.execute(plans.plan((0, 69, 1, True), (3, 0, 33, True), (2, 130, 1, True)))
    with torch.inference_mode():
        last = [model(torch.tensor([row])).logits[0, -1] for row in ids]
    assert worst(recorder.seen[0], torch.stack([last[1]])) < 1e-4
    assert worst(recorder.seen[1], torch.stack([last[0], last[3], last[2]])) < 1e-4


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_segment_reads_pages_written_in_the_same_step(tiny: Path, page_size: int) -> None:
    shared, tails = prompt(32), (prompt(9, seed=1), prompt(1, seed=2))
    engine, recorder = recorded(files_of(tiny), "float32")
    plans = begin(engine, page_size)
    first, second = (pages_of(engine, slot, page_size) for slot in (0, 1))
    num_shared = 32 // page_size
    plans.admit(0, shared + tails[0], first)
    plans.admit(1, shared + tails[1], first[:num_shared] + second[num_shared:])
    # The reader stands before the writer in the plan: order within a step must not matter.
    engine.execute(plans.plan((1, 32, 1, True), (0, 0, 41, True)))
    model = reference_of(tiny, "float32")
    with torch.inference_mode():
        last = [model(torch.tensor([shared + tail])).logits[0, -1] for tail in tails]
    assert worst(recorder.seen[0], torch.stack([last[1], last[0]])) < 1e-4


def test_decodes_of_unequal_context_share_a_step(tiny: Path) -> None:
    """70 and 100 are padded together, 5 and 200 each by itself; the plan's order is kept."""
    ids = [prompt(length, seed=length) for length in (200, 70, 5, 100)]
    engine, recorder = recorded(files_of(tiny), "float32")
    plans = begin(engine, 16)
    for slot, row in enumerate(ids):
        plans.admit(slot, row, pages_of(engine, slot, 16))
    engine.execute(plans.plan(*[(slot, 0, len(row) - 1, False) for slot, row in enumerate(ids)]))
    engine.execute(plans.plan(*[(slot, len(row) - 1, 1, True) for slot, row in enumerate(ids)]))
    model = reference_of(tiny, "float32")
    with torch.inference_mode():
        last = [model(torch.tensor([row])).logits[0, -1] for row in ids]
    assert worst(recorder.seen[0], torch.stack(last)) < 1e-4


def test_a_chunk_longer_than_a_query_block_equals_transformers(tiny: Path) -> None:
    ids = prompt(500)
    engine, recorder = recorded(files_of(tiny), "float32")
    plans = begin(engine, 16, max_seq_len=512)
    plans.admit(0, ids, pages_of(engine, 0, 16))
    engine.execute(plans.plan((0, 0, 130, False)))
    engine.execute(plans.plan((0, 130, 370, True)))
    with torch.inference_mode():
        expected = reference_of(tiny, "float32")(torch.tensor([ids])).logits[0, -1:]
    assert worst(recorder.seen[0], expected) < 1e-4


def test_greedy_tokens_equal_transformers_until_a_near_tie(tiny: Path) -> None:
    ids = prompt(20)
    expected = generated_from(tiny, tuple(ids), 64)
    engine, recorder = recorded(files_of(tiny), "float32")
    tokens = decoded(engine, ids, 64)
    tops = [logits[0].topk(2).values for logits in recorder.seen]
    clear = next((i for i, top in enumerate(tops) if top[0] - top[1] < 1e-3), 64)
    assert tokens[:clear] == expected[:clear]
    assert clear > 0


@cache
def generated_from(folder: Path, ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """The same for a checkpoint, computed once."""
    return generated(reference_of(folder, "float32"), list(ids), num_tokens)


def generated(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """What transformers' greedy generate adds to `ids`."""
    given = torch.tensor([ids])
    model.generation_config.eos_token_id = None
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return [int(i) for i in out[0, len(ids) :]]


def decoded(engine: Engine, ids: list[int], num_tokens: int) -> list[int]:
    """The same by the engine: a prefill, then decodes whose input is in the token table only."""
    plans = begin(engine, 16)
    plans.admit(0, ids, pages_of(engine, 0, 16))
    tokens: list[IntArray] = [engine.execute(plans.plan((0, 0, len(ids), True)))]
    for position in range(len(ids), len(ids) + num_tokens - 1):
        tokens.append(engine.execute(plans.plan((0, position, 1, True))))
    assert engine.tables.token_table[0, : len(ids)].tolist() == ids
    return [int(i) for i in np.concatenate(tokens)]


def test_the_embedded_gguf_equals_transformers_own_load_of_it() -> None:
    path = embedded_gguf()
    model = gguf_model(path)
    ids = [1, 4093, 198, 504, 3575, 282, 4649, 314]
    files = ModelFiles(name="smollm2", path=str(path), format="gguf")
    engine, recorder = recorded(files, "float32")
    tokens = decoded(engine, ids, 24)
    assert tokens == generated(model, ids, 24)
    with torch.inference_mode():
        expected = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
    assert worst(torch.cat(recorder.seen), expected) < 1e-4
