"""The weight of kv_b_proj from a GGUF file, whole and absorbed into query and output.

A file holds it in one of two forms. ``attn_kv_b`` is the fused matrix. Newer files split it into ``attn_k_b``, stored
transposed so that its blocks run along qk_nope_head_dim, and ``attn_v_b``, whose blocks run along kv_lora_rank
(ggml-org/llama.cpp#13094). The two directions cannot be joined as bytes, so the split form is always dequantised.

The kernels run where the tensors are: on a machine with a GPU, move them there first.

Sizes are the whole model's: num_heads, qk_nope_head_dim, kv_lora_rank, v_head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels.gguf import shards as cuts
from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import QuantFormat


class FusedKvB(NamedTuple):
    """``attn_kv_b``: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], a head's key rows, then its values.

    ``kv_b`` is uint8 [..., row_bytes] of the type ``quant``, or a float tensor.
    """

    kv_b: Tensor
    quant: str | int | None


class SplitKvB(NamedTuple):
    """``attn_k_b`` [num_heads, kv_lora_rank, qk_nope_head_dim], ``attn_v_b`` [num_heads, v_head_dim, kv_lora_rank].

    Both are uint8 [..., row_bytes] of the type beside them, or float tensors.
    """

    k_b: Tensor
    k_quant: str | int | None
    v_b: Tensor
    v_quant: str | int | None


def kv_b_from_split(
    k_b: Tensor,
    k_quant: str | int | None,
    v_b: Tensor,
    v_quant: str | int | None,
    num_heads: int,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    v_head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> Tensor:
    """Rebuild kv_b_proj's weight from the split form.

    Args:
        k_b: See ``SplitKvB``, as the other three.
        k_quant: Type of ``k_b``.
        v_b: Value part.
        v_quant: Type of ``v_b``.
        num_heads: Heads of the whole model.
        qk_nope_head_dim: Key rows a head.
        kv_lora_rank: Width of the latent.
        v_head_dim: Value rows a head.
        dtype: float32, bfloat16 or float16; rounded once, from float32.
        tp_rank: This rank, which gets its heads.
        tp_size: Ranks.

    Returns:
        [heads of this rank * (qk_nope_head_dim + v_head_dim), kv_lora_rank].

    Raises:
        TypeError: A wrong Python type or dtype.
        ValueError: A tensor has another shape (k_b not transposed, other heads), a type cannot hold the rows, or the
            heads do not divide among the ranks.
    """
    split = SplitKvB(k_b, k_quant, v_b, v_quant)
    sizes = (num_heads, qk_nope_head_dim, kv_lora_rank, v_head_dim)
    k, v = _split_parts(split, sizes, dtype, tp_rank, tp_size)
    return torch.cat((k.transpose(1, 2), v), dim=1).reshape(-1, kv_lora_rank)


def absorbed(
    weight: FusedKvB | SplitKvB,
    num_heads: int,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    v_head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """The two matrices that an absorbed attention layer multiplies by; arguments and errors as ``kv_b_from_split``.

    Returns:
        W_UK [heads of this rank, qk_nope_head_dim, kv_lora_rank], which brings a query into the latent space, and W_UV
        [heads of this rank, kv_lora_rank, v_head_dim], which brings a latent output out of it: the shapes of W_UK_T
        and W_UV in vLLM's MLAAttention. Contiguous.
    """
    sizes = (num_heads, qk_nope_head_dim, kv_lora_rank, v_head_dim)
    if isinstance(weight, SplitKvB):
        k, v = _split_parts(weight, sizes, dtype, tp_rank, tp_size)
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    first, end = _local_heads(sizes, tp_rank, tp_size)
    data, form = cuts.as_bytes(weight.kv_b, weight.quant)
    rows = qk_nope_head_dim + v_head_dim
    if data.dim() != 2 or len(data) != num_heads * rows:
        raise ValueError(
            f"kv_b has shape {list(weight.kv_b.shape)}; {num_heads} heads of {qk_nope_head_dim} + {v_head_dim} rows "
            f"need [{num_heads * rows}, any]"
        )
    cuts.check_row_bytes(data, form, "kv_lora_rank", kv_lora_rank)
    local = dequantize(data[first * rows : end * rows], form.name, dtype=dtype).view(-1, rows, kv_lora_rank)
    return local[:, :qk_nope_head_dim].contiguous(), local[:, qk_nope_head_dim:].transpose(1, 2).contiguous()


def _split_parts(
    weight: SplitKvB, sizes: tuple[int, int, int, int], dtype: torch.dtype, tp_rank: int, tp_size: int
) -> tuple[Tensor, Tensor]:
    """This rank's k_b [heads, kv_lora_rank, qk_nope_head_dim] and v_b [heads, v_head_dim, kv_lora_rank]."""
    num_heads, qk_nope_head_dim, kv_lora_rank, v_head_dim = sizes
    first, end = _local_heads(sizes, tp_rank, tp_size)
    k_b, k_form = cuts.as_bytes(weight.k_b, weight.k_quant)
    v_b, v_form = cuts.as_bytes(weight.v_b, weight.v_quant)
    if qk_nope_head_dim % k_form.block_elements:
        raise ValueError(
            f"k_quant is {k_form.name}: k_b's blocks run along qk_nope_head_dim, and {qk_nope_head_dim} is no multiple "
            f"of {k_form.name}'s block of {k_form.block_elements}, so no file holds it; check the type and the size"
        )
    _refuse_other_shape("k_b", k_b, k_form, (num_heads, kv_lora_rank, qk_nope_head_dim))
    _refuse_other_shape("v_b", v_b, v_form, (num_heads, v_head_dim, kv_lora_rank))
    return dequantize(k_b[first:end], k_form.name, dtype=dtype), dequantize(v_b[first:end], v_form.name, dtype=dtype)


def _local_heads(sizes: tuple[int, int, int, int], tp_rank: int, tp_size: int) -> tuple[int, int]:
    """First head and end of this rank, after the sizes are found sane."""
    names = ("num_heads", "qk_nope_head_dim", "kv_lora_rank", "v_head_dim")
    for name, size in zip(names, sizes, strict=True):
        cuts.check_size(name, size)
    cuts.check_ranks(tp_rank, tp_size)
    return cuts.even_range("num_heads", sizes[0], tp_rank, tp_size)


def _refuse_other_shape(name: str, data: Tensor, form: QuantFormat, shape: tuple[int, int, int]) -> None:
    heads, rows, columns = shape
    blocks = form.block_elements
    given = [*data.shape[:-1], data.shape[-1] // form.block_bytes * blocks] if data.dim() else []
    if given == list(shape) and data.shape[-1] % form.block_bytes == 0:
        return
    hint = "check num_heads and the sizes"
    if given == [heads, columns, rows]:
        hint = "its last two dimensions are swapped: k_b is stored transposed, v_b is not"
    elif len(given) == 3 and given[1:] == [rows, columns]:
        hint = f"num_heads is {heads}"
    raise ValueError(f"{name} is {given} in {form.name}, expected {list(shape)}; {hint}")
