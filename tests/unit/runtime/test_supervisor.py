"""The facts on which all processes agree."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config import from_options
from runtime.errors import ConfigError
from runtime.instance import Instance, ModelFiles
from runtime.messages import Begin, Loaded
from runtime.supervisor import common_facts

FILES = ModelFiles(name="m", path="m", format="hf")


def facts(num_pages: int = 100, max_seq_len: int = 64, **options: Any) -> Begin:
    instance = Instance(
        folder=Path("none"),
        config=from_options(options),
        model=FILES,
        tokenizer=FILES,
        server_id="s",
    )
    nothing = Loaded(num_pages=None, max_seq_len=None, vocab_size=None)
    worker = Loaded(num_pages=num_pages, max_seq_len=max_seq_len, vocab_size=50)
    return common_facts(instance, [nothing, worker, nothing])


def test_the_models_context_is_the_limit_where_the_pool_holds_it() -> None:
    assert facts() == Begin(num_pages=100, max_seq_len=64, vocab_size=50)


def test_a_small_pool_lowers_it() -> None:
    assert facts(num_pages=3, page_size=16).max_seq_len == 48


def test_the_user_may_lower_it() -> None:
    assert facts(max_seq_len_override=10).max_seq_len == 10


def test_the_user_may_not_raise_it() -> None:
    with pytest.raises(ConfigError, match="max_seq_len_override is 65: m knows 64 positions"):
        facts(max_seq_len_override=65)


def test_a_pool_too_small_for_any_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 pages of 1 tokens"):
        facts(num_pages=1, page_size=1)
