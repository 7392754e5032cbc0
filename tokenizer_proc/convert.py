"""Convert a tokenizer that only transformers can read: `python -m tokenizer_proc.convert SRC OUT`.

SRC: a model's folder or a GGUF file. OUT: a folder, filled with tokenizer.json and
tokenizer_config.json. A process of its own, since transformers takes seconds to import and hundreds
of megabytes to hold.
"""

import importlib
import sys
from pathlib import Path


def convert(source: Path, out: Path) -> None:
    """Write the fast tokenizer of `source` into `out`. Runs none of the model's own code."""
    # Imported by name: it is an optional extra, and no other module of this package may need it.
    auto = importlib.import_module("transformers").AutoTokenizer
    if source.suffix == ".gguf":
        tokenizer = auto.from_pretrained(str(source.parent), gguf_file=source.name)
    else:
        tokenizer = auto.from_pretrained(str(source), use_fast=True)
    tokenizer.save_pretrained(str(out))
    if not (out / "tokenizer.json").is_file():
        raise ValueError(f"{type(tokenizer).__name__} has no fast version")


def main(argv: list[str]) -> int:
    """0 when done; else 1, the reason being the last line on stderr."""
    if len(argv) != 2:
        print("usage: python -m tokenizer_proc.convert SRC OUT", file=sys.stderr)
        return 2
    try:
        convert(Path(argv[0]), Path(argv[1]))
    except Exception as e:
        print(" ".join(f"{type(e).__name__}: {e}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
