"""What quantization or a dtype costs in accuracy:  python -m bench.perplexity [--quantization int8]
[--dtype bf16|fp32] [--model M] [--reference-dtype …] [--reference-model …] [--json]

A model against a reference, by default the embedded SmolLM2-135M in bf16 against itself in fp32:
the perplexity of both, the share of positions where both hold the same token likeliest, and the
mean divergence of their predictions, KL(reference ‖ model). A .gguf file as --model compares its
kind of quantization.

The text is the language reference that CPython carries for its help() (pydoc_data.topics): prose in
English, always there, and of more than 100,000 tokens. It differs a little between versions of
Python. Windows of it are computed one by one, by the worker's engine, as prefills; a window's first
token is not predicted.
"""

import argparse
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.nn import functional

from bench.worker import add_options, load, model_options
from runtime.instance import ModelFiles
from tests.plans import PlanMaker
from tokenizer_proc.loading import load_tokenizer
from worker_proc.engine import Engine

PAGE_SIZE = 16
ROWS_AT_ONCE = 32
"""Of log probabilities: a vocabulary wide, of both models, still in the cache when compared."""


class Scorer:
    """The logits of every position of a window, by an engine."""

    def __init__(self, engine: Engine, window: int) -> None:
        self._engine = engine
        self._num_pages = -(-window // PAGE_SIZE)
        engine.begin(self._num_pages, PAGE_SIZE, 1, window)

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> Iterator[torch.Tensor]:
        """Of every token after each position but the last: float32 [rows, vocab_size] at a time."""
        plans = PlanMaker(PAGE_SIZE)
        plans.admit(0, ids, range(self._num_pages))
        self._engine.execute(plans.plan((0, 0, len(ids), True)), every_row=True)
        predicting = np.arange(len(ids) - 1, dtype=np.int32)
        for first in range(0, len(predicting), ROWS_AT_ONCE):
            rows = predicting[first : first + ROWS_AT_ONCE]
            yield functional.log_softmax(self._engine.computation.logits(rows), dim=-1)


@dataclass(slots=True, kw_only=True)
class Score:
    """Sums over predicted tokens; nll: of the negative log likelihoods of the text's own tokens."""

    num_tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    num_agreed: int = 0
    divergence: float = 0.0

    def add(self, model: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor) -> None:
        """model, reference: log probabilities [n, vocab_size]. tokens: the true ones [n]."""
        self.num_tokens += len(tokens)
        self.nll -= float(model.gather(1, tokens[:, None]).double().sum())
        self.reference_nll -= float(reference.gather(1, tokens[:, None]).double().sum())
        self.num_agreed += int((model.argmax(-1) == reference.argmax(-1)).sum())
        self.divergence += float((reference.exp() * (reference - model)).sum(-1).double().sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one comparison, over num_tokens predicted tokens."""

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    greedy_agreement: float
    mean_divergence: float
    text: str


def compare(engine: Engine, reference: Engine, ids: list[int], window: int) -> Result:
    """Both engines on the same ids, in windows; a rest shorter than a window is left out."""
    if engine.config.vocab_size != reference.config.vocab_size:
        raise SystemExit("the model and the reference must have one vocabulary")
    ours, theirs = Scorer(engine, window), Scorer(reference, window)
    score = Score()
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        following = torch.tensor(part[1:]).split(ROWS_AT_ONCE)
        for rows in zip(ours.log_probs(part), theirs.log_probs(part), following, strict=True):
            score.add(*rows)
    return Result(
        num_tokens=score.num_tokens,
        perplexity=math.exp(score.nll / score.num_tokens),
        reference_perplexity=math.exp(score.reference_nll / score.num_tokens),
        greedy_agreement=score.num_agreed / score.num_tokens,
        mean_divergence=score.divergence / score.num_tokens,
        text=f"pydoc_data.topics of Python {platform.python_version()}",
    )


def text_ids(files: ModelFiles, num_tokens: int) -> list[int]:
    """The first ids of the text in the vocabulary of the model at `files`."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = load_tokenizer(files).encode(text, add_special_tokens=False).tolist()
    if len(ids) < num_tokens:
        raise SystemExit(f"the text has {len(ids)} tokens: ask for no more with --tokens")
    return ids[:num_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add_options(parser, "reference-", dtype="fp32")
    parser.add_argument("--tokens", type=int, default=24 * 1024)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not 2 <= arguments.window <= arguments.tokens:
        parser.error(f"--window {arguments.window}: at least 2, and at most --tokens")
    engine, _ = load(model_options(arguments))
    reference, files = load(model_options(arguments, "reference-"))
    ids = text_ids(files, arguments.tokens)
    result = compare(engine, reference, ids, arguments.window)
    if arguments.json:
        print(json.dumps(asdict(result)))
        return
    print(f"{result.num_tokens} tokens of {result.text}, in windows of {arguments.window}")
    print(f"perplexity {result.perplexity:.4f}, reference {result.reference_perplexity:.4f}")
    print(f"greedy agreement {result.greedy_agreement:.2%}, KL {result.mean_divergence:.2e}")


if __name__ == "__main__":
    main()
