"""A whole server: find the model, make the instance, start its processes. Used by launch.py and by
`LLM`.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runtime.config import Config
from runtime.errors import ConfigError
from runtime.instance import Instance
from runtime.messages import Begin, Progress
from runtime.models import find_model, find_tokenizer
from runtime.process import ENDPOINT_FILE, HTTP_FILE
from runtime.supervisor import Command, Supervisor
from runtime.transport import check_endpoint

FOLDER_PREFIX = "tandem-"


class Server:
    """Started processes and where to reach them."""

    def __init__(
        self,
        config: Config,
        *,
        on_line: Callable[[str], None] = lambda line: None,
        on_progress: Callable[[str, Progress | None], None] = lambda name, news: None,
        echo: Callable[[str], None] = lambda line: print(line, end="", file=sys.stderr, flush=True),
    ) -> None:
        """Look the model up and lay out the instance; nothing runs yet."""
        if config.server.endpoint is not None:
            check_endpoint(config.server.endpoint)
        if config.http.api_key is not None and not config.http.api_key.strip():
            raise ConfigError("api_key is empty: give one, or leave it out to ask for none")
        model = find_model(config.model)
        tokenizer = find_tokenizer(config.model, model)
        self.instance = Instance(
            folder=_private_folder(),
            config=config,
            model=model,
            tokenizer=tokenizer,
            server_id=secrets.token_hex(8),
        )
        try:
            self.instance.save()
        except BaseException:
            self.instance.remove()
            raise
        self._supervisor = Supervisor(
            self.instance,
            _commands(config),
            on_line=on_line,
            on_progress=on_progress,
            echo=echo,
        )
        self.facts: Begin | None = None

    def start(self) -> None:
        """Start all processes; returns when they are ready, raises what kept them from it."""
        self.facts = self._supervisor.start()

    @property
    def endpoint(self) -> str:
        """Where clients connect. A port 0 that was asked for is replaced by the one that was
        bound.
        """
        file = self.instance.folder / ENDPOINT_FILE
        return file.read_text() if file.exists() else self.instance.endpoint

    @property
    def http_url(self) -> str | None:
        """Where HTTP clients connect; None if HTTP is off."""
        file = self.instance.folder / HTTP_FILE
        return file.read_text() if file.exists() else None

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    def stop(self) -> None:
        """End all processes and remove the instance's folder; returns when that is done."""
        self._supervisor.stop()


def _commands(config: Config) -> list[Command]:
    simulated = config.worker.simulated
    worker = () if simulated is None else ("--simulated", *shlex.split(simulated))
    return [
        *(
            Command(
                name=f"worker-{rank}",
                module="worker_proc",
                arguments=("--rank", str(rank), *worker),
            )
            for rank in range(config.worker.tp)
        ),
        *(
            Command(
                name=f"tokenizer-{index}",
                module="tokenizer_proc",
                arguments=("--index", str(index)),
                has_users=True,
            )
            for index in range(config.server.num_tokenizers)
        ),
        Command(name="scheduler", module="scheduler_proc"),
        *([_HTTP] if config.http.http else []),
    ]


_HTTP = Command(name="http", module="http_proc", has_users=True, is_front=True)


def _private_folder() -> Path:
    """A new 0700 folder whose socket paths are short enough, after removing those of dead
    servers.
    """
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        base = Path(parent)
        if len(str(base)) > 60 or not os.access(base, os.W_OK):
            continue
        _remove_left_behind(base)
        return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base))
    raise ConfigError("no temporary folder with a short path can be written: set TMPDIR to one")


def _remove_left_behind(base: Path) -> None:
    """Folders of servers that were killed before any of their processes could clean up."""
    for folder in base.glob(f"{FOLDER_PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        # Its own processes, or another server that starts, may be deleting it right now.
        with contextlib.suppress(FileNotFoundError):
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not _is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
