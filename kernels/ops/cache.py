"""Writing and gathering rows of the KV cache as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.kernels.kv_cache import write_kv_cache
from mla_conformance.kernels.kv_cache_gather import gather_kv_cache
from mla_conformance.kernels.ops.fake import nothing


@torch.library.custom_op("mla_conformance::kv_cache_write", mutates_args=("kv_cache",))
def kv_cache_write(
    ckv: Tensor, kpe: Tensor | None, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None
) -> None:
    """Write the rows of new tokens into ``kv_cache``; rows of no slot stay as they are.

    Arguments and errors as :func:`mla_conformance.kernels.kv_cache.write_kv_cache`; a scale is a tensor here.
    """
    write_kv_cache(ckv, kpe, kv_cache, slot_mapping, k_scale=k_scale)


@torch.library.custom_op("mla_conformance::kv_cache_gather_out", mutates_args=("out",))
def kv_cache_gather_out(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> None:
    """Write the rows of a chunk of each request's context into ``out``; how many there are is known to the device only.

    Arguments and errors as :func:`mla_conformance.kernels.kv_cache_gather.gather_kv_cache`; a scale is a tensor here.
    """
    gather_kv_cache(kv_cache, block_table, cu_seqlens, out=out, seq_starts=seq_starts, k_scale=k_scale)


kv_cache_write.register_fake(nothing)
kv_cache_gather_out.register_fake(nothing)
