"""With the native kernels a request has the same logits, bit for bit, whatever else happens.

The real scheduler drives the real engine. Every logit that a request was sampled from is compared
with those that it has alone, in one chunk, uncached, at page size 1, on one thread. Then the same
for the tokens of `LLM`. Torch's path promises less: these tests do not apply to it. TANDEM_KERNELS
chooses whose bits are looked at; the other kernels that this processor runs get one test.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from runtime import LLM, SamplingParams
from runtime.config import kernels_choice
from runtime.instance import ModelFiles
from runtime.messages import StepPlan
from runtime.options import all_options
from runtime.types import RequestId
from tests.plans import PlanMaker
from tests.recorder import Recorder
from tests.reference import embedded_gguf
from tests.scheduling import Harness
from worker_proc.answer import Answer
from worker_proc.batch import make_batch
from worker_proc.engine import Engine
from worker_proc.model_config import read_config
from worker_proc.models import family_of
from worker_proc.native import build

MAX_TOKENS = 20
Precision = dict[str, str]
PRECISIONS: dict[str, Precision] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
if "quantization" not in all_options():
    del PRECISIONS["int8"]
# Two head sizes and groupings, tied and not, widths that fill no tile.
_TINY: dict[str, Any] = {
    "vocab_size": 199,
    "intermediate_size": 168,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
}

pytestmark = pytest.mark.skipif(
    kernels_choice() == "torch", reason="the torch path promises no equal bits"
)
Logits = dict[int, dict[int, torch.Tensor]]
"""By request, in order of submission, and by position of the token that they choose: [vocab]."""


class Watched:
    """An engine that keeps the logits of every token it samples.

    It is the engine's own computation that is wrapped, and asked for the logits of every row.
    """

    def __init__(self, loaded: Engine) -> None:
        self._recorder = Recorder(loaded.computation)
        self.name = self._recorder.name
        self.engine = Engine(loaded.config, self._recorder, loaded.dtype)
        self.logits_of: Logits = {}
        self._owners: dict[int, RequestId] = {}

    def start(self, num_pages: int, page_size: int, num_slots: int, max_seq_len: int) -> None:
        """A pool that holds NaN wherever nothing was written; nothing kept of earlier runs."""
        self.engine.begin(num_pages, page_size, num_slots, max_seq_len)
        for cells in self._recorder.pool():
            cells.fill_(float("nan"))
        self.logits_of = defaultdict(dict)
        self._owners = {}

    def answer(self, plan: StepPlan) -> Answer:
        self._owners |= {setup.slot: setup.request for setup in plan.setups}
        batch = make_batch(plan)
        self._recorder.seen.clear()
        answer = self.engine.answer(plan)
        rows = torch.cat(self._recorder.seen) if self._recorder.seen else []
        for slot, position, row in zip(
            batch.sample_slots.tolist(), batch.sample_positions.tolist(), rows, strict=True
        ):
            self.logits_of[self._owners[slot]][position] = row
        return answer


class Run(Harness):
    """A scheduler and a watched engine; `submit`, `step`, `run` and `ask` are Harness's."""

    def __init__(self, model: Watched, *, num_pages: int | None = None, **options: Any) -> None:
        """num_pages: by default more than enough, so that nobody is retracted."""
        page_size = options.setdefault("page_size", 1)
        options.setdefault("max_running_req", 64)
        pages = num_pages or 4_000 // page_size
        super().__init__(pages, max_seq_len=512, **options)
        model.start(pages, page_size, self.options.max_running_req, self.max_seq_len)
        self.engine: Any = model
        self.model = model

    @property
    def logits(self) -> list[torch.Tensor]:
        """Of every request, in order of submission: [output tokens, vocab_size]."""
        found = []
        for request, submit in self.submits.items():
            first = len(submit.token_ids)
            rows = self.model.logits_of[request]
            found.append(torch.stack([rows[first + i] for i in range(len(self.outputs[request]))]))
        return found


def assert_same_bits(found: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]) -> None:
    """The same logits for every request; the error says where they first are not, and how far."""
    faults = []
    for request, (ours, expected) in enumerate(zip(found, alone, strict=True)):
        assert ours.dtype == expected.dtype == torch.float32
        assert ours.isfinite().all(), f"request {request} has logits that are no numbers"
        differ = (ours.view(torch.int32) != expected.view(torch.int32)).any(-1).nonzero()
        if len(differ):
            first = int(differ[0])
            distance = float((ours[first] - expected[first]).abs().max())
            faults.append(f"request {request} from output {first} on, by {distance:.1e}")
    assert not faults, f"{len(faults)} of {len(found)} differ: {'; '.join(faults[:4])}"


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return [int(i) for i in torch.randint(3, vocab_size, (length,), generator=generator)]


def alone(model: Watched, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of each prompt by itself."""
    found = []
    for ids in prompts:
        run = Run(model, cache_type="naive")
        run.submit(ids, MAX_TOKENS)
        run.run()
        found += run.logits
    return found


def written(shape: dict[str, Any], folder: Path) -> ModelFiles:
    """A checkpoint of that shape whose attention is sharp: near-uniform weights hide faults."""
    (folder / "config.json").write_text(json.dumps({**_TINY, **shape}))
    config = read_config(folder)
    weights = {}
    for name, size in family_of(config).shapes(config).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        normal = torch.randn(size, generator=generator)
        weights[name] = 1 + 0.3 * normal if len(size) == 1 else 0.15 * normal
    save_file(weights, folder / "model.safetensors")
    return ModelFiles(name="tiny", path=str(folder), format="hf")


_ALL = [("llama", "float32"), ("qwen3", "bfloat16"), ("llama", "int8")]
_PAIRS = [pair for pair in _ALL if pair[1] in PRECISIONS]


@pytest.fixture(scope="module", params=_PAIRS, ids="-".join)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """By the kernels that TANDEM_KERNELS names, the fastest if none."""
    shape, precision = request.param
    return loaded(written(SHAPES[shape], tmp_path_factory.mktemp(shape)), PRECISIONS[precision])


def loaded(files: ModelFiles, precision: Precision, threads: int = 1) -> Watched:
    engine = Engine.load(files, threads=threads, **precision)
    if engine.computation.name == "torch":
        pytest.skip("the kernels can't be built here")
    return Watched(engine)


LENGTHS = [150, 5, 64, 1, 33, 17, 96, 128, *range(7, 55, 2)]
PROMPTS = [prompt(length, 199) for length in LENGTHS]
"""The first is the longest: it crosses pages of 64 and chunks of 96."""


@pytest.fixture(scope="module")
def expected(tiny: Watched) -> list[torch.Tensor]:
    """Each of PROMPTS alone."""
    return alone(tiny, PROMPTS)


def test_the_same_run_again(tiny: Watched, expected: list[torch.Tensor]) -> None:
    assert_same_bits(alone(tiny, PROMPTS[:3]), expected[:3])


@pytest.mark.parametrize("others", [1, 7, 31])
def test_among_others(tiny: Watched, expected: list[torch.Tensor], others: int) -> None:
    """Half of them come while the rest decode, so that steps mix chunks and decodes."""
    run = Run(tiny, cache_type="naive")
    for ids in PROMPTS[: 1 + others // 2]:
        run.submit(ids, MAX_TOKENS)
    for _ in range(4):
        run.step()
    for ids in PROMPTS[1 + others // 2 : 1 + others]:
        run.submit(ids, MAX_TOKENS)
    run.run()
    assert_same_bits(run.logits, expected[: 1 + others])


@pytest.mark.parametrize("others", [0, 7])
@pytest.mark.parametrize("chunk", [1, 7, 96])
def test_in_chunks(tiny: Watched, expected: list[torch.Tensor], chunk: int, others: int) -> None:
    run = Run(tiny, cache_type="naive", max_extend_tokens=chunk)
    for ids in PROMPTS[: 1 + others]:
        run.submit(ids, MAX_TOKENS)
    run.run()
    assert max(max(lengths) for lengths in run.chunks) <= chunk
    assert_same_bits(run.logits, expected[: 1 + others])


@pytest.mark.parametrize("others", [0, 7])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_at_any_page_size(
    tiny: Watched, expected: list[torch.Tensor], page_size: int, others: int
) -> None:
    run = Run(tiny, cache_type="naive", page_size=page_size)
    for ids in PROMPTS[: 1 + others]:
        run.submit(ids, MAX_TOKENS)
    run.run()
    assert_same_bits(run.logits, expected[: 1 + others])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_after_a_cache_hit(tiny: Watched, page_size: int) -> None:
    """The same prompt, one that goes on after it, and one that goes on after its answer."""
    first = PROMPTS[0]
    run = Run(tiny, page_size=page_size)
    answer = run.outputs[run.ask(first, MAX_TOKENS)]
    prompts = [first, first, first + PROMPTS[1], first + answer + PROMPTS[4]]
    for ids in prompts[1:]:
        request = run.ask(ids, MAX_TOKENS)
        assert run.cached[request] >= (len(first) - 1) // page_size * page_size > 0
    assert_same_bits(run.logits, alone(tiny, prompts))


def test_equal_prompts_in_one_step(tiny: Watched, expected: list[torch.Tensor]) -> None:
    """The second reads in the same step what the first writes."""
    run = Run(tiny, page_size=1)
    for _ in range(3):
        run.submit(PROMPTS[0], MAX_TOKENS)
    run.run()
    assert run.cached[list(run.submits)[1]] > 0
    assert_same_bits(run.logits, [expected[0]] * 3)


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_after_a_retraction(
    tiny: Watched, expected: list[torch.Tensor], page_size: int, cache_type: str
) -> None:
    """The pool holds the prompts, not the outputs."""
    pages = sum(-(-length // page_size) + 1 for length in LENGTHS[:5])
    run = Run(tiny, num_pages=pages, page_size=page_size, cache_type=cache_type)
    for ids in PROMPTS[:5]:
        run.submit(ids, MAX_TOKENS)
    run.run()
    assert max(run.admissions.values()) > 1, "nobody was retracted"
    assert_same_bits(run.logits, expected[:5])


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("pair", _PAIRS, ids="-".join)
def test_on_any_number_of_threads(pair: tuple[str, str], tmp_path: Path, threads: int) -> None:
    files = written(SHAPES[pair[0]], tmp_path)
    expected = alone(loaded(files, PRECISIONS[pair[1]]), PROMPTS[:8])
    model = loaded(files, PRECISIONS[pair[1]], threads)
    for others in (0, 7):
        run = Run(model, cache_type="naive", max_extend_tokens=96)
        for ids in PROMPTS[: 1 + others]:
            run.submit(ids, MAX_TOKENS)
        run.run()
        assert_same_bits(run.logits, expected[: 1 + others])


def test_wherever_the_segment_stands_in_the_step(tiny: Watched) -> None:
    """Plans by hand: one sequence's chunk first, in the middle and last among others."""
    ids = PROMPTS[0][:70]
    found = []
    for before, after in ((0, 0), (0, 3), (2, 1), (3, 0)):
        tiny.start(6000, 1, 8, 512)
        plans = PlanMaker(page_size=1)
        segments = []
        for slot in range(before + 1 + after):
            row = ids if slot == before else PROMPTS[6][: 11 + slot]
            plans.admit(slot, row, range(slot * 200, slot * 200 + len(row)))
            segments.append((slot, 0, len(row), True))
        tiny.answer(plans.plan(*segments))
        found.append(next(rows[len(ids)] for rows in tiny.logits_of.values() if len(ids) in rows))
    assert_same_bits([row[None] for row in found[1:]], [found[0][None]] * 3)


@pytest.mark.parametrize("pair", _PAIRS, ids="-".join)
@pytest.mark.parametrize("kernels", [variant.name for variant in build.runnable()])
def test_all_at_once_with_every_kernel(
    kernels: str, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among others, in chunks, cached, retracted, on two threads."""
    monkeypatch.setenv("TANDEM_KERNELS", kernels)
    shape, precision = pair
    model = loaded(written(SHAPES[shape], tmp_path), PRECISIONS[precision], threads=2)
    assert model.name == kernels
    assert_all_at_once(model, PROMPTS[:5], alone(model, PROMPTS[:5]))


def assert_all_at_once(
    model: Watched, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    """Each prompt twice, in a pool that holds little more than two of them."""
    run = Run(model, page_size=4, max_extend_tokens=29, num_pages=90)
    for ids in [*prompts, *prompts]:
        run.submit(ids, MAX_TOKENS)
    run.run()
    assert max(run.admissions.values()) > 1, "nobody was retracted"
    assert max(run.cached.values()) > 0, "nothing was cached"
    assert_same_bits(run.logits, expected * 2)


# ---- the real model --------------------------------------------------------------------------

REAL_PROMPTS = [prompt(length, 49_152) for length in (150, 5, 33, 17)]


class Real(NamedTuple):
    """The embedded model, and the logits of each of REAL_PROMPTS alone."""

    precision: str
    model: Watched
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=list(PRECISIONS))
def real(request: pytest.FixtureRequest) -> Real:
    files = ModelFiles(name="smollm2", path=str(embedded_gguf()), format="gguf")
    model = loaded(files, PRECISIONS[request.param])
    return Real(request.param, model, alone(model, REAL_PROMPTS))


def test_the_real_models_logits(real: Real) -> None:
    for options in ({}, {"max_extend_tokens": 96, "page_size": 64}):
        run = Run(real.model, **options)
        for ids in REAL_PROMPTS:
            run.submit(ids, MAX_TOKENS)
        run.run()
        assert_same_bits(run.logits, real.expected)
    assert_all_at_once(real.model, REAL_PROMPTS, real.expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "pages of 64, chunks of 96": {"page_size": 64, "max_extend_tokens": 96},
    "chunks of 7, no overlap": {"max_extend_tokens": 7, "overlap": False, "cache_type": "naive"},
    "a pool that forces retractions": {
        "page_size": 4,
        "num_page_override": 68,
        "max_seq_len_override": 260,
    },
}
# One precision sees all of them; that each does in the engine, the tests above show.
WHOLE = {
    "float32": ["chunks of 7, no overlap"],
    "bfloat16": list(OPTIONS),
    "int8": ["a pool that forces retractions"],
}


def test_the_whole_systems_tokens(real: Real) -> None:
    """On two threads, all at once, then once more, when a cache has them: the engine's of one
    thread, alone.
    """
    expected = [logits.argmax(-1).tolist() for logits in real.expected]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for options in (OPTIONS[name] for name in WHOLE[real.precision]):
        with LLM(**PRECISIONS[real.precision], **options, threads=2) as llm:
            for _ in range(2):
                outputs = llm.generate(REAL_PROMPTS, sampling)
                assert [output["token_ids"] for output in outputs] == expected
            if "num_page_override" in options:
                assert llm.stats()["retractions"] > 0
