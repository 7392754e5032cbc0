"""Whole models with 8-bit and 4-bit weights: near what plain weights give, and the same bits alone,
in company, in chunks and with any number of threads.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

from runtime.errors import ConfigError
from runtime.gguf_file import GgufFile
from runtime.instance import ModelFiles
from tests.plans import PlanMaker
from tests.reference import embedded_gguf
from worker_proc.checkpoint import Quantization, Weights
from worker_proc.engine import Engine
from worker_proc.gguf_checkpoint import GgufCheckpoint, read_gguf_config
from worker_proc.models.llama import llama_shapes
from worker_proc.native import build

_VOCAB, _HIDDEN, _INNER = 199, 96, 160
_ROWS = {
    "attn_q": (_HIDDEN, _HIDDEN),
    "attn_k": (_HIDDEN // 2, _HIDDEN),
    "attn_v": (_HIDDEN // 2, _HIDDEN),
    "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_INNER, _HIDDEN),
    "ffn_up": (_INNER, _HIDDEN),
    "ffn_down": (_HIDDEN, _INNER),
}


@pytest.fixture(params=[variant.name for variant in build.runnable()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: each in turn."""
    monkeypatch.setenv("TANDEM_KERNELS", request.param)
    name: str = request.param
    return name


def written(path: Path, kind: str, tied: bool = True, values: str | None = None) -> ModelFiles:
    """A small llama of random weights whose matrices are stored as `kind`, the values' of attention
    as `values` where given.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(5)

    def add(name: str, shape: tuple[int, ...], stored: str) -> None:
        weight = random.standard_normal(shape).astype(np.float32) * 0.08
        code = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(f"{name}.weight", quantize(weight, code), raw_dtype=code)

    add("token_embd", (_VOCAB, _HIDDEN), kind)
    if not tied:
        add("output", (_VOCAB, _HIDDEN), kind)
    for layer in range(2):
        for name, shape in _ROWS.items():
            add(f"blk.{layer}.{name}", shape, values or kind if name == "attn_v" else kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(name="small", path=str(path), format="gguf")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, _VOCAB, length)]


def logits(engine: Engine, ids: list[int], chunk: int = 1000) -> torch.Tensor:
    """Of every position: float32 [len(ids), vocab_size]."""
    engine.begin(len(ids) + 1, 1, 1, len(ids) + 1)
    plans = PlanMaker(page_size=1)
    plans.admit(0, ids, range(len(ids) + 1))
    found = []
    for start in range(0, len(ids), chunk):
        length = min(chunk, len(ids) - start)
        engine.execute(plans.plan((0, start, length, False)), every_row=True)
        found.append(engine.computation.logits(np.arange(length, dtype=np.int32)))
    return torch.cat(found)


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_near_those_of_plain_weights(
    kernels: str, kind: str, dtype: str, tied: bool, tmp_path: Path
) -> None:
    files, ids = written(tmp_path / "m.gguf", kind, tied), prompt(70)
    plain = logits(Engine.load(files, dtype="float32", quantization="none"), ids)
    ours = logits(Engine.load(files, dtype=dtype, quantization="int8"), ids)
    assert 1e-4 < distance(ours, plain) < 0.05


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_sequence_is_the_same_bits_in_any_chunks_company_and_threads(
    kernels: str, kind: str, tmp_path: Path
) -> None:
    files, ids = written(tmp_path / "m.gguf", kind), prompt(100)
    engine = Engine.load(files, dtype="bfloat16", quantization="int8", threads=1)
    whole = logits(engine, ids)
    for chunk in (1, 7, 32):
        assert torch.equal(logits(engine, ids, chunk), whole)
    for threads in (1, 2, 3):
        engine = Engine.load(files, dtype="bfloat16", quantization="int8", threads=threads)
        assert torch.equal(logits(engine, ids), whole)
        for others in (1, 7, 31):
            assert torch.equal(last_in_company(engine, ids, others), whole[-1])


def last_in_company(engine: Engine, ids: list[int], others: int) -> torch.Tensor:
    """The logits after `ids`, decoded among so many other sequences."""
    room, count = len(ids), others + 1
    engine.begin(room * count, 1, count, room)
    plans, slot = PlanMaker(page_size=1), others // 2
    for other in range(count):
        length = 3 + 5 * other % 90
        own = ids if other == slot else prompt(length, seed=other)
        plans.admit(other, own, range(other * room, (other + 1) * room))
        engine.execute(plans.plan((other, 0, len(own) - 1, False)))
    lens = [len(ids) if other == slot else 3 + 5 * other % 90 for other in range(count)]
    engine.execute(plans.plan(*[(i, length - 1, 1, True) for i, length in enumerate(lens)]))
    return engine.computation.logits(np.array([slot], np.int32))[0]


def test_a_file_is_kept_as_it_is_unless_float32_is_asked_for(tmp_path: Path) -> None:
    files, ids = written(tmp_path / "m.gguf", "Q4_1"), prompt(40)
    found = {
        (dtype, quantization): logits(
            Engine.load(files, dtype=dtype, quantization=quantization), ids
        )
        for dtype in ("float32", "bfloat16")
        for quantization in ("auto", "none", "int8")
    }
    assert torch.equal(found["bfloat16", "auto"], found["bfloat16", "int8"])
    assert torch.equal(found["float32", "auto"], found["float32", "none"])
    assert not torch.equal(found["bfloat16", "auto"], found["bfloat16", "none"])


def test_stacked_matrices_of_several_types_are_not_kept(tmp_path: Path) -> None:
    """Their product is one, so it takes one type: it is dequantized, or rounded to 8 bits."""
    files = written(tmp_path / "m.gguf", "Q4_1", values="Q8_0")
    file = GgufFile(files.path)
    config = read_gguf_config(file)
    heard: list[float] = []
    weights = Weights(
        GgufCheckpoint(file, config),
        llama_shapes(config),
        torch.bfloat16,
        heard.append,
        Quantization.KEPT,
    )
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert weights.blocks(names) is None
    assert not heard
    assert [blocks.type_name for blocks in weights.blocks(names[:2]) or ()] == ["Q4_1"] * 2
    assert len(heard) == 2
    assert weights.blocks(["model.norm.weight"]) is None
    plain = logits(Engine.load(files, dtype="float32"), prompt(40))
    for quantization in ("auto", "int8"):
        ours = Engine.load(files, dtype="bfloat16", quantization=quantization)
        assert distance(logits(ours, prompt(40)), plain) < 0.03


def test_torch_computes_no_8_bits_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_KERNELS", "torch")
    files = written(tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="int8, which only the native kernels compute"):
        Engine.load(files, quantization="int8")
    assert Engine.load(files, dtype="bfloat16").computation.name == "torch"


def test_the_embedded_model_keeps_its_likeliest_tokens_in_4_bits() -> None:
    files = ModelFiles(name="smollm2", path=str(embedded_gguf()), format="gguf")
    ids = [1, 4093, 198, 504, 3575, 282, 4649, 314]
    plain = logits(Engine.load(files, dtype="float32"), ids)
    ours = logits(Engine.load(files, dtype="bfloat16"), ids)
    assert distance(ours, plain) < 0.03
    assert int((ours.argmax(-1) == plain.argmax(-1)).sum()) >= len(ids) - 1
