"""Tokenizers that took long to build, kept between starts as folders in Hugging Face's layout.

Rules: a folder appears whole or not at all, so that two processes may build the same one at once;
its name tells the sources' path, time and size, so a changed source is built anew.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.config import cache_dir
from runtime.errors import ConfigError

#: Raise it whenever a build would give another result than before.
_VERSION = 1


def cached(kind: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """The folder that `build` filled from `sources`, now or in an earlier start.

    kind: what was built, for the folder's name. Raises ConfigError where the cache can't be
    written.
    """
    target = cache_dir() / "tokenizers" / f"{kind}-{_key(sources)}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
            folder = Path(scratch) / "tokenizer"
            folder.mkdir()
            build(folder)
            _publish(folder, target)
    except OSError as e:
        raise ConfigError(
            f"the cache folder {target.parent} can't be used ({e.strerror or e}):"
            " make it writable or set XDG_CACHE_HOME to another place"
        ) from None
    return target


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # Otherwise another process was first, with the same result.
            raise


def _key(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(str(_VERSION).encode())
    for path in sorted(source.resolve() for source in sources):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}\0".encode())
    return digest.hexdigest()[:24]
