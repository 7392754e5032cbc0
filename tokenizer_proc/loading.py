"""A model's tokenizer from its files: Hugging Face folder, GGUF file or preset.

Rules: nothing of transformers is imported here; what takes long is built once and read from the
cache afterwards.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from runtime.config import child_environment
from runtime.errors import ConfigError, ModelNotFound
from runtime.gguf_file import GgufFile
from runtime.instance import ModelFiles
from runtime.types import Json
from tokenizer_proc.byte_level import PRE_TOKENIZERS, from_gguf, reads_gguf
from tokenizer_proc.cache import cached
from tokenizer_proc.generation import read_generation_config
from tokenizer_proc.json_files import read_json
from tokenizer_proc.preset import (
    CHAT_TEMPLATE,
    NAMED_TOKENS,
    byte_tokenizer,
    qwen_ranks_file,
    qwen_tokenizer,
)
from tokenizer_proc.tokenizer import Tokenizer, TokenizerSettings

_CONVERT_TIMEOUT_S = 600.0
#: Any of these and transformers may know how to read the folder.
_CONVERTIBLE = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
          "mask_token")  # fmt: skip


def load_tokenizer(files: ModelFiles, generation: Json | None = None) -> Tokenizer:
    """The tokenizer of the model found at `files`.

    generation: the model's generation_config.json, whose end-of-sequence ids count before those of
    other files; by default that beside the tokenizer.
    Raises ModelNotFound where there is none, ConfigError where it can't be used, both with the way
    out.
    """
    path = Path(files.path)
    generation = read_generation_config("auto", files) if generation is None else generation
    if files.format == "gguf":
        return _load_gguf(path, generation)
    if files.format == "preset":
        return _load_preset(files.name, path)
    return _load_folder(path, generation)


def _load_folder(folder: Path, generation: Json) -> Tokenizer:
    eos = _eos_ids([generation, *_configs(folder)])
    if (folder / "tokenizer.json").is_file():
        return _assemble_folder(folder, eos)
    sources = [path for pattern in _CONVERTIBLE for path in folder.glob(pattern)]
    if not sources:
        raise ModelNotFound(
            f"{folder} holds no tokenizer: tokenizer.json or tokenizer.model is needed"
        )
    sources += [
        path for path in folder.glob("*.json") if path.name != "model.safetensors.index.json"
    ]
    return _assemble_folder(cached("hf", sources, lambda out: _convert(folder, out)), eos)


def _load_gguf(path: Path, generation: Json) -> Tokenizer:
    """Not cached: of the 0.35 s that 151,000 tokens take, reading them back would save 0.1."""
    metadata = GgufFile(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelNotFound(f"{path} holds no tokenizer: name one with the tokenizer option")
    eos = _eos_ids([generation]) or _gguf_eos_ids(metadata)
    if not reads_gguf(metadata):
        folder = cached("gguf", [path], lambda out: _convert(path, out))
        return _assemble_folder(folder, eos)
    return _assemble(from_gguf(metadata), _gguf_config(metadata), eos)


def _load_preset(name: str, path: Path) -> Tokenizer:
    config = read_json(path)
    eos = _eos_ids([config])
    ranks = qwen_ranks_file(config)
    settings = {**NAMED_TOKENS, "chat_template": CHAT_TEMPLATE}
    if ranks is None:
        return _assemble(byte_tokenizer(name), settings, eos)

    def build(out: Path) -> None:
        qwen_tokenizer(ranks).save(str(out / "tokenizer.json"), pretty=False)

    folder = cached("qwen", [ranks], build)
    return _assemble(_read_backend(folder / "tokenizer.json"), settings, eos)


def _convert(source: Path, out: Path) -> None:
    """Fill `out` with what transformers makes of `source`, in a child process."""
    if find_spec("transformers") is None:
        raise ConfigError(
            f"the tokenizer of {source} must be converted once, which needs transformers:"
            " pip install 'tandem-llm[convert]'"
        )
    command = [sys.executable, "-m", "tokenizer_proc.convert", str(source.resolve()), str(out)]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=_CONVERT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"converting {source} took more than {_CONVERT_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"the tokenizer of {source} can't be converted ({reason}); some need all of:"
            " pip install 'tandem-llm[convert]'"
        )


def _assemble_folder(folder: Path, eos: tuple[int, ...]) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json")
    backend = _read_backend(folder / "tokenizer.json")
    return _assemble(backend, {**config, "chat_template": _folder_template(folder, config)}, eos)


def _assemble(backend: tokenizers.Tokenizer, config: Json, eos: tuple[int, ...]) -> Tokenizer:
    """A Tokenizer from its parts; `config` as in tokenizer_config.json, which `eos` outranks."""
    named = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    _add_special(backend, config, named)
    bos_id, eos_id = (_id_of(backend, named.get(name)) for name in ("bos_token", "eos_token"))
    # As in transformers: either key replaces what tokenizer.json adds to a text.
    if "add_bos_token" in config or "add_eos_token" in config:
        before = named.get("bos_token") if config.get("add_bos_token") else None
        after = named.get("eos_token") if config.get("add_eos_token") else None
        backend.post_processor = _surround(backend, before, after)
    settings = TokenizerSettings(
        eos_token_ids=eos or (() if eos_id is None else (eos_id,)),
        bos_token_id=bos_id,
        named_tokens=named,
        chat_template=config.get("chat_template"),
    )
    return Tokenizer(backend, settings)


def _add_special(backend: tokenizers.Tokenizer, config: Json, named: Mapping[str, str]) -> None:
    """Make special what only the configuration says is, as transformers does."""
    listed: Json = config.get("added_tokens_decoder") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id in sorted(listed, key=int):
        if listed[token_id]["content"] not in known:
            backend.add_tokens([AddedToken(**listed[token_id])])
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = [*named.values(), *map(_content, extra if isinstance(extra, list) else extra.values())]
    missing = [text for text in dict.fromkeys(texts) if text is not None and text not in special]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _surround(
    backend: tokenizers.Tokenizer, before: str | None, after: str | None
) -> processors.TemplateProcessing:
    """A post-processor that puts the given tokens around a text."""
    parts = [part for part in (before, "$A", after) if part is not None]
    used = [(text, backend.token_to_id(text)) for text in {before, after} if text is not None]
    return processors.TemplateProcessing(single=parts, special_tokens=used)


def _folder_template(folder: Path, config: Json) -> str | None:
    """The template in a file of its own, else in the configuration, else in a processor's."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = config.get("chat_template")
    found = found or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found}
        found = by_name.get("default") or next(iter(by_name.values()), None)
    return found if isinstance(found, str) else None


def _gguf_config(metadata: Mapping[str, Any]) -> Json:
    """The metadata's settings under the names of tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    kind = PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")]
    return {
        **{name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", kind.adds_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of sequence, of turn and of message: llama.cpp ends at each of them."""
    found = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _configs(folder: Path) -> list[Json]:
    """config.json, and its part about text where the model takes more than text."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _eos_ids(configs: Sequence[Json]) -> tuple[int, ...]:
    """The first eos_token_id given, one or several; empty for none."""
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int for i in ids):
                raise ConfigError(
                    f"eos_token_id is {ids!r}: it must be a token id or a list of them"
                )
            return tuple(ids)
    return ()


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # The library raises nothing more special.
        raise ConfigError(f"{path} is not a usable tokenizer ({e}): fetch or delete it") from None


def _content(token: object) -> str | None:
    """A token's text, whether given as such or as a serialized AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)
