"""Rotary position embedding with both pairings in use, and YaRN's frequencies (arXiv 2309.00071).

Convention of this module: `x` is [..., tokens, heads, dim] and `positions` is [..., tokens]; a key shared by
all heads has heads = 1. Frequency i turns one pair of dimensions. The first 2 * len(inv_freq) dimensions are
rotated, and the others are returned as they are (partial rotary, as in DeepSeek's indexer).

Which two dimensions form a pair differs between components of one model (sgl-project/sglang#13495), so the
two pairings are two functions and there is no default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_conformance.reference.softmax_scale import YarnScaling


def rope_frequencies(dim: int, theta: float, yarn: YarnScaling | None = None) -> Tensor:
    """Return the angle in radians that each pair turns per position, [dim / 2] in float64.

    Args:
        dim: number of rotated dimensions, even; 0 is allowed and gives an empty tensor.
        theta: base of the geometric series (`rope_theta`).
        yarn: blends each frequency with the same frequency divided by `factor`, along a ramp over the pairs.

    Raises:
        ValueError: if `dim` is odd or negative, or `theta` is not above 1.

    """
    if dim < 0 or dim % 2 != 0:
        raise ValueError(f"dim is {dim}; it must be even and not negative")
    if theta <= 1:
        raise ValueError(f"theta is {theta}; it must be above 1")
    pair = torch.arange(dim // 2, dtype=torch.float64)
    inv_freq = theta ** (-2.0 * pair / dim) if dim > 0 else pair
    if yarn is None:
        return inv_freq
    slowed_share = _slowed_share(pair, dim, theta, yarn)
    return inv_freq * (1.0 - slowed_share) + inv_freq / yarn.factor * slowed_share


def rotate_interleaved(x: Tensor, positions: Tensor, inv_freq: Tensor, magnitude: float = 1.0) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension, every number staying in its place.

    Args:
        x: [..., tokens, heads, dim], floating.
        positions: [..., tokens], integers.
        inv_freq: [rotated / 2] from `rope_frequencies`; dim may exceed the rotated width.
        magnitude: factor on cos and sin, from `softmax_scale.rope_magnitude`.

    Returns:
        As `x`, a new tensor. Some programs move the pairs apart while rotating ([evens | odds]); scores are
        the same either way as long as query and key agree, the stored cache is not.

    Raises:
        ValueError: if `x` is narrower than the rotated width.

    """
    cos, sin = _cos_sin(x, positions, inv_freq, magnitude)
    rotated = 2 * inv_freq.shape[0]
    out = x.clone()
    first, second = x[..., 0:rotated:2], x[..., 1:rotated:2]
    out[..., 0:rotated:2] = first * cos - second * sin
    out[..., 1:rotated:2] = second * cos + first * sin
    return out


def rotate_half_split(x: Tensor, positions: Tensor, inv_freq: Tensor, magnitude: float = 1.0) -> Tensor:
    """Rotate the pairs (0, n), (1, n + 1), ... where n is half the rotated width (the NeoX pairing).

    Arguments, result and errors as `rotate_interleaved`.
    """
    cos, sin = _cos_sin(x, positions, inv_freq, magnitude)
    half = inv_freq.shape[0]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _cos_sin(x: Tensor, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin as [..., tokens, 1, pairs] in the dtype of x, from angles computed in float64."""
    if x.dim() < 3 or x.shape[-1] < 2 * inv_freq.shape[0]:
        raise ValueError(
            f"x has shape {list(x.shape)}; expected [..., tokens, heads, dim] with dim at least {2 * inv_freq.shape[0]}"
        )
    angle = (positions.to(torch.float64)[..., None] * inv_freq.to(torch.float64))[..., None, :]
    return (torch.cos(angle) * magnitude).to(x.dtype), (torch.sin(angle) * magnitude).to(x.dtype)


def _slowed_share(pair: Tensor, dim: int, theta: float, yarn: YarnScaling) -> Tensor:
    """Return how far each pair is slowed: 0 keeps its frequency, 1 divides it by the factor."""

    def pair_with_turns(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    # DeepSeek's bounds: whole pairs, clamped to dim - 1 although there are only dim / 2 pairs.
    low = max(math.floor(pair_with_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(yarn.beta_slow)), dim - 1)
    # A ramp without length is a step; the small width only avoids the division by zero.
    width = high - low if high != low else 0.001
    return torch.clamp((pair - low) / width, 0.0, 1.0)
