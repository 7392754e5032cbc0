"""Cells are written where they are told, and counted right."""

import torch

from runtime.config import configs_dir
from worker_proc.kv_pool import KvPool, bytes_per_page
from worker_proc.model_config import read_config

_CONFIG = read_config(configs_dir() / "models" / "SmolLM2-135M-Instruct.json")


def test_a_page_takes_what_the_pool_allocates_for_it() -> None:
    pool = KvPool(_CONFIG, 3, 16, torch.bfloat16)
    assert pool.keys.shape == (30, 48, 3, 64)
    assert pool.keys.nbytes + pool.values.nbytes == 3 * bytes_per_page(_CONFIG, 16, torch.bfloat16)
    assert bytes_per_page(_CONFIG, 1, torch.float32) == 46080


def test_cells_come_back_as_written_and_others_stay() -> None:
    pool = KvPool(_CONFIG, 8, 1, torch.float32)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    keys, values = torch.randn(2, 2, 3, 64)
    pool.write(4, torch.tensor([6, 1]), keys, values)
    read_keys, read_values = pool.gather(4, torch.tensor([1, 6]))
    assert torch.equal(read_keys, keys.flip(0))
    assert torch.equal(read_values, values.flip(0))
    assert int((~pool.keys.isnan()).sum()) == keys.numel()
