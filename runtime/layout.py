"""What a folder or file must hold to be a model, or to be a tokenizer.

Rule: a place that exists but lacks something is described, never passed over for a later place.
"""

import fnmatch
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.instance import ModelFiles

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "*.tiktoken")
_TOKENIZER_EXTRAS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
NEVER = ("*/*", "consolidated*")
"""Hub files that are left alone: everything in subfolders, and second copies of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a look-up is for.

    noun, option: how errors call it, and the option that names it.
    at: what is found at an existing path, to be called by the name given; or what it lacks.
    pick: of a hub repository's file names, the patterns to download, or in words why none.
    way_out: the last line of the error when nothing is found.
    """

    noun: str
    option: str
    at: Callable[[Path, str], ModelFiles | str]
    pick: Callable[[Sequence[str]], list[str] | str]
    way_out: str


def weights_at(path: Path, name: str) -> ModelFiles | str:
    """The checkpoint at `path`: a .gguf file, or a folder with one or in Hugging Face layout."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            return "is a file, but not a .gguf file; give the folder that holds config.json"
        return ModelFiles(name=name, path=str(path.absolute()), format="gguf")
    if not path.is_dir():
        return "is neither a file nor a folder"
    names = sorted(p.name for p in path.iterdir() if p.is_file())
    ggufs = [n for n in names if n.lower().endswith(".gguf")]
    lacking = _lacking(path, names)
    if not lacking:
        return ModelFiles(name=name, path=str(path.absolute()), format="hf")
    if len(ggufs) == 1:
        return ModelFiles(name=name, path=str((path / ggufs[0]).absolute()), format="gguf")
    if ggufs:
        return f"holds {len(ggufs)} .gguf files: name one of them ({', '.join(ggufs)})"
    return f"lacks {' and '.join(lacking)}"


def shape_at(path: Path, name: str) -> ModelFiles | str:
    """The folder with a config.json at `path`, whether weights lie beside it or not."""
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        return "lacks config.json"
    return ModelFiles(name=name, path=str(folder.absolute()), format="hf")


def tokenizer_at(path: Path, name: str) -> ModelFiles | str:
    """The tokenizer at `path`: a folder with its files, one of those files, or a .gguf file."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        return ModelFiles(name=name, path=str(path.absolute()), format="gguf")
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        return "is neither a file nor a folder"
    if _any_matches([p.name for p in folder.iterdir() if p.is_file()], _TOKENIZER_FILES):
        return ModelFiles(name=name, path=str(folder.absolute()), format="hf")
    found = weights_at(folder, name)
    if isinstance(found, ModelFiles) and found.format == "gguf":
        return found
    return f"lacks a tokenizer: none of {', '.join(_TOKENIZER_FILES)} is in it"


def _lacking(folder: Path, names: Sequence[str]) -> list[str]:
    """What a folder needs, beyond the files `names`, to be a checkpoint in Hugging Face layout."""
    lacking = [] if "config.json" in names else ["config.json"]
    if not _any_matches(names, ("*.safetensors",)):
        return [*lacking, "*.safetensors"]
    missing = sorted(_indexed(folder) - set(names))
    if missing:
        shown = missing[0] if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
        lacking.append(f"{shown} (named in model.safetensors.index.json)")
    return lacking


def _indexed(folder: Path) -> set[str]:
    """The weight files that the index names; empty where there is no readable index."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return set()  # the loader, which needs the index, says what is wrong with it


def _pick_weights(files: Sequence[str]) -> list[str] | str:
    top = [f for f in files if "/" not in f]
    if _any_matches(top, ("*.safetensors",)):
        return ["*.safetensors", *_TOKENIZER_EXTRAS]
    ggufs = [f for f in top if f.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        return f"it holds {len(ggufs)} .gguf files: download one of them and give its path"
    return "it holds neither *.safetensors nor a .gguf file"


def _pick_tokenizer(files: Sequence[str]) -> list[str] | str:
    if _any_matches([f for f in files if "/" not in f], _TOKENIZER_FILES):
        return list(_TOKENIZER_EXTRAS)
    return f"it holds none of {', '.join(_TOKENIZER_FILES)}"


def _any_matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)


WEIGHTS = Want(
    noun="model",
    option="--model",
    at=weights_at,
    pick=_pick_weights,
    way_out="give --model a folder with config.json and *.safetensors, a .gguf file, or a hub id"
    " (ORG/NAME) that can be reached; or leave --model out to get the embedded"
    " SmolLM2-135M-Instruct",
)
TOKENIZER = Want(
    noun="tokenizer",
    option="--tokenizer",
    at=tokenizer_at,
    pick=_pick_tokenizer,
    way_out="give --tokenizer a folder with tokenizer.json, a .gguf file, or a hub id (ORG/NAME)"
    " that can be reached; or leave it out to use the model's own",
)
