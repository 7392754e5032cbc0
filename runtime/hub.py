"""The hubs that models are downloaded from, and the Hugging Face cache.

Rules: a hub's library is imported only when that hub or cache is asked; whatever the network does,
whether a repository can be had is known within PROBE_S.
"""

import importlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from runtime.errors import ConfigError, TandemError
from runtime.layout import NEVER, Want

PROBE_S = 3.5
"""Longest wait for a hub's first answer, in seconds; a name server may block for longer."""
Report: TypeAlias = Callable[[str, float | None], None]
"""Told what is being done, and the fraction from 0 to 1 where it is known."""
_T = TypeVar("_T")


class Hub(Protocol):
    """Where models can be downloaded."""

    name: str

    def list_files(self, repo: str) -> list[str]:
        """File names of the repository; any exception says why it can't be had."""
        ...

    def download(self, repo: str, patterns: Sequence[str]) -> Path:
        """The local folder, after its files that match `patterns` have been downloaded into it."""
        ...


class HuggingFace:
    """The Hugging Face hub, through its own library: its cache, its tokens, its HF_* variables."""

    name = "Hugging Face hub"

    def list_files(self, repo: str) -> list[str]:
        """As Hub says; the time limit covers each of connecting and reading."""
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi().model_info(repo, timeout=PROBE_S)
        except errors.OfflineModeIsEnabled:
            raise LookupError("not asked, because HF_HUB_OFFLINE is set") from None
        except errors.RepositoryNotFoundError:
            raise LookupError(
                f"has no model {repo}, or only for some: for those, log in with `hf auth login`"
            ) from None
        return [f.rfilename for f in info.siblings or ()]

    def download(self, repo: str, patterns: Sequence[str]) -> Path:
        """As Hub says; the library draws a progress bar on standard error."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(NEVER))
        )


class ModelScope:
    """The ModelScope hub, through the optional package `modelscope`."""

    name = "ModelScope hub"

    def list_files(self, repo: str) -> list[str]:
        """As Hub says."""
        files = _modelscope("modelscope.hub.api").HubApi().get_model_files(repo, recursive=False)
        return [str(f["Path"]) for f in files]

    def download(self, repo: str, patterns: Sequence[str]) -> Path:
        """As Hub says; the library draws a progress bar on standard error."""
        module = _modelscope("modelscope.hub.snapshot_download")
        folder = module.snapshot_download(
            repo, allow_patterns=list(patterns), ignore_patterns=list(NEVER)
        )
        return Path(folder)


def hub_of(model_source: str) -> Hub:
    """The hub that the option --model-source names."""
    return ModelScope() if model_source == "modelscope" else HuggingFace()


def cached_folder(repo: str) -> Path | str:
    """The folder of `repo` in the Hugging Face cache, maybe not complete; or in words why none."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    home = cache / f"models--{repo.replace('/', '--')}"
    try:
        commit = (home / "refs" / "main").read_text().strip()
    except OSError:
        return f"{repo} is not in {cache}"
    folder = home / "snapshots" / commit
    return folder if folder.is_dir() else f"{repo} in {cache} is empty"


def fetch(hub: Hub, repo: str, want: Want, report: Report) -> Path | str:
    """Download what is wanted of `repo`: the folder, or in words why not.

    Raises what is ours, for example ConfigError when the hub's library is not installed.
    """
    try:
        files = _within(PROBE_S, lambda: hub.list_files(repo))
    except TandemError:
        raise
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except Exception as e:  # every library has its own exceptions
        return _first_line(e)
    patterns = want.pick(files)
    if isinstance(patterns, str):
        return patterns
    report(f"downloading {repo} from the {hub.name}", None)
    try:
        return hub.download(repo, patterns)
    except Exception as e:
        return f"the download broke off ({_first_line(e)}); starting again goes on from there"


def _modelscope(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            "model_source is 'modelscope', and the package modelscope is not installed:"
            " `pip install 'tandem-llm[modelscope]'` (or `pip install modelscope`)"
        ) from None


def _within(limit_s: float, call: Callable[[], _T]) -> _T:
    """What `call` returns or raises; TimeoutError if it takes longer.

    It is left behind on a daemon thread then: a look-up of a host name can't be interrupted.
    """
    answers: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as e:
            answers.put((None, e))

    threading.Thread(target=run, name="hub-probe", daemon=True).start()
    try:
        value, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, LookupError) and not isinstance(error, KeyError) and text:
        return text[0]
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
