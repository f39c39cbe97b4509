"""Rows go into pages and come out again, and nothing else is touched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.paged_cache import build, gather, scatter, split_latent

FAST = settings(derandomize=True, deadline=None, max_examples=100)


@FAST
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    page_size=st.integers(1, 17),
    spare_pages=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_survive_the_round_trip_through_shuffled_pages(
    lengths: list[int], page_size: int, spare_pages: int, seed: int
) -> None:
    """Each request reads back its own rows, and exactly the other slots still hold the fill."""
    rng = torch.Generator().manual_seed(seed)
    max_pages = max(1, *(-(-n // page_size) for n in lengths))
    num_pages = len(lengths) * max_pages + spare_pages
    block_table = torch.randperm(num_pages, generator=rng)[: len(lengths) * max_pages].reshape(-1, max_pages)
    rows = [torch.randn(n, 6, generator=rng, dtype=torch.float64) for n in lengths]

    kv_cache = build(rows, block_table, num_pages=num_pages, page_size=page_size, fill=math.nan)

    for request, expected in enumerate(rows):
        assert torch.equal(gather(kv_cache, block_table[request], expected.shape[0]), expected)
    assert int((~kv_cache.isnan()).sum()) == 6 * sum(lengths)


def test_token_position_is_page_times_size_plus_slot() -> None:
    """Token 7 with pages of 3 lies in the third listed page at slot 1, by hand."""
    kv_cache = torch.arange(5 * 3 * 2, dtype=torch.float64).reshape(5, 3, 2)

    rows = gather(kv_cache, torch.tensor([4, 0, 2]), 8)

    assert torch.equal(rows[7], kv_cache[2, 1])
    assert torch.equal(rows[0], kv_cache[4, 0])


def test_gather_returns_a_copy() -> None:
    """Writing to gathered rows leaves the cache as it is."""
    kv_cache = torch.zeros(2, 4, 3)

    gather(kv_cache, torch.tensor([1, 0]), 8).fill_(1.0)

    assert not kv_cache.any()


@pytest.mark.parametrize("wrong_page", [-1, 3, 2**40])
def test_a_page_out_of_range_is_named(wrong_page: int) -> None:
    """A page number in use that the cache does not have raises; the same number past the length does not."""
    kv_cache = torch.zeros(3, 4, 2)
    row = torch.tensor([2, wrong_page])

    with pytest.raises(ValueError, match=f"page {wrong_page};"):
        gather(kv_cache, row, 5)
    with pytest.raises(ValueError, match=f"page {wrong_page};"):
        scatter(kv_cache, row, torch.ones(5, 2))
    assert gather(kv_cache, row, 4).shape == (4, 2)


@pytest.mark.parametrize("seq_len", [-1, 9])
def test_a_length_that_does_not_fit_is_refused(seq_len: int) -> None:
    """A negative length and one longer than the listed pages raise."""
    with pytest.raises(ValueError, match=f"seq_len is {seq_len}"):
        gather(torch.zeros(3, 4, 2), torch.tensor([0, 1]), seq_len)


def test_build_refuses_a_page_that_two_requests_use() -> None:
    """A page named twice would let one request overwrite another, so it raises."""
    rows = [torch.zeros(3, 2), torch.ones(3, 2)]

    with pytest.raises(ValueError, match="twice"):
        build(rows, torch.tensor([[1], [1]]), num_pages=4, page_size=4)


def test_scatter_refuses_to_round() -> None:
    """Rows of another dtype or width than the cache raise."""
    kv_cache = torch.zeros(2, 4, 3)

    with pytest.raises(ValueError, match="rows"):
        scatter(kv_cache, torch.tensor([0]), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="rows"):
        scatter(kv_cache, torch.tensor([0]), torch.zeros(2, 4))


def test_latent_comes_first_in_a_row() -> None:
    """The first kv_lora_rank numbers are the latent, the rest the key, which may have width 0."""
    row = torch.arange(5.0)[None]

    ckv, kpe = split_latent(row, 3)

    assert ckv.tolist() == [[0.0, 1.0, 2.0]]
    assert kpe.tolist() == [[3.0, 4.0]]
    assert split_latent(row, 5)[1].shape == (1, 0)
    with pytest.raises(ValueError, match="kv_lora_rank is 6"):
        split_latent(row, 6)
