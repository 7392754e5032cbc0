"""Decoders of the `tokenizers` library as streams: their text as soon as it is certain.

Rules: a stage may give out only what no later token can change; all stages together give exactly
the text of the library's one-shot decode. A decoder that isn't known here for certain is run once,
at the end (`Whole`).

A stage takes the decoder's token strings in order and returns strings. After a fusing stage
(`fused` below) the strings are pieces of one single token, and their borders mean nothing.
"""

import codecs
import string
from collections.abc import Callable
from typing import Protocol

from tokenizers import decoders as library

from runtime.types import Json

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Stage(Protocol):
    """One step of decoding, with the state of one text."""

    def push(self, tokens: list[str]) -> list[str]:
        """What is certain once `tokens` are known too."""

    def finish(self) -> list[str]:
        """The rest, now that nothing follows."""


StageFactory = Callable[[], Stage]


class Whole:
    """Any decoder at all: holds everything back until the end."""

    def __init__(self, decoder: library.Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        self._tokens += tokens
        return []

    def finish(self) -> list[str]:
        tokens, self._tokens = self._tokens, []
        return [self._decoder.decode(tokens)] if tokens else []


class PerToken:
    """A decoder that turns each token to text by itself; only the first may differ."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._first = first
        self._rest = rest
        self._started = False

    def push(self, tokens: list[str]) -> list[str]:
        if not tokens:
            return []
        texts = [self._rest(token) for token in tokens]
        if not self._started:
            texts[0] = self._first(tokens[0])
            self._started = True
        return texts

    def finish(self) -> list[str]:
        return []


class ByteLevel:
    """Tokens spelled in the byte alphabet; their bytes are read as UTF-8, broken parts as U+FFFD.

    Python's "replace" marks the same parts as the library's lossy decoding: a test compares them.
    """

    def __init__(self, token_bytes: Callable[[str], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(map(self._token_bytes, tokens)))]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", True)]


class ByteFallback:
    """Tokens <0x00> to <0xFF> stand for bytes.

    A run of them is its text if the whole is valid UTF-8, else one U+FFFD for each.
    So a run is certain only when it ends, or once it is broken beyond repair.
    """

    def __init__(self) -> None:
        self._start_run()

    def push(self, tokens: list[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            byte = fallback_byte(token)
            if byte is None:
                out += self.finish()
                out.append(token)
            else:
                out += self._add(byte)
        return out

    def finish(self) -> list[str]:
        """The run so far, as one that ends here."""
        if not self._run:
            self._start_run()
            return []
        run = bytes(self._run)
        self._start_run()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)

    def _start_run(self) -> None:
        self._run = bytearray()
        self._broken = False
        self._checker = codecs.getincrementaldecoder("utf-8")("strict")

    def _add(self, byte: int) -> list[str]:
        if self._broken:
            return [REPLACEMENT]
        self._run.append(byte)
        try:
            self._checker.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._broken = True
            held, self._run = len(self._run), bytearray()
            return [REPLACEMENT] * held
        return []


class LeadStrip:
    """Drops up to `count` times `char` at the very start of a fused text."""

    def __init__(self, char: str, count: int) -> None:
        self._char = char
        self._left = count

    def push(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        if self._left and text:
            kept = strip_lead(text, self._char, self._left)
            self._left = 0 if kept else self._left - len(text)
            text = kept
        return [text]

    def finish(self) -> list[str]:
        return []


def strip_lead(text: str, char: str, count: int) -> str:
    """`text` without the first `char`s, at most `count` of them."""
    return text[min(count, len(text) - len(text.lstrip(char))) :]


def fallback_byte(token: str) -> int | None:
    """The byte that a token like "<0x0A>" stands for; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    digits = token[3:5]
    # The library parses with Rust's from_str_radix, which takes a leading plus sign.
    digits = digits[1:] if digits[0] == "+" else digits
    return int(digits, 16) if all(d in string.hexdigits for d in digits) else None


def stages_of(
    config: Json | None, decoder: library.Decoder | None, token_bytes: Callable[[str], bytes]
) -> tuple[list[StageFactory], bool]:
    """(how to make the stages of `decoder`, whether they stream).

    config: its JSON; None where the tokenizer has no decoder.
    token_bytes: the bytes of a token spelled in the byte alphabet.
    """
    if config is None or decoder is None:  # The library then joins the tokens with spaces.
        return [lambda: PerToken(lambda token: token, lambda token: " " + token)], True
    factories, fused = [], False
    for part in flat(config):
        factory, fused = _stage(part, fused, token_bytes)
        if factory is None:
            return [lambda: Whole(decoder)], False
        factories.append(factory)
    return factories, True


def flat(config: Json) -> list[Json]:
    """The single decoders of a decoder, in the order they run; Fuse included."""
    if config.get("type") != "Sequence":
        return [config]
    return [part for inner in config["decoders"] for part in flat(inner)]


def _stage(
    config: Json, fused: bool, token_bytes: Callable[[str], bytes]
) -> tuple[StageFactory | None, bool]:
    """(how to make one decoder's stage, None if it can't stream; whether its output is fused)."""
    match config.get("type"):
        case "Fuse":
            return (lambda: PerToken(str, str)), True
        case "ByteLevel" if not fused:
            return (lambda: ByteLevel(token_bytes)), True
        case "ByteFallback" if not fused:
            return ByteFallback, False
        case "Metaspace":
            return _metaspace(config, fused), fused
        case "Replace":
            return _replace(config, fused), fused
        case "Strip":
            return _strip(config, fused), fused
        case _:
            return None, fused


def _metaspace(config: Json, fused: bool) -> StageFactory:
    mark = config["replacement"]
    lead = " " if config.get("prepend_scheme") == "never" else ""

    def first(token: str) -> str:
        return token.replace(mark, lead)

    def rest(token: str) -> str:
        return token.replace(mark, " ")

    return lambda: PerToken(first, first if fused else rest)


def _replace(config: Json, fused: bool) -> StageFactory | None:
    pattern, content = config["pattern"].get("String"), config["content"]
    if not pattern or (fused and len(pattern) > 1):  # A longer one may lie across two pieces.
        return None

    def replace(token: str) -> str:
        return token.replace(pattern, content)

    return lambda: PerToken(replace, replace)


def _strip(config: Json, fused: bool) -> StageFactory | None:
    char, start = config["content"], config["start"]
    if config["stop"]:  # No known tokenizer strips the end.
        return None
    if fused:
        return lambda: LeadStrip(char, start)

    def strip(token: str) -> str:
        return strip_lead(token, char, start)

    return lambda: PerToken(strip, strip)
