"""The server's entry point: `python launch.py --model Qwen3-0.6B`. All options: `--help`,
docs/options.md.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from runtime.config import from_command_line
from runtime.errors import TandemError, UserError
from runtime.progress import LoadingBars
from runtime.server import Server


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C, SIGTERM or a death; the exit status."""
    try:
        config = from_command_line(argv)
        logging.basicConfig(level=config.server.log_level.upper(), format="%(message)s")
        server = Server(config, on_line=_say, on_progress=LoadingBars())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.supervisor.ask_to_stop())
        server.start()
        _say(f"serving at {server.endpoint}")
        _say(f"try it: python examples/ask.py --endpoint {server.endpoint} 'What is the sun?'")
        while not server.supervisor.wait(3600):
            pass
        if server.supervisor.error is not None:
            raise server.supervisor.error
    except UserError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 2
    except TandemError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 1
    _say("stopped")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
