"""kv_b_proj is cut head by head, keys before values, and absorbing it is plain linear algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.absorption import absorb_query, project_output, split_kv_b

FAST = settings(derandomize=True, deadline=None, max_examples=50)


def test_rows_go_head_by_head_keys_first() -> None:
    """With 3 heads of 4 + 5 rows every row lands where its number says (ggml-org/llama.cpp#13094)."""
    weight = torch.arange(27.0)[:, None].expand(27, 8)

    w_uk, w_uv = split_kv_b(weight, num_heads=3, qk_nope_head_dim=4, v_head_dim=5)

    assert w_uk.shape == (3, 4, 8)
    assert w_uv.shape == (3, 5, 8)
    assert w_uk[..., 0].tolist() == [[0, 1, 2, 3], [9, 10, 11, 12], [18, 19, 20, 21]]
    assert w_uv[..., 0].tolist() == [[4, 5, 6, 7, 8], [13, 14, 15, 16, 17], [22, 23, 24, 25, 26]]


@FAST
@given(
    heads=st.integers(1, 8),
    nope=st.integers(1, 16),
    v=st.integers(1, 16),
    latent=st.integers(4, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_absorbed_score_is_the_score_of_the_rebuilt_key(heads: int, nope: int, v: int, latent: int, seed: int) -> None:
    """Per head, q . (W_UK c) = (q W_UK) . c, and the projected latent is W_UV c."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads * (nope + v), latent, generator=rng, dtype=torch.float64)
    query = torch.randn(heads, nope, generator=rng, dtype=torch.float64)
    row = torch.randn(latent, generator=rng, dtype=torch.float64)
    per_head = [(weight @ row)[h * (nope + v) : (h + 1) * (nope + v)] for h in range(heads)]

    w_uk, w_uv = split_kv_b(weight, heads, nope, v)
    scores = absorb_query(query, w_uk) @ row
    values = project_output(row.expand(heads, -1), w_uv)

    # Each side passes at most nope + latent roundings: it is off by that many 2^-53 of the magnitudes summed.
    unit = 2 * (nope + latent) * 2.0**-53
    score_bound = unit * absorb_query(query.abs(), w_uk.abs()) @ row.abs()
    value_bound = unit * project_output(row.abs().expand(heads, -1), w_uv.abs())
    for head, rebuilt in enumerate(per_head):
        assert (scores[head] - query[head] @ rebuilt[:nope]).abs() <= score_bound[head]
        assert ((values[head] - rebuilt[nope:]).abs() <= value_bound[head]).all()


def test_a_weight_of_the_wrong_height_is_refused() -> None:
    """Sizes that do not multiply to the number of rows raise an error that gives both."""
    with pytest.raises(ValueError, match=r"\[27, 8\].*\[24, any\]"):
        split_kv_b(torch.zeros(27, 8), num_heads=3, qk_nope_head_dim=4, v_head_dim=4)
