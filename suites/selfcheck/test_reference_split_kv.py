"""Splitting the cache and merging the partial states changes nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.reference.mla import DecodeResult, decode_absorbed
from mla_conformance.reference.split_kv import merge_many, merge_states, partial_states, split_bounds

FAST = settings(derandomize=True, deadline=None, max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)


def draw_state(rng: torch.Generator, lse: float) -> tuple[Tensor, Tensor]:
    """Return a state of 3 tokens and 2 heads with random values and one lse for all rows."""
    out = torch.randn(3, 2, 4, generator=rng, dtype=torch.float64)
    return out, torch.full((3, 2), lse, dtype=torch.float64)


@FAST
@given(seq_len=st.integers(0, 300), num_splits=st.integers(1, 64))
def test_splits_cover_every_token_once(seq_len: int, num_splits: int) -> None:
    """The ranges have no gap and no overlap, also with more splits than tokens."""
    bounds = split_bounds(seq_len, num_splits)

    assert len(bounds) == num_splits
    assert [t for start, end in bounds for t in range(start, end)] == list(range(seq_len))


@FAST
@given(
    heads=st.integers(1, 8),
    latent=st.integers(4, 64),
    rope=st.integers(0, 16),
    tokens=st.integers(0, 40),
    num_splits=st.integers(1, 48),
    query_size=st.sampled_from([1.0, 30.0, 1000.0]),
    seed=SEEDS,
)
def test_merged_splits_equal_the_whole(
    heads: int, latent: int, rope: int, tokens: int, num_splits: int, query_size: float, seed: int
) -> None:
    """Merging any number of splits, at once or one after the other, gives the attention over all tokens."""
    rng = torch.Generator().manual_seed(seed)
    ckv = torch.randn(tokens, latent, generator=rng, dtype=torch.float64)
    kpe = torch.randn(tokens, rope, generator=rng, dtype=torch.float64)
    q_nope = torch.randn(heads, latent, generator=rng, dtype=torch.float64) * query_size
    q_pe = torch.randn(heads, rope, generator=rng, dtype=torch.float64) * query_size
    whole = decode_absorbed(q_nope, q_pe, ckv, kpe, softmax_scale=0.25)

    parts = partial_states(q_nope, q_pe, ckv, kpe, softmax_scale=0.25, num_splits=num_splits)
    at_once = merge_many(parts.out, parts.lse)
    folded = DecodeResult(parts.out[0], parts.lse[0])
    for i in range(1, num_splits):
        folded = merge_states(folded.out, folded.lse, parts.out[i], parts.lse[i])

    # A score is a sum of at most 80 products: its error is below 80 * 2^-53 = 9e-15 of their magnitudes, and
    # up to 48 merges round an lse of that size, 5e-15 in all. Errors of probabilities are twice these, and
    # times a value in the output. All are far below 1e-12 of the magnitudes.
    magnitudes = (q_nope.abs() @ ckv.abs().T + q_pe.abs() @ kpe.abs().T) * 0.25
    bound = 1e-12 * max([1.0, *magnitudes.flatten().tolist()])
    largest_value = max([1.0, *ckv.abs().flatten().tolist()])
    for merged in (at_once, folded):
        torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=bound)
        torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=bound * largest_value)


@pytest.mark.parametrize("lse", [-1e4, 0.0, 88.0])
@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, math.inf])
def test_an_empty_side_leaves_the_other_as_it_is(lse: float, empty_lse: float, garbage: float) -> None:
    """One empty side, whichever infinity marks it and whatever it holds, returns the other side's bits."""
    out, lse_rows = draw_state(torch.Generator().manual_seed(1), lse)
    out[0, 0, 0] = -0.0
    empty_out, empty_rows = torch.full_like(out, garbage), torch.full_like(lse_rows, empty_lse)

    for merged in (
        merge_states(out, lse_rows, empty_out, empty_rows),
        merge_states(empty_out, empty_rows, out, lse_rows),
    ):
        assert torch.equal(merged.out.view(torch.int64), out.view(torch.int64))
        assert torch.equal(merged.lse, lse_rows)
    at_once = merge_many(torch.stack([empty_out, out]), torch.stack([empty_rows, lse_rows]))
    assert torch.equal(at_once.out, out)
    assert torch.equal(at_once.lse, lse_rows)


@pytest.mark.parametrize(("lse_a", "lse_b"), list(itertools.product([-math.inf, math.inf], repeat=2)), ids=str)
@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan])
def test_two_empty_sides_stay_empty(lse_a: float, lse_b: float, garbage: float) -> None:
    """Two empty sides give out 0 and lse -inf, never NaN."""
    out = torch.full((3, 2, 4), garbage, dtype=torch.float64)
    a, b = torch.full((3, 2), lse_a, dtype=torch.float64), torch.full((3, 2), lse_b, dtype=torch.float64)

    for merged in (
        merge_states(out, a, out, b),
        merge_many(torch.stack([out, out]), torch.stack([a, b])),
    ):
        assert torch.equal(merged.out, torch.zeros_like(out))
        assert torch.equal(merged.lse, torch.full_like(a, -math.inf))


@FAST
@given(lse_a=st.floats(-1e4, 1e4), gap=st.floats(-800, 800), seed=SEEDS)
def test_merge_weights_are_the_softmax_of_the_lses(lse_a: float, gap: float, seed: int) -> None:
    """Merging is commutative to the bit and weighs each side with the exponential of its lse."""
    rng = torch.Generator().manual_seed(seed)
    (out_a, rows_a), (out_b, rows_b) = draw_state(rng, lse_a), draw_state(rng, lse_a + gap)

    merged = merge_states(out_a, rows_a, out_b, rows_b)
    swapped = merge_states(out_b, rows_b, out_a, rows_a)
    weights = torch.softmax(torch.stack([rows_a, rows_b]), dim=0)

    assert torch.equal(merged.out, swapped.out)
    assert torch.equal(merged.lse, swapped.lse)
    expected = weights[0, ..., None] * out_a + weights[1, ..., None] * out_b
    torch.testing.assert_close(merged.out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        merged.lse, torch.logsumexp(torch.stack([rows_a, rows_b]), dim=0), rtol=1e-15, atol=1e-12
    )


def test_rows_are_merged_independently() -> None:
    """Empty and full rows of one call do not touch each other, with as many tokens as heads."""
    rng = torch.Generator().manual_seed(3)
    out_a, out_b = (torch.randn(5, 5, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    lse_a[1, 3], lse_b[3, 1], lse_a[2, 2], lse_b[2, 2] = -math.inf, math.inf, -math.inf, -math.inf

    merged = merge_states(out_a, lse_a, out_b, lse_b)

    for row in itertools.product(range(5), repeat=2):
        alone = merge_states(out_a[row], lse_a[row], out_b[row], lse_b[row])
        torch.testing.assert_close(merged.out[row], alone.out, rtol=1e-14, atol=0)
        torch.testing.assert_close(merged.lse[row], alone.lse, rtol=1e-14, atol=1e-14)


def test_shapes_that_do_not_fit_raise() -> None:
    """An lse laid out as [heads, tokens] and an empty list of states are refused."""
    out, lse = torch.zeros(3, 2, 4), torch.zeros(3, 2)

    with pytest.raises(ValueError, match="lse_a"):
        merge_states(out, lse.T, out, lse.T)
    with pytest.raises(ValueError, match="at least one state"):
        merge_many(out[:0], lse[:0])
    with pytest.raises(ValueError, match="num_splits"):
        split_bounds(5, 0)
