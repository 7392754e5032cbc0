"""Philox4x32-10 against the vectors that Random123 publishes (kat_vectors)."""

import numpy as np
import pytest

from tests.plans import int32
from worker_proc.philox import Words, philox, uniforms

_VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def _words(*values: int) -> Words:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), _VECTORS)
def test_the_published_vectors_come_out(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    c0, c1, c2, c3 = (_words(word) for word in counter)
    found = philox((c0, c1, c2, c3), (_words(key[0]), _words(key[1])))
    assert [int(word[0]) for word in found] == expected


def test_a_uniform_depends_on_its_own_seed_and_position_only() -> None:
    seeds, positions = _words(5, 5, 2**63 - 1, 6), int32([0, 1, 0, 0])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    found = uniforms(np.full(20000, 9, np.uint64), np.arange(20000, dtype=np.int32))
    assert 0 <= found.min() < found.max() < 1
    counts = np.histogram(found, 10, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 200
