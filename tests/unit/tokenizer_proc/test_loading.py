"""From a model's files to its tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from runtime.errors import ConfigError, ModelNotFound, RequestError
from runtime.instance import ModelFiles
from tests import small_tokenizers as small
from tokenizer_proc import loading
from tokenizer_proc.byte_level import from_gguf, reads_gguf
from tokenizer_proc.cache import cached
from tokenizer_proc.detokenizer import byte_alphabet
from tokenizer_proc.loading import load_tokenizer
from tokenizer_proc.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tandem" / "tokenizers"


def folder(path: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> ModelFiles:
    """A model's folder with tokenizer.json and the given JSON files."""
    path.mkdir(exist_ok=True)
    (backend or small.llama_style()).save(str(path / "tokenizer.json"))
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    return ModelFiles(name="m", path=str(path), format="hf")


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of bytes, "12", a control and a user-defined token."""
    tokens = [*sorted(byte_alphabet(), key=byte_alphabet().get), "12", "<|end|>", "<think>"]  # type: ignore[arg-type]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4],
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 257,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": v for key, v in changes.items()}


def load_gguf(monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any]) -> Tokenizer:
    class Fake:
        def __init__(self, path: Path) -> None:
            self.metadata = metadata

    monkeypatch.setattr(loading, "GgufFile", Fake)
    return load_tokenizer(ModelFiles(name="m", path="m.gguf", format="gguf"))


def test_generation_config_says_first_what_ends_an_output(tmp_path: Path) -> None:
    config, generation = {"eos_token_id": 7}, {"eos_token_id": [5, 6]}
    tokenizer_config = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    files = folder(tmp_path / "a", tokenizer_config=tokenizer_config)
    assert load_tokenizer(files).eos_token_ids == (2,)
    folder(tmp_path / "a", config={"text_config": config})
    assert load_tokenizer(files).eos_token_ids == (7,)
    folder(tmp_path / "a", config=config, generation_config=generation)
    tokenizer = load_tokenizer(files)
    assert tokenizer.eos_token_ids == (5, 6)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize("ids", ["2", [None], {"a": 1}, True])
def test_an_end_that_is_no_id_is_refused(tmp_path: Path, ids: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_tokenizer(folder(tmp_path / "a", config={"eos_token_id": ids}))


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        ({}, True, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_one_bos_is_added_where_the_model_says_so(
    tmp_path: Path, flags: dict[str, bool], first: bool, last: bool
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    tokenizer = load_tokenizer(folder(tmp_path / "a", tokenizer_config=config))
    for text in ("dog", "", "<s>dog") if first else ("dog", ""):
        ids = tokenizer.encode(text).tolist()
        assert (ids.count(1), ids[:1] == [1]) == (int(first), first)
        assert ids.count(2) == int(last)
    assert 1 not in tokenizer.encode("dog", add_special_tokens=False)


def test_tokens_that_only_the_configuration_calls_special_are_made_so(tmp_path: Path) -> None:
    config = {
        "eos_token": "dog",
        "additional_special_tokens": ["<|new|>"],
        "added_tokens_decoder": {"9999": {"content": "<|other|>", "special": False}},
    }
    tokenizer = load_tokenizer(folder(tmp_path / "a", tokenizer_config=config))
    ids = tokenizer.encode("<|new|>dog<|other|>", add_special_tokens=False).tolist()
    assert tokenizer.decode(ids[-3:]) == "<|other|>"
    assert tokenizer.eos_token_ids == (ids[-2],)


def test_training_leftovers_do_not_cut_or_pad_a_text(tmp_path: Path) -> None:
    backend = small.llama_style()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(folder(tmp_path / "a", backend))
    assert 2 < len(tokenizer.encode("the lazy dog")) < 50


@pytest.mark.parametrize("where", ["file", "string", "list", "processor"])
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, where: str) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {"string": "yes", "list": named}.get(where, "no" if where == "file" else None)
    files = folder(tmp_path / "a", tokenizer_config={"chat_template": config})
    if where == "file":
        (tmp_path / "a" / "chat_template.jinja").write_text("yes")
    if where == "processor":
        folder(tmp_path / "a", chat_template={"chat_template": "yes"})
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert load_tokenizer(files).render_chat(chat) == "yes"


def test_a_folder_without_a_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no tokenizer"):
        load_tokenizer(ModelFiles(name="m", path=str(tmp_path), format="hf"))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(ModelFiles(name="m", path=str(tmp_path), format="hf"))


def test_without_transformers_a_conversion_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-llm\[convert\]'"):
        load_tokenizer(ModelFiles(name="m", path=str(tmp_path), format="hf"))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        small.wrap(small.bare()).encode("one \ud800")


def test_gguf_tokens_are_matched_whole_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_gguf(monkeypatch, gguf_metadata())
    ids = tokenizer.encode("12<think><|end|>").tolist()
    assert ids == [256, 258, 257]
    assert tokenizer.decode(ids) == "12<think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (257, (257,))
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    ("pre", "ids"),
    [("gpt-2", [256]), ("smollm", [49, 50]), ("qwen2", [49, 50]), ("llama-bpe", [257, 256])],
)
def test_gguf_kinds_differ_in_digits_and_bos(
    monkeypatch: pytest.MonkeyPatch, pre: str, ids: list[int]
) -> None:
    tokenizer = load_gguf(monkeypatch, gguf_metadata(ggml__pre=pre))
    assert tokenizer.encode("12").tolist() == ids


def test_gguf_says_itself_whether_bos_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    on = load_gguf(monkeypatch, gguf_metadata(ggml__add_bos_token=True))
    assert on.encode("1<|end|>").tolist() == [257, 49, 257]
    off = load_gguf(monkeypatch, gguf_metadata(ggml__pre="llama3", ggml__add_bos_token=False))
    assert off.encode("1").tolist() == [49]


def test_gguf_ends_at_turn_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_gguf(monkeypatch, gguf_metadata(ggml__eot_token_id=258))
    assert tokenizer.eos_token_ids == (257, 258)


def test_gguf_padding_tokens_are_unknown() -> None:
    metadata = gguf_metadata(ggml__token_type=[1] * 257 + [3, 5])
    assert from_gguf(metadata).id_to_token(258) is None


def test_gguf_tokens_outside_the_byte_alphabet_are_respelled() -> None:
    metadata = gguf_metadata(ggml__token_type=[1] * 257 + [3, 1])
    metadata["tokenizer.ggml.tokens"][258] = "\u2603 "
    assert from_gguf(metadata).decode([258]) == "\u2603 "


def test_gguf_kinds_not_known_here_go_to_the_conversion() -> None:
    assert reads_gguf(gguf_metadata())
    assert not reads_gguf(gguf_metadata(ggml__pre="deepseek-llm"))
    assert not reads_gguf(gguf_metadata(ggml__model="llama"))


def test_gguf_without_a_tokenizer_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="no tokenizer"):
        load_gguf(monkeypatch, {})


def test_gguf_whose_merges_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="merges"):
        from_gguf(gguf_metadata(ggml__merges=["1 zz"]))


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"model_type": "qwen3", "vocab_size": 999}]
)
def test_a_preset_without_vocabulary_gets_bytes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(
            ModelFiles(name="dummy", path=str(tmp_path / "config.json"), format="preset")
        )
    assert "dummy" in caplog.text
    assert tokenizer.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert tokenizer.eos_token_ids == (258,)
    ids, text = tokenizer.encode_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_build_is_done_once_until_its_source_changes(tmp_path: Path, own_cache: Path) -> None:
    source, builds = tmp_path / "vocab", []

    def build(out: Path) -> None:
        builds.append(out)
        (out / "x").write_text(source.read_text())

    source.write_text("1")
    first = cached("kind", [source], build)
    assert cached("kind", [source], build) == first
    assert len(builds) == 1
    source.write_text("22")
    assert (cached("kind", [source], build) / "x").read_text() == "22"
    assert not list(own_cache.glob(".building-*"))


def test_of_two_builds_at_once_the_first_to_end_stays(tmp_path: Path) -> None:
    source = tmp_path / "vocab"
    source.write_text("1")

    def first(out: Path) -> None:
        (out / "x").write_text("first")

    def slower(out: Path) -> None:
        cached("kind", [source], first)
        (out / "x").write_text("second")

    assert (cached("kind", [source], slower) / "x").read_text() == "first"


def test_a_failed_build_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    def fail(out: Path) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        cached("kind", [tmp_path], fail)
    assert list(own_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file in its place")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        cached("kind", [tmp_path], lambda out: None)


def test_unknown_ids_and_models_without_any_special_token(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    tokenizer = load_tokenizer(folder(tmp_path / "a", backend))
    assert tokenizer.decode([0, 77, 1]) == "a b"
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((), None)
