"""Byte-level BPE tokenizers from what GGUF files and tiktoken files hold.

Where transformers and the model's own tokenizer.json disagree, the model's own is followed:
`PRE_TOKENIZERS` says where.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from runtime.errors import ConfigError
from tokenizer_proc.detokenizer import byte_alphabet

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

#: llama.cpp's numbers for what a token is.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a kind of byte-level tokenizer treats text before its merges.

    split: the regular expression whose matches are merged separately; None for GPT-2's.
    digits: each digit stands alone. nfc: the text is normalized to NFC first.
    ignore_merges: a whole piece that is a token is taken as it is.
    adds_bos: what holds where the file doesn't say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer()
_LLAMA3 = PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
QWEN2 = PreTokenizer(split=QWEN2_SPLIT, nfc=True)

#: By GGUF's tokenizer.ggml.pre. Against transformers' reading of the same files:
#: smollm: SmolLM's tokenizer.json has Digits(individual_digits), as llama.cpp has; transformers
#: merges digits.
#: qwen2: Qwen's tokenizer.json normalizes to NFC; transformers doesn't.
#: llama-bpe: Llama 3's tokenizer.json ignores merges and adds BOS; transformers does neither unless
#: the file says so.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(digits=True),
    "qwen2": QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], kind: PreTokenizer
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer; raises ConfigError where merges and vocabulary don't fit."""
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    except Exception as e:  # The library raises nothing more special.
        raise ConfigError(f"the tokenizer's merges don't fit its vocabulary: {e}") from None
    backend = tokenizers.Tokenizer(model)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(kind))
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizers(kind: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None))
    return steps


def reads_gguf(metadata: Mapping[str, Any]) -> bool:
    """Whether `from_gguf` knows the kind of tokenizer that `metadata` describes."""
    return (
        metadata.get("tokenizer.ggml.model") == "gpt2"
        and metadata.get("tokenizer.ggml.pre", "default") in PRE_TOKENIZERS
        and "tokenizer.ggml.merges" in metadata
    )


def from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer in a GGUF file's metadata, which adds nothing to a text; see `reads_gguf`."""
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    types = _token_types(metadata, tokens)
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    kind = PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")]
    backend = byte_level(_gguf_vocab(tokens, types), merges, kind)
    for wanted in (_CONTROL, _USER_DEFINED):
        special = wanted == _CONTROL
        added = [tokens[i] for i in np.flatnonzero(types == wanted)]
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return backend


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """What each token is: an integer array [len(tokens)]."""
    types = np.array(metadata.get("tokenizer.ggml.token_type", ()), dtype=np.int64)
    if not len(types):
        types = np.full(len(tokens), _NORMAL)
    if len(types) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    # Rows that only pad the embedding: older files call them user-defined.
    types[[i for i in np.flatnonzero(types == _USER_DEFINED) if tokens[i] == f"[PAD{i}]"]] = _UNUSED
    return types


def _gguf_vocab(tokens: list[str], types: Any) -> dict[str, int]:
    """Token to id, without the unused; all ordinary ones spelled in the byte alphabet."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    alphabet = byte_alphabet()
    spelling = {byte: char for char, byte in alphabet.items()}
    # One pass over all characters, since most vocabularies have nothing to mend.
    if not set("".join(tokens)) <= alphabet.keys():
        for i in np.flatnonzero(types == _NORMAL):
            if not set(tokens[i]) <= alphabet.keys():
                vocab.pop(tokens[i], None)
                vocab["".join(spelling[byte] for byte in tokens[i].encode())] = int(i)
    for i in np.flatnonzero(types == _UNUSED):
        vocab.pop(tokens[i], None)
    return vocab


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
