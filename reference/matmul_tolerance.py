"""How far ``x @ W.T`` with a quantised W may be from float64: derived from the declared arithmetic and the inputs.

An implementation declares which numbers it rounds (:class:`MatmulArithmetic`); :func:`matmul_bound` turns that and the
*inputs* into a bound for every element, term by term. With K columns, u the unit roundoff of a dtype and
``P[t, n] = sum_k |x[t, k] W[n, k]|``:

``weights``      one rounding to nearest of each decoded weight. It is a function of the weight, so its effect is
                 computed, ``|x (round(W) - W).T|``, and not bounded. A bound that takes roundings for independent would
                 be wrong here (a block holds few different values, and equal values round alike), one that adds them
                 by magnitude would hide errors of a percent.
``activations``  the same for x if it is rounded to a dtype, with the rounded weights. For ``q8_1`` see below.
``accumulate``   a float32 sum of K products, in any order and any grouping. Each of the K - 1 additions is off by at
                 most u32 times its own result, which is at most P. As random errors they reach
                 ``LAMBDA sqrt(K) u32 P`` (Hoeffding's inequality), and never ``K u32 P``, the classical bound
                 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). A product that is rounded before
                 it is added costs u32 P more. Tensor cores truncate instead, always towards zero, to at least float32,
                 once in every 8 products or more (Fasi, Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330):
                 ``K/8`` steps of ``2 u32 P``, counted where a 16-bit dtype is declared.
``underflow``    products that are subnormal in float32 may become zero: ``K 2**-126``, if x and W are not zero.
``output``       one rounding of the sum: u of its magnitude, plus half the smallest subnormal number of float16.

Activations as 8-bit integers, ``q8_1`` (ggml: quantize_q8_1, block_q8_1; llama.cpp's mmvq and mmq)
    Of 32 activations with the largest magnitude a, each becomes ``q d`` with ``d = a / 127`` and q an integer: off by
    at most d/2. These errors are independent, so over a row they reach ``LAMBDA sqrt(sum_k (d/2)^2 W^2)``, and never
    the sum of their magnitudes. Then d is rounded to float16, which all 32 share, as is the sum of the 32 that a
    minimum is multiplied with: u16 times the block's magnitude, independent between blocks, and half the smallest
    float16 subnormal. The integers multiply a weight's parts and not the weight. A weight ``d q - m`` that is small
    because its parts cancel gets the error of the parts: hand in ``weight_parts = |d q| + |m|`` for types with a
    minimum.

LAMBDA is that of :mod:`tolerance`: a right element exceeds a Hoeffding part with a chance of 1.3e-9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_conformance.reference.tolerance import LAMBDA, SMALLEST_ROUNDING, UNIT_ROUNDOFF

Q8_1_BLOCK = 32
"""Activations that share one scale in ggml's block_q8_1."""

TENSOR_CORE_GROUP = 8
"""The fewest products that a tensor core of capability 8.0 or later adds between two truncations."""

_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MatmulArithmetic:
    """What an implementation declares about its roundings, by dtype name; ``float64`` means not rounded.

    Args:
        activations: what x is rounded to, or ``q8_1``: 8-bit integers with a float16 scale per 32.
        weights: what each decoded weight is rounded to, once, to nearest.
        output: dtype of the result.
        independent: False where activations of a row repeat, so that their rounding errors to ``q8_1`` do.

    Raises:
        ValueError: a name is unknown.
    """

    activations: str
    weights: str
    output: str
    independent: bool = True

    def __post_init__(self) -> None:
        for name, known in (("activations", (*_DTYPES, "q8_1")), ("weights", _DTYPES), ("output", _DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {value!r}; use one of {', '.join(known)}")


@dataclass(frozen=True)
class MatmulBound:
    """``out`` [T, N] bounds each element's absolute error; ``terms`` maps a term's name to its largest share of it."""

    out: Tensor
    terms: dict[str, float] = field(default_factory=dict)


def matmul_oracle(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float64: [T, K] and [N, K] give [T, N]."""
    return x.double() @ weight.double().T


def matmul_bound(
    x: Tensor, weight: Tensor, arithmetic: MatmulArithmetic, *, weight_parts: Tensor | None = None
) -> MatmulBound:
    """Bound the error of ``x @ weight.T`` against :func:`matmul_oracle`.

    Args:
        x: [T, K] float64, as handed to the implementation (exactly representable in its dtype).
        weight: [N, K] float64, as decoded without any rounding that the type's definition does not have.
        arithmetic: the declared roundings.
        weight_parts: [N, K] sum of the magnitudes of the parts that a weight is made of; None is ``|weight|``. Used for
            ``q8_1`` only.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or it is not after the declared rounding.
    """
    _check(x, weight, weight_parts)
    used_weight, used_x = _rounded("weight", weight, arithmetic.weights), x
    if arithmetic.activations != "q8_1":
        used_x = _rounded("x", x, arithmetic.activations)
    u32, u_out = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[arithmetic.output]
    columns, out = x.shape[1], x @ weight.T

    terms = {"weights": (x @ (used_weight - weight).T).abs()}
    if arithmetic.activations == "q8_1":
        parts = used_weight.abs() if weight_parts is None else torch.maximum(weight_parts, used_weight.abs())
        terms["activations"] = _q8_1_error(x, parts, arithmetic.independent)
        # At most the largest of its block and half a step: what the accumulation adds up.
        magnitude = (x.abs() + _steps(x) / 2) @ parts.T
    else:
        terms["activations"] = ((used_x - x) @ used_weight.T).abs()
        magnitude = used_x.abs() @ used_weight.abs().T
    random_errors = min(LAMBDA * math.sqrt(columns), columns) + 1
    used = {arithmetic.activations, arithmetic.weights, arithmetic.output}
    truncations = 2 * columns / TENSOR_CORE_GROUP if used & {"float16", "bfloat16"} else 0
    terms["accumulate"] = (random_errors + truncations) * u32 * magnitude
    terms["underflow"] = columns * torch.finfo(torch.float32).tiny * (magnitude > 0)
    before_output = torch.stack(list(terms.values())).sum(0)
    smallest = SMALLEST_ROUNDING.get(arithmetic.output, 0.0) * (magnitude > 0)
    terms["output"] = u_out * (out.abs() + before_output) + smallest

    bound = before_output + terms["output"]
    shares = {
        name: float((term / bound.clamp_min(1e-300)).max()) if bound.numel() else 0.0 for name, term in terms.items()
    }
    return MatmulBound(bound, shares)


def _steps(x: Tensor) -> Tensor:
    """The distance d between neighbouring 8-bit levels, for each element of x; the last block may be short."""
    blocks = _in_blocks(x.abs())
    return (blocks.amax(-1, keepdim=True) / 127).expand_as(blocks).flatten(-2)[:, : x.shape[1]]


def _in_blocks(values: Tensor) -> Tensor:
    """[T, K] -> [T, blocks, 32], filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % Q8_1_BLOCK))
    return padded.view(len(values), padded.shape[1] // Q8_1_BLOCK, Q8_1_BLOCK)


def _q8_1_error(x: Tensor, parts: Tensor, independent: bool) -> Tensor:
    u16, smallest = UNIT_ROUNDOFF["float16"], SMALLEST_ROUNDING["float16"]
    half_step = _steps(x) / 2
    certain = half_step @ parts.T
    random = LAMBDA * (half_step.square() @ parts.square().T).sqrt()
    levels = torch.minimum(random, certain) if independent else certain

    by_block = torch.einsum("tbk,nbk->btn", _in_blocks(x.abs() + half_step), _in_blocks(parts))
    scales = torch.minimum(LAMBDA * by_block.square().sum(0).sqrt(), by_block.sum(0)) * u16
    # A scale is multiplied with integers up to 127; below float16's normal numbers its error is absolute.
    tiny = smallest * 127 * (x.abs() > 0).double() @ parts.T
    return levels + scales + tiny


def _rounded(name: str, values: Tensor, dtype: str) -> Tensor:
    if dtype == "float64":
        return values
    # Decoded numbers are float32, so the one rounding starts there.
    rounded = values.float().to(getattr(torch, dtype)).double()
    if not rounded.isfinite().all():
        raise ValueError(f"{name} has values beyond the range of {dtype}, so no finite bound holds; use smaller values")
    return rounded


def _check(x: Tensor, weight: Tensor, weight_parts: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}; pass [T, K] and [N, K] with one K"
        )
    if weight_parts is not None and weight_parts.shape != weight.shape:
        raise ValueError(f"weight_parts has shape {list(weight_parts.shape)}; pass weight's, {list(weight.shape)}")
    for name, values in (("x", x), ("weight", weight), ("weight_parts", weight_parts)):
        if values is not None and values.dtype != torch.float64:
            raise ValueError(f"{name} has dtype {values.dtype}; pass float64")
        if values is not None and not values.isfinite().all():
            raise ValueError(f"{name} has values that are not finite, so no finite bound holds; leave them out")
