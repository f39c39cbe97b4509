"""Fused projections and their slices equal loops written out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.absorption import split_kv_b
from mla_conformance.reference.fused_linear import (
    fuse,
    kv_b_from_split,
    linear,
    slice_columns,
    slice_heads,
    slice_rows,
    split_from_kv_b,
)


def numbered(*shape: int, start: int = 0) -> Tensor:
    """Return a tensor whose numbers are all different, so that any two mixed up are noticed."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def test_fuse_keeps_declared_order() -> None:
    """Each row of the fused weight is the next row of the shards as declared."""
    shards = [numbered(3, 4), numbered(1, 4, start=100), numbered(2, 4, start=200)]

    fused = fuse(shards)

    assert fused.tolist() == [row for shard in shards for row in shard.tolist()]
    assert all(not torch.equal(fuse(list(other)), fused) for other in list(itertools.permutations(shards))[1:])


def test_fused_output_is_the_shards_outputs_side_by_side() -> None:
    """A fused projection gives what its shards give, in declared order."""
    x, shards = numbered(2, 5), [numbered(3, 5), numbered(4, 5, start=50)]

    fused = linear(x, fuse(shards))

    assert torch.equal(fused, torch.cat([linear(x, shard) for shard in shards], dim=1))


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_slices_are_the_rows_and_columns_of_a_loop(degree: int) -> None:
    """Rank r owns the r-th of equal runs of rows or columns, and the ranks together own everything once."""
    weight = numbered(6, 12)
    for rank in range(degree):
        rows = [r for r in range(6) if r // (6 // degree) == rank]
        columns = [c for c in range(12) if c // (12 // degree) == rank]

        assert slice_rows(weight, rank, degree).tolist() == [weight[r].tolist() for r in rows]
        assert slice_columns(weight, rank, degree).tolist() == [[weight[r, c] for c in columns] for r in range(6)]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_row_parallel_outputs_add_up(degree: int) -> None:
    """The ranks' products with their columns sum to the whole product."""
    x, weight = numbered(3, 8), numbered(5, 8)

    parts = [linear(slice_columns(x, rank, degree), slice_columns(weight, rank, degree)) for rank in range(degree)]

    assert torch.equal(torch.stack(parts).sum(dim=0), linear(x, weight))


@pytest.mark.parametrize(
    ("heads", "degree", "owned"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_heads_are_shared_out_or_copied(heads: int, degree: int, owned: list[list[int]]) -> None:
    """A rank owns whole heads: its share of many, or a copy of one where there are fewer than ranks."""
    weight = numbered(heads * 3, 5)

    for rank, expected in enumerate(owned):
        rows = [weight[head * 3 + row].tolist() for head in expected for row in range(3)]
        assert slice_heads(weight, rank, degree, heads, 3).tolist() == rows


def test_linear_equals_a_loop_in_float64() -> None:
    """Products are summed in float64, where float32 would lose the small one."""
    x = torch.tensor([[1.0, 2.0**-30], [3.0, 4.0]], dtype=torch.float32)
    weight = torch.tensor([[1.0, 1.0], [2.0, 0.5], [-1.0, 8.0]], dtype=torch.float32)

    result = linear(x, weight)

    assert result.dtype == torch.float64
    for row, out in itertools.product(range(2), range(3)):
        assert result[row, out] == sum(float(x[row, c]) * float(weight[out, c]) for c in range(2))


def test_kv_b_is_rebuilt_head_by_head_keys_first() -> None:
    """Every number of kv_b comes from the place in k_b or v_b that a loop names."""
    heads, latent, nope, v = 3, 5, 2, 4
    k_b, v_b = numbered(heads, latent, nope), numbered(heads, v, latent, start=1000)

    kv_b = kv_b_from_split(k_b, v_b)

    for head, row, column in itertools.product(range(heads), range(nope + v), range(latent)):
        expected = k_b[head, column, row] if row < nope else v_b[head, row - nope, column]
        assert kv_b[head * (nope + v) + row, column] == expected


def test_split_and_absorption_agree_on_kv_b() -> None:
    """Splitting undoes the rebuilding, and absorption takes the same key and value parts from it."""
    k_b, v_b = numbered(3, 5, 2), numbered(3, 4, 5, start=1000)
    kv_b = kv_b_from_split(k_b, v_b)

    again_k, again_v = split_from_kv_b(kv_b, 3, 2, 4)
    w_uk, w_uv = split_kv_b(kv_b, 3, 2, 4)

    assert torch.equal(again_k, k_b)
    assert torch.equal(again_v, v_b)
    assert torch.equal(w_uk, k_b.transpose(1, 2))
    assert torch.equal(w_uv, v_b)


def test_misfits_are_named() -> None:
    """Shapes, ranks and degrees that do not fit raise an error that says which."""
    weight = numbered(6, 4)

    with pytest.raises(ValueError, match="shards is empty"):
        fuse([])
    with pytest.raises(ValueError, match=r"shards\[1\] has shape \[2, 5\]"):
        fuse([weight, numbered(2, 5)])
    with pytest.raises(ValueError, match="degree 4 does not divide dimension 0"):
        slice_rows(weight, 0, 4)
    with pytest.raises(ValueError, match="degree 3 does not divide dimension 1"):
        slice_columns(weight, 0, 3)
    for rank, degree in [(2, 2), (-1, 2), (0, 0)]:
        with pytest.raises(ValueError, match=f"rank is {rank} and degree {degree}"):
            slice_rows(weight, rank, degree)
    with pytest.raises(ValueError, match="weight has 6 rows; 2 heads of 4"):
        slice_heads(weight, 0, 2, 2, 4)
    with pytest.raises(ValueError, match="3 heads cannot be shared out to degree 2"):
        slice_heads(weight, 0, 2, 3, 2)
    with pytest.raises(ValueError, match="degree is 4, no multiple of 3 heads"):
        slice_heads(weight, 0, 4, 3, 2)
    with pytest.raises(ValueError, match="rank is 6 and degree 6"):
        slice_heads(weight, 6, 6, 3, 2)
    with pytest.raises(ValueError, match="x has 3 columns and weight has 4"):
        linear(numbered(2, 3), weight)
    with pytest.raises(ValueError, match=r"k_b has shape \[2, 5, 3\]"):
        kv_b_from_split(numbered(2, 5, 3), numbered(2, 4, 6))
    with pytest.raises(ValueError, match=r"kv_b_weight has shape \[6, 4\]"):
        split_from_kv_b(weight, 2, 1, 1)
