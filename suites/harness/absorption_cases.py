"""Cases of the products with one matrix a head: tokens, matrices and an output in poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.cache_cases import FAR_MARGIN
from mla_conformance.suites.harness.problems.absorption import HeadsProductProblem, VUpProjProblem

FAR_STRIDE = 2**30 + 24
"""Elements between tokens, and between matrices, of the ``far`` layout: the third lies past a signed 32-bit offset."""
OTHER_ROWS = 7
"""Rows of the other kind that a head has in a ``kv_b_rows`` weight."""
PEAK = 153_600.0
"""What a sum of ``beyond_float16`` would reach if all its terms had one sign; half of it is passed on the way."""
NAN_AT = (1, 0, 0)
"""Token, head and element that is NaN in ``one_nan``."""


class _Plan(NamedTuple):
    """Strides of tokens, of the result, and what lies before and behind the result."""

    x: tuple[int, int, int]
    out: tuple[int, int, int]
    margin: int = 64


@dataclass
class HeadsProductCase:
    """The tensors of one product.

    Attributes:
        x: [tokens, heads, inner], any strides but the last: queries or latent outputs.
        weight: [heads, inner, width], one of the last two strides 1: ``W_UK`` or ``W_UV``.
        out: [tokens, heads, width], or [tokens, heads * width] where the problem's ``layout`` says rows; poisoned,
            written by the implementation.
    """

    problem: HeadsProductProblem
    x: Tensor
    weight: Tensor
    out: Tensor
    buffers: list[Buffer]

    @property
    def result(self) -> Tensor:
        """``out`` as [tokens, heads, width]."""
        return self.out.view(self.problem.tokens, self.problem.heads, self.problem.width)


def build(problem: HeadsProductProblem, device: torch.device | str = "cpu") -> HeadsProductCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    rows, matrices = _draw(problem)
    plan = _plan(problem)
    far = problem.layout == "far"
    x = _buffer("x", rows.shape, plan.x, problem, far=far)
    x.view.copy_(rows)
    weight = _buffer("weight", matrices.shape, _weight_strides(problem), problem, far=far)
    weight.view.copy_(matrices)
    shape = (problem.tokens, problem.heads, problem.width)
    out = _buffer("out", shape, plan.out, problem, far=far, margin=plan.margin)
    out.writable = True

    buffers = [buffer.to(torch.device(device)) for buffer in (x, weight, out)]
    # What lies far apart is address space, too large to compare byte by byte.
    guarded = [] if far else buffers
    for buffer in guarded:
        buffer.guard()
    views = {buffer.name: buffer.view for buffer in buffers}
    if isinstance(problem, VUpProjProblem) and problem.layout in ("dense", "rows", "far"):
        # As the layer above wants it: one row for each token.
        row = problem.heads * problem.width
        views["out"] = views["out"].as_strided((problem.tokens, row), (plan.out[0], 1))
    return HeadsProductCase(problem=problem, buffers=guarded, **views)


def _draw(problem: HeadsProductProblem) -> tuple[Tensor, Tensor]:
    """Draw the tokens [tokens, heads, inner] and the matrices [heads, inner, width], in their final dtype."""
    generator = torch.Generator().manual_seed(problem.seed)
    tokens, heads, inner, width = problem.tokens, problem.heads, problem.inner, problem.width
    rows = torch.randn(tokens, heads, inner, dtype=torch.float64, generator=generator)
    matrices = torch.randn(heads, inner, width, dtype=torch.float64, generator=generator)
    if problem.values == "beyond_float16":
        half = inner // 2 - 1
        large = (PEAK / inner) ** 0.5
        rows, matrices = rows * 30, matrices * 30
        rows[..., :half], rows[..., half : 2 * half] = large, -large
        matrices[:, : 2 * half] = large
    if problem.values == "one_nan":
        rows[NAN_AT] = torch.nan
    dtype = getattr(torch, problem.dtype)
    return rows.to(dtype), matrices.to(dtype)


def _plan(problem: HeadsProductProblem) -> _Plan:
    tokens, heads, inner, width = problem.tokens, problem.heads, problem.inner, problem.width
    dense_x, dense_out = (heads * inner, inner, 1), (heads * width, width, 1)
    if problem.layout == "gapped":
        return _Plan((heads * (inner + 5) + 7, inner + 5, 1), (heads * (width + 3) + 11, width + 3, 1))
    if problem.layout == "rows":
        # Rows behind the last one belong to padding.
        row = heads * width + 13
        return _Plan(dense_x, (row, width, 1), margin=2 * row + 5)
    if problem.layout == "head_major":
        return _Plan((inner, tokens * inner, 1), (width, tokens * width, 1))
    if problem.layout == "far":
        return _Plan((FAR_STRIDE, inner, 1), (FAR_STRIDE, width, 1))
    return _Plan(dense_x, dense_out)


def _weight_strides(problem: HeadsProductProblem) -> tuple[int, int, int]:
    inner, width, latent = problem.inner, problem.width, problem.kv_lora_rank
    head = FAR_STRIDE if problem.layout == "far" else inner * width
    if problem.weight_layout == "dense":
        return head, width, 1
    if problem.weight_layout == "transposed":
        return head, 1, inner
    # Rows of kv_b_proj hold latents, and those of a head's other kind lie between.
    head = max(head, (problem.head_dim + OTHER_ROWS) * latent)
    return (head, 1, latent) if isinstance(problem, VUpProjProblem) else (head, latent, 1)


def _buffer(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    problem: HeadsProductProblem,
    *,
    far: bool,
    margin: int = 64,
) -> Buffer:
    dtype = getattr(torch, problem.dtype)
    if far:
        return Buffer.reserve(name, tuple(shape), strides, dtype, FAR_MARGIN)
    fill = poison_value(dtype, problem.poison)
    return Buffer.allocate(name, tuple(shape), strides, dtype, fill=fill, margin=margin)
