"""The likeliest token, found by way of a screen of 8 bits, is the one that all logits give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.types import IntArray
from tests.plans import PlanMaker
from tests.small_llama import small_llama
from worker_proc.engine import Engine
from worker_proc.native import build

_VOCAB, _HIDDEN, _PROMPTS = 1999, 100, 40
_Change = Callable[[torch.Tensor, torch.Tensor], None]
"""What is done to a head [vocab_size, hidden_size] and the norm before it [hidden_size]."""


def _random(head: torch.Tensor, norm: torch.Tensor) -> None:
    pass


def _twins(head: torch.Tensor, norm: torch.Tensor) -> None:
    """Each row is there three times, far apart: the first of the likeliest counts."""
    third = len(head) // 3
    head[third : 2 * third] = head[:third]
    head[2 * third : 3 * third] = head[:third].flip(0)


def _alike(head: torch.Tensor, norm: torch.Tensor) -> None:
    """Rows that differ by less than a screen can tell: most of them stay open."""
    head[:] = head[:1] + (head - head[:1]) * 1e-3


def _outlier(head: torch.Tensor, norm: torch.Tensor) -> None:
    """One channel of the activations a thousand times the others, and nearly nothing in it."""
    norm[3] = 1000
    head[:, 3] *= 1e-4


def _unequal(head: torch.Tensor, norm: torch.Tensor) -> None:
    """Rows of lengths from nothing to ten thousand times the shortest."""
    head *= torch.logspace(-4, 0, len(head))[:, None]
    head[5] = 0


def _nothing(head: torch.Tensor, norm: torch.Tensor) -> None:
    head.zero_()


def _negative(head: torch.Tensor, norm: torch.Tensor) -> None:
    """No logit above zero where there is a token of nothing: that one is the likeliest."""
    norm.zero_()
    norm[0] = 1
    head[:, 0] = 0


def _not_numbers(head: torch.Tensor, norm: torch.Tensor) -> None:
    head[17] = float("nan")
    head[1500, 7] = float("nan")


def _infinite(head: torch.Tensor, norm: torch.Tensor) -> None:
    head[40, 3] = float("inf")
    head[1700, 9] = -float("inf")


def _tiny(head: torch.Tensor, norm: torch.Tensor) -> None:
    """The squares of such numbers are nothing in float32, their products with others are not."""
    head *= 1e-31


def _tiny_half(head: torch.Tensor, norm: torch.Tensor) -> None:
    """The likeliest are among tiny ones where all others are below zero."""
    norm.zero_()
    norm[:2] = 1
    head[::2] *= 1e-23
    head[1::2, :2] = 0


def _tiny_rows(head: torch.Tensor, norm: torch.Tensor) -> None:
    norm *= 1e-24


def _on_the_rim(head: torch.Tensor, norm: torch.Tensor) -> None:
    """Products whose sums are about the largest numbers."""
    head *= 1e20
    norm *= 1e17


def _huge(head: torch.Tensor, norm: torch.Tensor) -> None:
    head *= 1e34
    norm *= 1e4


_CHANGES: dict[str, _Change] = {
    change.__name__.strip("_"): change
    for change in (
        _random, _twins, _alike, _outlier, _unequal, _nothing, _negative, _not_numbers, _infinite,
        _tiny, _tiny_half, _tiny_rows, _on_the_rim, _huge,
    )
}  # fmt: skip


@pytest.fixture(params=[variant.name for variant in build.runnable()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: each in turn."""
    monkeypatch.setenv("TANDEM_KERNELS", request.param)
    name: str = request.param
    return name


def made(folder: Path, change: _Change, dtype: str, threads: int = 2) -> Engine:
    def changed(weights: dict[str, torch.Tensor]) -> None:
        change(weights["lm_head.weight"], weights["model.norm.weight"])

    files = small_llama(folder, changed, vocab_size=_VOCAB, hidden_size=_HIDDEN, seed=7)
    return Engine.load(files, dtype=dtype, threads=threads)


def chosen(engine: Engine, *, every_row: bool = False) -> tuple[IntArray, torch.Tensor]:
    """The likeliest tokens after prompts of 1 to _PROMPTS tokens, and afterwards all logits."""
    per_slot = -(-_PROMPTS // 16)
    engine.begin(per_slot * _PROMPTS, 16, _PROMPTS, _PROMPTS)
    plans, random = PlanMaker(page_size=16), np.random.default_rng(3)
    for slot in range(_PROMPTS):
        ids = random.integers(0, _VOCAB, slot + 1).tolist()
        plans.admit(slot, ids, range(slot * per_slot, (slot + 1) * per_slot))
    plan = plans.plan(*[(slot, 0, slot + 1, True) for slot in range(_PROMPTS)])
    tokens = engine.execute(plan, every_row=every_row)
    last = np.cumsum(np.arange(1, _PROMPTS + 1), dtype=np.int32) - np.int32(1)
    return tokens, engine.computation.logits(last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", list(_CHANGES))
def test_the_screened_token_is_the_first_of_the_highest_logits(
    kernels: str, tmp_path: Path, change: str, dtype: str
) -> None:
    tokens, logits = chosen(made(tmp_path, _CHANGES[change], dtype))
    ranked = torch.where(logits.isnan(), -torch.inf, logits)
    expected = [int((row == row.max()).nonzero()[0]) for row in ranked]
    assert tokens.tolist() == expected
    assert change in ("nothing", "negative", "huge") or len(set(expected)) > 1


def test_rows_that_want_logits_and_rows_that_do_not_mix(kernels: str, tmp_path: Path) -> None:
    engine = made(tmp_path, _random, "bfloat16")
    tokens, logits = chosen(engine)
    rows = np.cumsum(np.arange(1, _PROMPTS + 1), dtype=np.int32) - np.int32(1)
    wanted = np.arange(_PROMPTS) % 3 == 1
    computation: Any = engine.computation
    sampled, some = computation._room(rows, wanted)
    computation._answer(sampled, some)
    assert sampled[2].tolist() == tokens.tolist()
    assert torch.equal(some, logits[torch.from_numpy(wanted)])


def test_the_last_layer_of_other_rows_changes_nothing(kernels: str, tmp_path: Path) -> None:
    engine = made(tmp_path, _random, "bfloat16")
    tokens, logits = chosen(engine)
    all_tokens, all_logits = chosen(engine, every_row=True)
    assert tokens.tolist() == all_tokens.tolist()
    assert torch.equal(logits, all_logits)
    engine.computation.logits(np.array([0, 1, 4, 7], np.int32))


def test_a_row_that_was_not_kept_has_no_logits(kernels: str, tmp_path: Path) -> None:
    engine = made(tmp_path, _random, "float32")
    chosen(engine)
    with pytest.raises(ValueError, match="not kept"):
        engine.computation.logits(np.array([1], np.int32))
