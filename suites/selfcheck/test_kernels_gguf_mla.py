"""kv_b from GGUF, fused or split, against gguf-py's values and the reference's absorption."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.kernels.gguf.mla import FusedKvB, SplitKvB, absorbed, kv_b_from_split
from mla_conformance.reference import absorption, fused_linear
from mla_conformance.suites.selfcheck.gguf_weights import BLOCK_32, BLOCK_256, PLAIN, weight


class Sizes(NamedTuple):
    """In the order of the functions under test."""

    num_heads: int
    qk_nope_head_dim: int
    kv_lora_rank: int
    v_head_dim: int


# Real sizes but for the heads.
MODELS = {"GLM-5": Sizes(1, 192, 512, 256), "DeepSeek": Sizes(1, 128, 512, 128)}


def expected(kv_b: Tensor, sizes: Sizes, rank: int = 0, degree: int = 1) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV of a rank's heads, from the whole kv_b."""
    heads = sizes.num_heads // degree
    w_uk, w_uv = absorption.split_kv_b(kv_b, sizes.num_heads, sizes.qk_nope_head_dim, sizes.v_head_dim)
    mine = slice(rank * heads, (rank + 1) * heads)
    return w_uk[mine], w_uv[mine].transpose(1, 2)


def split_weight(sizes: Sizes, k_quant: str, v_quant: str) -> tuple[SplitKvB, Tensor]:
    """A split weight, and the kv_b that it stands for."""
    heads, nope, latent, v_dim = sizes
    k_b, k_values = weight(k_quant, (heads, latent, nope), 1)
    v_b, v_values = weight(v_quant, (heads, v_dim, latent), 2)
    return SplitKvB(k_b, k_quant, v_b, v_quant), fused_linear.kv_b_from_split(k_values, v_values)


def judge(
    sizes: Sizes,
    k_quant: str,
    v_quant: str,
    tp_size: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    rebuild: Any = kv_b_from_split,
) -> None:
    """Hold the rebuilt kv_b, and the matrices of the split and of a fused weight, to the last bit."""
    split, kv_b = split_weight(sizes, k_quant, v_quant)
    fused, fused_values = weight(v_quant, kv_b.shape, 3)
    rows = len(kv_b) // tp_size
    options: Any = {"dtype": dtype, "tp_rank": rank, "tp_size": tp_size}
    local = kv_b[rank * rows : (rank + 1) * rows].to(dtype)
    torch.testing.assert_close(rebuild(*split, *sizes, **options), local, rtol=0, atol=0)
    for given_weight, values in ((split, kv_b), (FusedKvB(fused, v_quant), fused_values)):
        made = absorbed(given_weight, *sizes, **options)
        for part, right in zip(made, expected(values, sizes, rank, tp_size), strict=True):
            torch.testing.assert_close(part, right.to(dtype), rtol=0, atol=0)
            assert part.is_contiguous()


@st.composite
def spreads(draw: st.DrawFn) -> tuple[Sizes, str, str, int, int]:
    """One head a rank or two, types that the widths can have, and a rank."""
    tp_size, large = draw(st.sampled_from([1, 2, 4, 8])), draw(st.booleans())
    sizes = Sizes(
        tp_size * draw(st.integers(1, 2)),
        draw(st.sampled_from([32, 64])),
        256 if large else draw(st.sampled_from([32, 96])),
        draw(st.sampled_from([1, 3, 32])),
    )
    v_quant = draw(st.sampled_from(PLAIN + BLOCK_32 + (BLOCK_256 if large else ())))
    return sizes, draw(st.sampled_from(PLAIN + BLOCK_32)), v_quant, tp_size, draw(st.integers(0, tp_size - 1))


@given(spreads(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_every_form_gives_the_same_matrices(spread: tuple[Sizes, str, str, int, int], dtype: torch.dtype) -> None:
    """Types mixed, heads spread, rounded once."""
    judge(*spread, dtype)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_of_real_models(model: str) -> None:
    """Blocks of k_b along qk_nope_head_dim 192 and 128, those of v_b along the latent."""
    judge(MODELS[model], "Q8_0", "Q4_K", 1, 0, torch.bfloat16)


def test_float_tensors_need_no_type() -> None:
    """An unquantised pair, as converted files hold it in float16."""
    split, kv_b = split_weight(Sizes(2, 4, 8, 5), "F16", "F32")
    floats = SplitKvB(split.k_b.view(torch.float16), None, split.v_b.view(torch.float32), None)
    torch.testing.assert_close(kv_b_from_split(*floats, 2, 4, 8, 5), kv_b, rtol=0, atol=0)


def test_the_matrices_move_attention_into_the_latent_space() -> None:
    """Scores against expanded keys and outputs of expanded values, both in float64."""
    sizes = Sizes(3, 32, 64, 5)
    split, kv_b = split_weight(sizes, "Q8_0", "Q8_0")
    w_uk, w_uv = (part.double() for part in absorbed(split, *sizes))
    query, latents = torch.randn(3, 32).double(), torch.randn(7, 64).double()
    keys, values = (latents @ kv_b.double().T).unflatten(1, (3, 37)).split([32, 5], dim=2)
    scores = torch.einsum("hp,hpl,tl->ht", query, w_uk, latents)
    torch.testing.assert_close(scores, torch.einsum("hp,thp->ht", query, keys))
    mean = torch.einsum("l,hlv->hv", latents.mean(0), w_uv)
    torch.testing.assert_close(mean, values.mean(0))


def not_transposed(*arguments: Any, **options: Any) -> Tensor:
    """Reads k_b's bytes as if it were stored as v_b is."""
    nope, latent, v_dim = arguments[5:]
    rows = kv_b_from_split(*arguments, **options).unflatten(0, (-1, nope + v_dim))
    swapped = rows[:, :nope].transpose(1, 2).reshape(len(rows), nope, latent)
    return torch.cat((swapped, rows[:, nope:]), 1).flatten(0, 1)


def values_first(*arguments: Any, **options: Any) -> Tensor:
    """Puts a head's value rows before its key rows."""
    nope, v_dim = arguments[5], arguments[7]
    rows = kv_b_from_split(*arguments, **options).unflatten(0, (-1, nope + v_dim))
    return torch.cat((rows[:, nope:], rows[:, :nope]), 1).flatten(0, 1)


def keys_of_all_heads_first(*arguments: Any, **options: Any) -> Tensor:
    """Puts all heads' key rows before all heads' value rows."""
    nope, v_dim = arguments[5], arguments[7]
    rows = kv_b_from_split(*arguments, **options).unflatten(0, (-1, nope + v_dim))
    return torch.cat((rows[:, :nope].flatten(0, 1), rows[:, nope:].flatten(0, 1)))


def rank_zero(*arguments: Any, **options: Any) -> Tensor:
    """Gives every rank the first rank's heads."""
    return kv_b_from_split(*arguments, **(options | {"tp_rank": 0}))


@pytest.mark.parametrize("broken", [not_transposed, values_first, keys_of_all_heads_first, rank_zero])
def test_planted_faults_fail_the_comparison(broken: Any) -> None:
    """Where all widths are equal, so that no shape gives them away."""
    sizes = Sizes(4, 32, 32, 32)
    judge(sizes, "Q8_0", "Q8_0", 2, 1)
    with pytest.raises(AssertionError):
        judge(sizes, "Q8_0", "Q8_0", 2, 1, rebuild=broken)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_heads": 3}, ValueError, r"k_b is \[4, 64, 32\] in Q8_0, expected \[3, 64, 32\]; num_heads is 3"),
        ({"qk_nope_head_dim": 64, "kv_lora_rank": 32}, ValueError, "k_b is .*swapped: k_b is stored transposed"),
        ({"qk_nope_head_dim": 96}, ValueError, r"k_b is \[4, 64, 32\] in Q8_0, expected \[4, 64, 96\]"),
        ({"v_head_dim": 4}, ValueError, r"v_b is \[4, 3, 64\] in Q8_0, expected \[4, 4, 64\]"),
        ({"v_quant": "Q4_0"}, ValueError, "v_b is .*in Q4_0"),
        ({"k_quant": "Q4_K"}, ValueError, "k_quant is Q4_K.*qk_nope_head_dim, and 32 is no multiple.*block of 256"),
        ({"k_quant": "Q9_9"}, ValueError, "Q9_9"),
        ({"k_quant": None}, TypeError, "quant is None"),
        ({"k_b": [1]}, TypeError, "data is a list"),
        ({"tp_size": 3}, ValueError, "num_heads is 4, no multiple of tp_size 3"),
        ({"tp_size": 2, "tp_rank": 2}, ValueError, "tp_rank is 2"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim is 0"),
    ],
)
def test_a_wrong_split_weight_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Both functions say what was given and what is needed."""
    split, _ = split_weight(Sizes(4, 32, 64, 3), "Q8_0", "Q8_0")
    arguments: dict[str, Any] = split._asdict() | Sizes(4, 32, 64, 3)._asdict() | change
    with pytest.raises(error, match=message):
        kv_b_from_split(**arguments)
    weights = SplitKvB(*(arguments.pop(name) for name in SplitKvB._fields))
    with pytest.raises(error, match=message):
        absorbed(weights, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"kv_b has shape \[140, 68\]; 5 heads of 32 \+ 3 rows need \[175, any\]"),
        ({"kv_lora_rank": 32}, "data has 68 bytes a row; kv_lora_rank 32 in Q8_0 takes 34"),
        ({"tp_size": 8}, "num_heads is 4, no multiple of tp_size 8"),
    ],
)
def test_a_wrong_fused_weight_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    """Rows are heads times both parts, columns the latent."""
    arguments: Any = Sizes(4, 32, 64, 3)._asdict() | change
    with pytest.raises(ValueError, match=message):
        absorbed(FusedKvB(weight("Q8_0", (140, 64), 0)[0], "Q8_0"), **arguments)


def test_glm_5_cannot_have_a_k_quant_in_k_b() -> None:
    """Its qk_nope_head_dim, 192, is no multiple of 256; the message says so."""
    sizes = Sizes(1, 192, 512, 256)
    data = torch.zeros(1, 512, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="192 is no multiple of Q4_K's block of 256, so no file holds it"):
        kv_b_from_split(data, "Q4_K", torch.zeros(1, 256, 288, dtype=torch.uint8), "Q4_K", *sizes)
