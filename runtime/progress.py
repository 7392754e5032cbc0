"""Shows what starting processes report: bars on a terminal, one line each in a log file."""

import sys
from typing import Any

from tqdm.auto import tqdm

from runtime.messages import Progress


class LoadingBars:
    """One bar, or one line, per process that has told what it does."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, name: str, news: Progress | None) -> None:
        """Show `news` of the process `name`; None: it is done."""
        if news is None:
            if (bar := self._bars.pop(name, None)) is not None:
                bar.close()
            return
        text = f"{name}: {news.text}"
        bar = self._bars.get(name)
        if bar is None:
            is_terminal = sys.stderr.isatty()
            if not is_terminal:
                print(text, file=sys.stderr, flush=True)
            bar = self._bars[name] = tqdm(
                desc=text,
                total=100,
                bar_format="{desc}: {n:3.0f} % |{bar}|",
                mininterval=0.2,
                disable=not is_terminal,
            )
        bar.set_description_str(text, refresh=False)
        if news.fraction is not None:
            bar.update(news.fraction * 100 - bar.n)
