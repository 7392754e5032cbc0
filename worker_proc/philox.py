"""Counter-based random numbers: the same for a key and a counter, wherever and whenever drawn.

Source: Philox4x32-10 of Random123 (Salmon et al., SC 2011).
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Four random words per entry. All arrays uint64 [n], each value below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def uniforms(seeds: Words, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """One number in [0, 1), of 53 bits, per (seed, position). seeds: uint64 [n]."""
    zeros = np.zeros_like(seeds)
    counter = (positions.astype(np.uint64), zeros, zeros, zeros)
    high, low, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    bits = (high >> np.uint64(5) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
