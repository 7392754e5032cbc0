"""Log probabilities of tokens, from the model's own logits: before edits and temperature."""

import numpy as np
import torch

from runtime.logprobs import Logprobs
from runtime.types import IntArray


def logprobs_of(logits: torch.Tensor, tokens: IntArray, num_likeliest: IntArray) -> Logprobs:
    """Each row's token, then the likeliest tokens of its distribution.

    logits: float32 [r, vocab_size]; tokens, num_likeliest: int32 [r], at least 0. Of equal ones
    among the likeliest the lowest id comes first.
    """
    vocab_size = logits.shape[1]
    num_likeliest = num_likeliest.clip(max=vocab_size)
    totals = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.from_numpy(tokens).long()[:, None])
    top = logits.topk(int(num_likeliest.max()), dim=-1)
    values = (torch.cat((own, top.values), 1) - totals).numpy()
    ids = np.concatenate((tokens[:, None], top.indices.numpy().astype(np.int32)), axis=1)
    order = np.lexsort((ids[:, 1:], -values[:, 1:]), axis=-1)
    ids[:, 1:] = np.take_along_axis(ids[:, 1:], order, 1)
    wanted = np.arange(ids.shape[1]) <= num_likeliest[:, None]
    counts = num_likeliest + 1
    return Logprobs(counts=counts.astype(np.int32), token_ids=ids[wanted], values=values[wanted])
