"""The prefill oracle agrees with decode token by token, and with itself in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.mla import decode_expanded
from mla_conformance.reference.prefill import prefill, prefill_ragged, visibility
from mla_conformance.reference.split_kv import merge_states

HEADS, NOPE, ROPE, V, LATENT = 3, 8, 4, 6, 10
SCALE = 0.3


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 9), (4, 9), (6, 4), (3, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_query_equals_a_decode_over_the_keys_that_it_sees(queries: int, keys: int, causal: bool) -> None:
    """The decode writes keys and values out head by head from a latent, and shares no code with prefill; to 1e-12."""
    latent, k_pe = draw(keys, LATENT), draw(keys, ROPE, seed=1)
    w_uk, w_uv = draw(HEADS, NOPE, LATENT, seed=2), draw(HEADS, V, LATENT, seed=3)
    q_nope, q_pe = draw(queries, HEADS, NOPE, seed=4), draw(queries, HEADS, ROPE, seed=5)
    k_nope, v = torch.einsum("tl,hdl->thd", latent, w_uk), torch.einsum("tl,hdl->thd", latent, w_uv)

    result = prefill(q_nope, q_pe, k_nope, k_pe, v, softmax_scale=SCALE, causal=causal)

    for j in range(queries):
        seen = max(0, keys - queries + j + 1) if causal else keys
        single = decode_expanded(q_nope[j], q_pe[j], latent[:seen], k_pe[:seen], w_uk, w_uv, softmax_scale=SCALE)
        torch.testing.assert_close(result.out[j], single.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.lse[j], single.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 4, 6])
def test_context_and_new_tokens_merge_to_the_whole(cut: int) -> None:
    """The context without a mask, the new tokens with one."""
    queries, keys = 3, 9
    q_nope, q_pe = draw(queries, HEADS, NOPE), draw(queries, HEADS, ROPE, seed=1)
    k_nope, k_pe, v = draw(keys, HEADS, NOPE, seed=2), draw(keys, ROPE, seed=3), draw(keys, HEADS, V, seed=4)

    whole = prefill(q_nope, q_pe, k_nope, k_pe, v, softmax_scale=SCALE, causal=True)
    context = prefill(q_nope, q_pe, k_nope[:cut], k_pe[:cut], v[:cut], softmax_scale=SCALE, causal=False)
    rest = prefill(q_nope, q_pe, k_nope[cut:], k_pe[cut:], v[cut:], softmax_scale=SCALE, causal=True)

    merged = merge_states(*rest, *context)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-12, atol=1e-12)


def test_a_ragged_batch_is_its_requests() -> None:
    """Rows behind the last request stay 0 and -inf."""
    offsets_q, offsets_k = torch.tensor([0, 4, 4, 5]), torch.tensor([0, 6, 9, 10])
    q_nope, q_pe = draw(7, HEADS, NOPE), draw(7, HEADS, ROPE, seed=1)
    k_nope, k_pe, v = draw(12, HEADS, NOPE, seed=2), draw(12, ROPE, seed=3), draw(12, HEADS, V, seed=4)

    batch = prefill_ragged(q_nope, q_pe, k_nope, k_pe, v, offsets_q, offsets_k, softmax_scale=SCALE, causal=True)

    first = prefill(q_nope[:4], q_pe[:4], k_nope[:6], k_pe[:6], v[:6], softmax_scale=SCALE, causal=True)
    last = prefill(q_nope[4:5], q_pe[4:5], k_nope[9:10], k_pe[9:10], v[9:10], softmax_scale=SCALE, causal=True)
    assert torch.equal(batch.out[:5], torch.cat((first.out, last.out)))
    assert torch.equal(batch.lse[:5], torch.cat((first.lse, last.lse)))
    assert (batch.out[5:] == 0).all()
    assert (batch.lse[5:] == -torch.inf).all()


def test_the_last_query_stands_on_the_last_key() -> None:
    assert visibility(2, 3, causal=True).tolist() == [[True, True, False], [True, True, True]]
    assert visibility(3, 2, causal=True).tolist() == [[False, False], [True, False], [True, True]]
