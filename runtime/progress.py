"""Progress bars for what starting processes report."""

from typing import Any

from tqdm.auto import tqdm

from runtime.messages import Progress


class LoadingBars:
    """One bar per process that has told how far it is."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, name: str, news: Progress | None) -> None:
        """Show `news` of the process `name`; None: it is done."""
        if news is None:
            if (bar := self._bars.pop(name, None)) is not None:
                bar.close()
            return
        bar = self._bars.get(name)
        if bar is None:
            bar = self._bars[name] = tqdm(
                total=100, bar_format="{desc}: {n:3.0f} % |{bar}|", mininterval=0.2
            )
            bar.set_description_str(f"{name}: {news.text}")
        if news.fraction is not None:
            bar.update(news.fraction * 100 - bar.n)
