"""What runs of the GGUF operations gave, and what the oracle says of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference import fused_linear
from mla_conformance.reference.absorption import split_kv_b
from mla_conformance.reference.gguf import FORMATS, dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.gguf_layer_cases import KvBCase, LinearCase, NamesCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.outcomes import in_place
from mla_conformance.suites.harness.problems import GGUFLinearProblem
from mla_conformance.suites.harness.record import Record

CODES = {
    "Q4_0": slice(2, 18),
    "Q4_1": slice(4, 20),
    "Q5_0": slice(2, 22),
    "Q5_1": slice(4, 24),
    "Q2_K": slice(16, 80),
    "Q4_K": slice(16, 144),
    "Q5_K": slice(16, 176),
}
"""Bytes of a block that hold the integers q, for types with a constant part beside ``d q`` (ggml-common.h)."""
REFUSALS = (ValueError, TypeError, KeyError, NotImplementedError)
"""What tells a caller that the input is wrong; an assertion or an attribute error tells of the code."""


@dataclass
class DequantizeOutcome:
    """``out`` [rows, columns] in the problem's dtype."""

    case: DequantizeCase
    out: Tensor
    record: Record

    def expected(self) -> Tensor:
        """The reference's float32 values, rounded once to the problem's dtype."""
        values = dequantize(self.case.data, self.case.problem.quant)
        return values.to(self.case.out.dtype)


@dataclass
class ProductOutcome:
    """``out`` [tokens, rows] of a product with a weight [rows, columns], in float64 before any rounding."""

    x: Tensor
    out: Tensor
    arithmetic: MatmulArithmetic
    record: Record

    def weight(self) -> Tensor:
        """The exact dequantised weight, float64 [rows, columns]."""
        raise NotImplementedError

    def weight_parts(self) -> Tensor | None:
        """Magnitudes of the parts that each weight is the sum of, as ``matmul_bound`` takes them."""
        return None


@dataclass
class MatmulOutcome(ProductOutcome):
    """A product with one quantised matrix."""

    case: MatmulCase

    def weight(self) -> Tensor:
        """The exact dequantised weight, float64 [rows, columns]."""
        return dequantize(self.case.data, self.case.problem.quant).double()

    def weight_parts(self) -> Tensor | None:
        """``|d q| + |m|`` for types whose weight is ``d q + m``: m is what is left where every q is zero."""
        quant = self.case.problem.quant
        if quant not in CODES:
            return None
        form, data = FORMATS[quant], self.case.data.clone()
        blocks = data.view(len(data), data.shape[1] // form.block_bytes, form.block_bytes)
        blocks[..., CODES[quant]] = 0
        minimum = dequantize(data, quant).double()
        return (self.weight() - minimum).abs() + minimum.abs()


@dataclass
class LinearOutcome(ProductOutcome):
    """A forward of one rank of a layer."""

    case: LinearCase

    def weight(self) -> Tensor:
        """The rank's part of the fused weight, float64 [local rows, local columns]."""
        problem = self.case.problem
        kinds = [quant for quant, _ in problem.shards]
        whole = [dequantize(data, quant).double() for data, quant in zip(self.case.shards, kinds, strict=True)]
        return local_weight(problem, whole)


@dataclass
class KvBOutcome:
    """``w_uk`` [heads, nope, latent] and ``w_uv`` [heads, latent, v] in the problem's dtype."""

    case: KvBCase
    w_uk: Tensor
    w_uv: Tensor
    record: Record

    def expected(self) -> tuple[Tensor, Tensor]:
        """Both by definition."""
        return absorbed_weights(self.case)


@dataclass
class NamesOutcome:
    """``fills``: the checkpoint's parameters that each tensor of the file fills, by the tensor's name."""

    case: NamesCase
    fills: dict[str, list[str]]
    record: Record


def local_weight(problem: GGUFLinearProblem, whole: list[Tensor]) -> Tensor:
    """The part of the fused weight that the problem's rank owns: [local rows, local columns].

    Args:
        problem: which layer, how many ranks, and which of them.
        whole: dequantised shards [rows, columns] of the whole model, in the layer's own order.
    """
    degree, rank = problem.degree, problem.rank
    if problem.layer == "row":
        return fused_linear.fuse([fused_linear.slice_columns(shard, rank, degree) for shard in whole])
    if problem.layer != "qkv":
        return fused_linear.fuse([fused_linear.slice_rows(shard, rank, degree) for shard in whole])
    heads = [rows // problem.head_dim for _, rows in problem.shards]
    return fused_linear.fuse(
        [
            fused_linear.slice_heads(shard, rank, degree, count, problem.head_dim)
            for shard, count in zip(whole, heads, strict=True)
        ]
    )


def absorbed_weights(case: KvBCase) -> tuple[Tensor, Tensor]:
    """``W_UK`` and ``W_UV`` by definition: per head the rows of kv_b, nope first; rounded once."""
    problem, tensors = case.problem, case.tensors
    if problem.form == "fused":
        kv_b = dequantize(tensors[0], problem.quants[0])
    else:
        k_b, v_b = (dequantize(data, quant) for data, quant in zip(tensors, problem.quants, strict=True))
        kv_b = fused_linear.kv_b_from_split(k_b, v_b)
    w_uk, w_uv = split_kv_b(kv_b, problem.heads, problem.qk_nope_head_dim, problem.v_head_dim)
    dtype = getattr(torch, problem.dtype)
    return w_uk.to(dtype), w_uv.transpose(1, 2).to(dtype)


def dequantize_outcome(
    case: DequantizeCase, returned: Tensor, implementation: Implementation, record: Record
) -> DequantizeOutcome:
    """Take what the implementation returned; it must be the caller's buffer."""
    in_place(returned, case.out)
    return DequantizeOutcome(case, returned, record)


def matmul_outcome(case: MatmulCase, returned: Tensor, implementation: Implementation, record: Record) -> MatmulOutcome:
    """Take what the implementation returned; it must be the caller's buffer."""
    in_place(returned, case.out)
    return MatmulOutcome(case.x, returned, implementation.matmul_arithmetic(case.problem), record, case)


def linear_outcome(case: LinearCase, returned: Tensor, implementation: Implementation, record: Record) -> LinearOutcome:
    """Take what the forward returned."""
    return LinearOutcome(case.x, returned, implementation.matmul_arithmetic(case.problem), record, case)


def kv_b_outcome(
    case: KvBCase, returned: tuple[Tensor, Tensor], implementation: Implementation, record: Record
) -> KvBOutcome:
    """Take what the implementation returned."""
    return KvBOutcome(case, *returned, record)


def map_names(implementation: Implementation, case: NamesCase) -> dict[str, list[str]]:
    """Ask for the map.

    Raises:
        Mismatch: the implementation raised, although the file is a right one.
    """
    try:
        return implementation.gguf_names(case)
    except (Unsupported, NoResult, Mismatch):
        raise
    except Exception as error:
        words = str(error)
        raise Mismatch(f"mapping names raised {type(error).__name__}: {words[:300]}") from error


def names_outcome(
    case: NamesCase, returned: dict[str, list[str]], implementation: Implementation, record: Record
) -> NamesOutcome:
    """Take what the implementation returned."""
    return NamesOutcome(case, returned, record)


def load_and_run(implementation: Implementation, case: LinearCase) -> Tensor:
    """Load the layer and run it once.

    Raises:
        Mismatch: loading raised, although there is nothing wrong with the problem.
    """
    try:
        forward = implementation.gguf_linear(case)
    except (Unsupported, NoResult, Mismatch):
        raise
    except Exception as error:
        raise Mismatch(f"loading raised {type(error).__name__}: {error}") from error
    return forward(case.x)


def refusal(implementation: Implementation, case: LinearCase) -> str:
    """Return the words in which ``implementation`` refuses to load ``case``.

    Raises:
        Mismatch: it does not, or it fails with an error that tells of its own code.
    """
    try:
        implementation.gguf_linear(case)
    except (Unsupported, NoResult, Mismatch):
        raise
    except REFUSALS as error:
        return str(error)
    except Exception as error:
        raise Mismatch(f"failed with {type(error).__name__} in place of a refusal: {error}") from error
    raise Mismatch("was loaded without an error")
