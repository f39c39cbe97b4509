"""What ``mla_decode`` refuses, and the sizes of what it accepts. No content is read, so no GPU is waited for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels import launch
from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_k_scale,
    check_last_stride,
    check_no_overlap,
    check_one_device,
    check_rank,
    check_scale,
    check_shape,
    check_size,
    check_tensor,
)

Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
# Token positions and split boundaries are 32-bit in the kernels, with room to add a split.
MAX_TOKENS = 2**30
MAX_QUERY_TOKENS = 16


class MlaDecodeShape(NamedTuple):
    """Sizes of an accepted call: counts, except for the two dims, which are elements of a cache row."""

    batch: int
    query_tokens: int
    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    max_tokens: int


def check_mla_decode(
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    softmax_scale: float,
    causal: bool,
    k_scale: float | Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> MlaDecodeShape:
    """Check the arguments of ``mla_decode``; see there for what each must be.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value.
    """
    tensors = {"q_nope": q_nope, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    optional = {"q_pe": q_pe, "query_lens": query_lens, "out": out, "lse": lse}
    tensors.update({name: tensor for name, tensor in optional.items() if tensor is not None})
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if isinstance(k_scale, Tensor):
        tensors["k_scale"] = k_scale
    check_one_device(tensors)

    check_dtype("q_nope", q_nope, Q_DTYPES)
    check_dtype("kv_cache", kv_cache, (q_nope.dtype, torch.float8_e4m3fn))
    check_dtype("block_table", block_table, INDEX_DTYPES)
    check_dtype("seq_lens", seq_lens, INDEX_DTYPES)

    one_token = q_nope.dim() == 3
    queries = "[batch, heads, {}]" if one_token else "[batch, query_tokens, heads, {}]"
    check_rank("q_nope", q_nope, queries.format("kv_lora_rank"))
    *leading, kv_lora_rank = q_nope.shape
    batch, heads = leading[0], leading[-1]
    query_tokens = 1 if one_token else leading[1]
    check_size("q_nope", "query_tokens", query_tokens, 1, MAX_QUERY_TOKENS)
    check_size("q_nope", "heads", heads, 1, 128)
    check_size("q_nope", "kv_lora_rank", kv_lora_rank, 64, 512, multiple=16)
    if batch > launch.MAX_GRID_YZ:
        raise ValueError(f"q_nope has {batch} rows; split the batch into calls of at most {launch.MAX_GRID_YZ}")

    rope_dim = 0
    if q_pe is not None:
        check_dtype("q_pe", q_pe, (q_nope.dtype,))
        check_rank("q_pe", q_pe, queries.format("qk_rope_head_dim"))
        rope_dim = q_pe.shape[-1]
        check_size("q_pe", "qk_rope_head_dim", rope_dim, 0, 64, multiple=16)
        check_shape("q_pe", q_pe, (*leading, rope_dim))

    check_rank("kv_cache", kv_cache, "[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]")
    num_pages, page_size = kv_cache.shape[:2]
    check_size("kv_cache", "page_size", page_size, 1, 128)
    check_shape("kv_cache", kv_cache, (num_pages, page_size, kv_lora_rank + rope_dim))

    check_rank("block_table", block_table, "[batch, width]")
    check_shape("block_table", block_table, (batch, block_table.shape[1]))
    check_shape("seq_lens", seq_lens, (batch,))
    if query_lens is not None:
        check_dtype("query_lens", query_lens, INDEX_DTYPES)
        check_shape("query_lens", query_lens, (batch,))
    max_tokens = block_table.shape[1] * page_size
    if max_tokens > MAX_TOKENS:
        raise ValueError(
            f"block_table of width {block_table.shape[1]} with pages of {page_size} names {max_tokens} tokens a row; "
            f"pass the columns in use, at most {MAX_TOKENS} tokens"
        )

    for name in ("q_nope", "q_pe", "kv_cache", "out"):
        if name in tensors:
            check_last_stride(name, tensors[name])
    if out is not None:
        check_dtype("out", out, (q_nope.dtype, torch.float32))
        check_shape("out", out, (*leading, kv_lora_rank))
        check_no_overlap("out", out)
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, tuple(leading))
        check_no_overlap("lse", lse)

    check_scale("softmax_scale", softmax_scale)
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; pass True or False")
    check_k_scale(k_scale)
    if num_splits is not None:
        if isinstance(num_splits, bool) or not isinstance(num_splits, int):
            raise TypeError(f"num_splits is {num_splits!r}; pass an int, or None to have it chosen")
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}; pass 1 or more, or None to have it chosen")
    return MlaDecodeShape(batch, query_tokens, heads, kv_lora_rank, rope_dim, page_size, max_tokens)
