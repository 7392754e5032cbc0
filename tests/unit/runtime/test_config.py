"""The three ways to give options agree, and what is wrong is named with the way out."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime.config import (
    Config,
    child_environment,
    configs_dir,
    describe,
    flag,
    from_command_line,
    from_options,
)
from runtime.errors import ConfigError
from runtime.options import PARTS, all_options
from runtime.options_page import page

ROOT = Path(__file__).parents[3]
OPTIONS = all_options()
DEFAULTS = {name: field.default for name, (_, field) in OPTIONS.items()}
OTHER_VALUES: Mapping[str, Any] = {
    "model": "Qwen3-0.6B",
    "model_source": "modelscope",
    "tokenizer": "./tokenizer",
    "load_format": "dummy",
    "dtype": "float32",
    "quantization": "int8",
    "generation_config": "none",
    "max_seq_len_override": 4096,
    "max_running_req": 8,
    "max_queued_req": 16,
    "policy": "lpm",
    "max_extend_tokens": 256,
    "page_size": 64,
    "cache_type": "naive",
    "overlap": False,
    "tp": 1,
    "threads": 2,
    "num_page_override": 1000,
    "simulated": "--answers echo",
    "kv_memory_fraction": 0.25,
    "endpoint": "tcp://127.0.0.1:0",
    "num_tokenizers": 4,
    "startup_timeout": 30.0,
    "drain_timeout": 5.0,
    "log_level": "debug",
    "shell": True,
    "http": False,
    "http_host": "::1",
    "http_port": 8080,
    "api_key": "secret",
}


def bounds(which: str) -> list[tuple[str, float]]:
    """(name, limit) of every option with that bound."""
    limits = [(name, field.metadata[which]) for name, (_, field) in OPTIONS.items()]
    return [(name, limit) for name, limit in limits if limit is not None]


def value_of(config: Config, name: str) -> Any:
    return getattr(getattr(config, OPTIONS[name][0]), name)


def on_the_command_line(given: Mapping[str, Any]) -> list[str]:
    argv: list[str] = []
    for name, value in given.items():
        if isinstance(value, bool):
            argv.append(flag(name) if value else "--no-" + flag(name).removeprefix("--"))
        else:
            argv += [flag(name), str(value)]
    return argv


def as_yaml(given: Mapping[str, Any], file: Path, dash: bool = False) -> str:
    lines = (f"{k.replace('_', '-') if dash else k}: {str(v).lower()}" for k, v in given.items()
             if not isinstance(v, str))  # fmt: skip
    quoted = (f"{k.replace('_', '-') if dash else k}: '{v}'" for k, v in given.items()
              if isinstance(v, str))  # fmt: skip
    file.write_text("\n".join((*lines, *quoted)) + "\n")
    return str(file)


def test_nothing_given_means_every_default() -> None:
    config = from_options({})
    assert {name: value_of(config, name) for name in OPTIONS} == DEFAULTS
    assert from_command_line([]) == config


@pytest.mark.parametrize("name", OPTIONS)
def test_every_default_passes_its_own_check(name: str) -> None:
    assert value_of(from_options({name: DEFAULTS[name]}), name) == DEFAULTS[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_set_in_all_three_ways(name: str, tmp_path: Path) -> None:
    given = {name: OTHER_VALUES[name]}
    config = from_options(given)
    assert value_of(config, name) == OTHER_VALUES[name]
    assert from_command_line(on_the_command_line(given)) == config
    file = as_yaml(given, tmp_path / "c.yaml")
    assert from_command_line(["--config", file]) == config


def test_all_options_together_agree_too(tmp_path: Path) -> None:
    config = from_options(OTHER_VALUES)
    assert from_command_line(on_the_command_line(OTHER_VALUES)) == config
    for dash in (False, True):
        file = as_yaml(OTHER_VALUES, tmp_path / "c.yaml", dash)
        assert from_command_line(["--config", file]) == config


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = as_yaml({"page_size": 16, "tp": 1, "overlap": False}, tmp_path / "c.yaml")
    config = from_command_line(["--page-size", "8", "--config", file, "--overlap"])
    assert config.scheduler.page_size == 8
    assert config.scheduler.overlap is True


def test_a_config_survives_json() -> None:
    for given in ({}, OTHER_VALUES):
        config = from_options(given)
        assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(("name", "least"), bounds("least"))
def test_every_lower_bound_holds(name: str, least: float) -> None:
    assert value_of(from_options({name: least}), name) == least
    below = least - 1 if isinstance(least, int) else least / 2
    with pytest.raises(ConfigError, match=rf"^{name} is .*: it must be at least {least}"):
        from_options({name: below})


@pytest.mark.parametrize(("name", "most"), bounds("most"))
def test_every_upper_bound_holds(name: str, most: float) -> None:
    assert value_of(from_options({name: most}), name) == most
    above = most + 1 if isinstance(most, int) else most * 2
    with pytest.raises(ConfigError, match=rf"^{name} is .*: it must be at most {most}"):
        from_options({name: above})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"page_size": "16"}, "page_size is '16': it takes a whole number"),
        ({"page_size": True}, "page_size is True: it takes a whole number"),
        ({"page_size": 16.0}, "page_size is 16.0: it takes a whole number"),
        ({"page_size": None}, "page_size is None: it takes a whole number"),
        ({"overlap": 1}, "overlap is 1: it takes true or false"),
        ({"model": 5}, "model is 5: it takes a text"),
        ({"kv_memory_fraction": "half"}, "kv_memory_fraction is 'half': it takes a number"),
        ({"kv_memory_fraction": float("nan")}, "kv_memory_fraction is nan: it must be at least"),
        ({"kv_memory_fraction": [0.5]}, "kv_memory_fraction is [0.5]: it takes a number"),
        ({"dtype": "bfloat"}, "'bfloat': it takes auto or float32 or bfloat16; did you mean"),
        ({"startup_timeout": 0.5}, "startup_timeout is 0.5: it must be at least 1 seconds"),
    ],
)
def test_a_bad_value_names_itself_and_what_was_expected(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        from_options(given)
    assert says in str(e.value)


def test_a_whole_number_beyond_every_float_is_refused() -> None:
    """It once escaped as OverflowError."""
    with pytest.raises(ConfigError, match="startup_timeout is 1000"):
        from_options({"startup_timeout": 10**400})


def test_what_python_users_write_is_understood() -> None:
    config = from_options({"model": Path("m"), "dtype": "torch.bfloat16", "startup_timeout": 5})
    assert config.model.model == "m"
    assert config.model.dtype == "bfloat16"
    assert config.server.startup_timeout == 5.0


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^unknown argument 'pagesize'; did you mean 'page_size'"
    ):
        from_options({"pagesize": 1})
    for argv in (["--page-sise", "4"], ["--page-sise=4"]):
        with pytest.raises(ConfigError, match=r"^unknown option '--page-sise.*mean '--page-size'"):
            from_command_line(argv)
    file = as_yaml({"page_sise": 4}, tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"c.yaml: unknown key 'page_sise'; did .* 'page_size'"):
        from_command_line(["--config", file])


def test_an_unknown_name_like_no_other_names_none() -> None:
    with pytest.raises(ConfigError, match=r"^unknown argument 'zzz'$"):
        from_options({"zzz": 1})
    with pytest.raises(ConfigError, match="unknown option '--zzz'; --help lists all"):
        from_command_line(["--zzz"])


def test_an_abbreviated_option_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="unknown option"):
        from_command_line(["--page", "4"])


def test_a_text_where_a_number_belongs_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigError, match="--page-size: invalid int value: 'four'"):
        from_command_line(["--page-size", "four"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not valid YAML"),
        ("- page_size", "must hold option names and values"),
        ("just text", "must hold option names and values"),
        ("1: 2", "must hold option names and values"),
        ("page_size: big", "page_size is 'big': it takes a whole number"),
        ("model: {path: x}", "model is {'path': 'x'}: it takes a text"),
    ],
)
def test_a_bad_file_says_what_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as e:
        from_command_line(["--config", str(tmp_path / "c.yaml")])
    assert says in str(e.value)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert from_command_line(["--config", str(tmp_path / "c.yaml")]) == from_options({})


def test_a_missing_file_or_a_file_of_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        from_command_line(["--config", str(tmp_path / "no.yaml")])
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        from_command_line(["--config", str(tmp_path / "c.yaml")])


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        from_command_line(["--help"])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name in OPTIONS if flag(name) not in shown] == []
    assert "SUPPRESS" not in shown


def test_every_option_is_described_and_named_once() -> None:
    assert len(OPTIONS) == sum(len(dataclasses.fields(cls)) for cls in PARTS.values())
    assert set(OTHER_VALUES) == set(OPTIONS)
    for name in OPTIONS:
        assert describe(name)


def test_a_config_can_not_be_changed() -> None:
    config = from_options({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scheduler.page_size = 3  # type: ignore[misc]


def test_a_child_process_can_import_this_project() -> None:
    assert str(ROOT) in child_environment()["PYTHONPATH"].split(":")


@pytest.mark.parametrize("file", sorted(configs_dir().glob("*.yaml")), ids=lambda p: p.name)
def test_every_ready_made_deployment_is_a_valid_config(file: Path) -> None:
    config = from_command_line(["--config", str(file)])
    assert config.model.model is not None


def test_the_ready_made_deployments_are_there() -> None:
    names = {p.stem for p in configs_dir().glob("*.yaml")}
    assert {"smollm2-135m", "qwen3-0.6b", "qwen3-0.6b-dummy"} <= names


def test_the_options_page_is_up_to_date() -> None:
    """If this fails: python -m runtime.options_page > docs/options.md"""
    assert (ROOT / "docs" / "options.md").read_text() == page()


def test_reading_the_configuration_imports_no_heavy_library() -> None:
    code = (
        "import sys; from runtime.config import from_command_line; from_command_line([]);"
        "heavy = {'torch', 'zmq', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
