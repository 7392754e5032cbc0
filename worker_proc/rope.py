"""Rotary position embedding: the checkpoint's scaling rule, the frequencies, the rotation.

Angles and the rotation are float32 whatever the model's dtype; first and second half of a head's
elements are paired, as Hugging Face checkpoints store them.
Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); Llama 3.1's published code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import ConfigError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies are stretched beyond the context the model was first trained on.

    kind: one of KINDS, or "factors": one divisor per frequency, as llama.cpp writes llama3's.
    original_len: positions of the first training. low_freq, high_freq: llama3's band.
    beta_fast, beta_slow, attention_factor (of cos and sin; None: by YaRN's rule), mscale,
    mscale_all_dim, truncate: YaRN's.
    """

    kind: str = "default"
    factor: float = 1.0
    original_len: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def scaling_from_json(data: Mapping[str, Any], max_positions: int) -> RopeScaling:
    """The rule in a config.json's `rope_scaling` or `rope_parameters`; ConfigError names others."""
    kind = str(data.get("rope_type") or data.get("type") or "default")
    if kind not in KINDS:
        raise ConfigError(f"rope scaling {kind!r} is not supported: known are {', '.join(KINDS)}")
    if data.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not 1: such models are not supported")
    if kind == "default":
        return RopeScaling()
    original_len = int(data.get("original_max_position_embeddings") or max_positions)
    factor = data.get("factor") or max_positions / original_len
    attention_factor = data.get("attention_factor")
    return RopeScaling(
        kind=kind,
        factor=float(factor),
        original_len=original_len,
        low_freq=float(data.get("low_freq_factor") or 1.0),
        high_freq=float(data.get("high_freq_factor") or 4.0),
        beta_fast=float(data.get("beta_fast") or 32.0),
        beta_slow=float(data.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(data.get("mscale") or 0.0),
        mscale_all_dim=float(data.get("mscale_all_dim") or 0.0),
        truncate=bool(data.get("truncate", True)),
    )


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**steps
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, theta, head_dim, scaling)
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    return plain


def magnitude(scaling: RopeScaling) -> float:
    """What cos and sin are multiplied with; 1 but for YaRN."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


class Rope:
    """The rotation of one model: `angles` once per step, `rotate` in every layer."""

    def __init__(self, theta: float, head_dim: int, scaling: RopeScaling) -> None:
        self._frequencies = inverse_frequencies(theta, head_dim, scaling)
        self._magnitude = magnitude(scaling)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int [n] -> cos, sin: float32 [n, 1, head_dim / 2]."""
        angles = (positions.float()[:, None] * self._frequencies)[:, None]
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: [n, heads, head_dim] -> the same turned by its position's angles, contiguous."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = scaling.original_len * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    keep = keep.clamp(0.0, 1.0)
    return plain * keep + plain / scaling.factor * (1 - keep)


def _yarn(plain: torch.Tensor, theta: float, head_dim: int, scaling: RopeScaling) -> torch.Tensor:
    """As llama3's, but the blend is linear in the frequency's index."""

    def index_of(turns: float) -> float:
        wave = scaling.original_len / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * stretch + plain * (1 - stretch)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
