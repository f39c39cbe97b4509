"""Fused projections, their slices for tensor parallelism, and kv_b_proj rebuilt from its two halves.

Everything here works on dequantised weights [rows, columns], rows being out-features (y = x @ W^T): which bytes a
row came from is not its concern. Heads in vLLM's fused projections: vllm-project/vllm `QKVParallelLinear`, where a
rank that would get less than one key-value head gets a whole one, shared with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fuse(shards: Sequence[Tensor]) -> Tensor:
    """Stack the shards of a fused projection in the order in which the layer declares them.

    The order in which a file lists or a loader meets them plays no part (vllm-project/vllm#41057).

    Args:
        shards: [rows_i, columns] each, in declared order: q_a before kv_a, gate before up, q before k before v.

    Returns:
        [sum of rows_i, columns].

    Raises:
        ValueError: if there is no shard, or one is no matrix of the first one's columns.

    """
    if not shards:
        raise ValueError("shards is empty; a fused projection has at least one")
    for index, shard in enumerate(shards):
        if shard.dim() != 2 or shard.shape[1] != shards[0].shape[-1]:
            raise ValueError(
                f"shards[{index}] has shape {list(shard.shape)}; it needs two dimensions and the "
                f"{shards[0].shape[-1]} columns of shards[0]"
            )
    return torch.cat(list(shards), dim=0)


def slice_rows(weight: Tensor, rank: int, degree: int) -> Tensor:
    """Return the rows of a column-parallel weight [rows, columns] that a rank owns: [rows // degree, columns].

    A fused weight is sliced shard by shard, before `fuse`.

    Raises:
        ValueError: if rank is not below degree, or degree does not divide the rows.

    """
    return _slice(weight, 0, rank, degree)


def slice_columns(weight: Tensor, rank: int, degree: int) -> Tensor:
    """Return the columns of a row-parallel weight [rows, columns] that a rank owns: [rows, columns // degree].

    Raises:
        ValueError: if rank is not below degree, or degree does not divide the columns.

    """
    return _slice(weight, 1, rank, degree)


def slice_heads(weight: Tensor, rank: int, degree: int, heads: int, head_dim: int) -> Tensor:
    """Return the heads of a weight [heads * head_dim, columns] that a rank owns.

    With fewer heads than ranks, `degree // heads` neighbouring ranks own the same head.

    Returns:
        [max(1, heads // degree) * head_dim, columns].

    Raises:
        ValueError: if rank is not below degree, the rows are not heads * head_dim, or neither of heads and degree
            divides the other.

    """
    if weight.shape[0] != heads * head_dim:
        raise ValueError(f"weight has {weight.shape[0]} rows; {heads} heads of {head_dim} rows need {heads * head_dim}")
    if heads >= degree:
        if heads % degree:
            raise ValueError(f"{heads} heads cannot be shared out to degree {degree}; take a divisor of {heads}")
        return slice_rows(weight, rank, degree)
    if degree % heads:
        raise ValueError(f"degree is {degree}, no multiple of {heads} heads; heads can only be copied whole")
    _check_rank(rank, degree)
    return slice_rows(weight, rank // (degree // heads), heads)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., columns] times weight [rows, columns] transposed, in float64: [..., rows].

    Raises:
        ValueError: if the columns differ.

    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} columns and weight has {weight.shape[-1]}; they have to be equal")
    return x.double() @ weight.double().transpose(0, 1)


def kv_b_from_split(k_b: Tensor, v_b: Tensor) -> Tensor:
    """Rebuild the weight of kv_b_proj from GGUF's `attn_k_b` and `attn_v_b`.

    Source: ggml-org/llama.cpp#13094 and the converter's split: the key part is stored transposed, ready for
    absorption.

    Args:
        k_b: [heads, kv_lora_rank, qk_nope_head_dim].
        v_b: [heads, v_head_dim, kv_lora_rank].

    Returns:
        [heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], head by head, key rows before value rows.

    Raises:
        ValueError: if heads or kv_lora_rank of the two differ.

    """
    if k_b.dim() != 3 or v_b.dim() != 3 or k_b.shape[0] != v_b.shape[0] or k_b.shape[1] != v_b.shape[2]:
        raise ValueError(
            f"k_b has shape {list(k_b.shape)} and v_b {list(v_b.shape)}; "
            "they need [heads, kv_lora_rank, nope] and [heads, v, kv_lora_rank]"
        )
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)


def split_from_kv_b(
    kv_b_weight: Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Tensor, Tensor]:
    """Cut the weight of kv_b_proj as GGUF stores it: the inverse of `kv_b_from_split`.

    Returns:
        k_b [num_heads, kv_lora_rank, qk_nope_head_dim] and v_b [num_heads, v_head_dim, kv_lora_rank].

    Raises:
        ValueError: if the number of rows is not num_heads * (qk_nope_head_dim + v_head_dim).

    """
    rows_per_head = qk_nope_head_dim + v_head_dim
    if kv_b_weight.dim() != 2 or kv_b_weight.shape[0] != num_heads * rows_per_head:
        raise ValueError(
            f"kv_b_weight has shape {list(kv_b_weight.shape)}; "
            f"{num_heads} heads of {qk_nope_head_dim} + {v_head_dim} need [{num_heads * rows_per_head}, any]"
        )
    per_head = kv_b_weight.reshape(num_heads, rows_per_head, -1)
    return per_head[:, :qk_nope_head_dim].transpose(1, 2), per_head[:, qk_nope_head_dim:]


def _slice(weight: Tensor, dimension: int, rank: int, degree: int) -> Tensor:
    _check_rank(rank, degree)
    size = weight.shape[dimension]
    if size % degree:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, and degree {degree} does not divide dimension {dimension} "
            f"({size}); take a divisor of {size}"
        )
    return weight.narrow(dimension, rank * (size // degree), size // degree)


def _check_rank(rank: int, degree: int) -> None:
    if degree < 1 or not 0 <= rank < degree:
        raise ValueError(f"rank is {rank} and degree {degree}; ranks go from 0 to degree - 1")
