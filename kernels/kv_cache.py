"""Writing the rows of new tokens into a paged latent cache, in three row formats."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import ds_mla, launch
from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_k_scale,
    check_last_stride,
    check_no_overlap,
    check_one_device,
    check_rank,
    check_shape,
    check_size,
    check_tensor,
)
from mla_conformance.kernels.kv_cache_triton import write_kv_cache_kernel

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLOT_DTYPES = (torch.int32, torch.int64)
MAX_TOKENS = 2**31 - 1
"""CUDA's limit for the first axis of a grid."""


def write_kv_cache(
    ckv: Tensor,
    kpe: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
) -> None:
    """Write the latent and the rotated key of new tokens into their slots of a paged cache, in place.

    Token t goes to ``kv_cache[slot // page_size, slot % page_size]`` with ``slot = slot_mapping[t]``. A token whose
    slot lies outside ``[0, num_pages * page_size)`` is skipped, whatever its row holds: engines pad batches with slot
    -1. Slots are read on the device only. Two tokens may name one slot if their rows are equal; else either may win.

    The cache's dtype chooses the format of a row:

    * ckv's dtype: the bits of ckv and, behind them, of kpe.
    * float8_e4m3fn: the same elements divided by k_scale. The quotient is a correctly rounded float32; it is then
      saturated to +-448 and rounded to nearest even. NaN becomes the byte 0x7F, whatever its sign.
    * uint8 with rows of 656 (vLLM's ``fp8_ds_mla``): 512 e4m3 bytes, four float32 scales, one for each 128 latents,
      and 64 bfloat16 of kpe. A scale is 2**ceil(log2(max(amax / 448, 1e-4))), with amax the largest finite magnitude
      of its group, so that dividing by it is exact (vllm-project/vllm#49435); the quotient is saturated and rounded as
      above.

    Args:
        ckv: [tokens, kv_lora_rank], bfloat16, float16 or float32 (bfloat16 for rows of 656); kv_lora_rank 1 to 1024.
            Last stride 1, the other free.
        kpe: [tokens, qk_rope_head_dim] in ckv's dtype; qk_rope_head_dim 0 to 1024. None is width 0. Last stride 1, the
            other free.
        kv_cache: [num_pages, page_size, width], written in place: width kv_lora_rank + qk_rope_head_dim, or 656 for
            uint8. Last stride 1, others free, without overlap; for uint8 rows start at multiples of 4 bytes.
            Must not overlap another argument.
        slot_mapping: [tokens] int32 or int64, any stride.
        k_scale: What one unit of an e4m3 cache is worth, latent and rotary alike: positive, a float or one float32
            element on the device (whose value is not checked). None is 1. Ignored for another cache dtype.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value, or the GPU cannot write e4m3.
        RuntimeError: Triton has no GPU to compile for.
    """
    rope_dim = _check(ckv, kpe, kv_cache, slot_mapping, k_scale)
    if ckv.shape[0] > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(ckv):  # type: ignore[no-untyped-call]
            _launch(ckv, kpe if rope_dim else None, kv_cache, slot_mapping, k_scale)


def _launch(
    ckv: Tensor, kpe: Tensor | None, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float | Tensor | None
) -> None:
    target = launch.current_target()
    row_format = {torch.float8_e4m3fn: "e4m3", torch.uint8: "grouped"}.get(kv_cache.dtype, "same")
    if row_format != "same" and not launch.supports_fp8_cache(target):
        raise ValueError(f"kv_cache is {kv_cache.dtype}, whose e4m3 {target} cannot write; use ckv's dtype there")
    tokens, kv_lora_rank = ckv.shape
    rope_dim = 0 if kpe is None else kpe.shape[1]
    num_pages, page_size = kv_cache.shape[:2]
    # Bits that are copied travel as integers, so that no NaN changes on the way.
    if row_format == "same":
        ckv, kv_cache = _bits(ckv), _bits(kv_cache)
    if row_format != "e4m3" and kpe is not None:
        kpe = _bits(kpe)
    scale = 1.0 if k_scale is None or row_format != "e4m3" else k_scale
    scale_on_device = isinstance(scale, Tensor)
    write_kv_cache_kernel[(tokens,)](
        ckv,
        kpe,
        kv_cache.view(torch.uint8) if row_format == "e4m3" else kv_cache,
        slot_mapping,
        scale if scale_on_device else None,
        1.0 if scale_on_device else float(scale),
        num_pages * page_size,
        slot_mapping.stride(0),
        ckv.stride(0),
        0 if kpe is None else kpe.stride(0),
        *kv_cache.stride()[:2],
        KV_LORA_RANK=kv_lora_rank,
        LATENT_BLOCK=triton.next_power_of_2(kv_lora_rank),
        ROPE_DIM=rope_dim,
        ROPE_BLOCK=triton.next_power_of_2(rope_dim),
        PAGE_SIZE=page_size,
        FORMAT=row_format,
        num_warps=4,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _check(
    ckv: Tensor, kpe: Tensor | None, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float | Tensor | None
) -> int:
    """Check the arguments of ``write_kv_cache``; return qk_rope_head_dim."""
    tensors = {"ckv": ckv, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    if kpe is not None:
        tensors["kpe"] = kpe
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if isinstance(k_scale, Tensor):
        tensors["k_scale"] = k_scale
    check_one_device(tensors)

    check_dtype("ckv", ckv, VALUE_DTYPES)
    check_rank("ckv", ckv, "[tokens, kv_lora_rank]")
    tokens, kv_lora_rank = ckv.shape
    check_size("ckv", "tokens", tokens, 0, MAX_TOKENS)
    check_size("ckv", "kv_lora_rank", kv_lora_rank, 1, 1024)
    rope_dim = 0
    if kpe is not None:
        check_dtype("kpe", kpe, (ckv.dtype,))
        check_rank("kpe", kpe, "[tokens, qk_rope_head_dim]")
        rope_dim = kpe.shape[1]
        check_size("kpe", "qk_rope_head_dim", rope_dim, 0, 1024)
        check_shape("kpe", kpe, (tokens, rope_dim))
    check_dtype("slot_mapping", slot_mapping, SLOT_DTYPES)
    check_rank("slot_mapping", slot_mapping, "[tokens]")
    check_shape("slot_mapping", slot_mapping, (tokens,))

    check_dtype("kv_cache", kv_cache, (ckv.dtype, torch.float8_e4m3fn, torch.uint8))
    check_rank("kv_cache", kv_cache, "[num_pages, page_size, width]")
    num_pages, page_size = kv_cache.shape[:2]
    if page_size < 1:
        raise ValueError(f"kv_cache has page_size {page_size}; it must be 1 or more")
    for name in ("ckv", "kpe", "kv_cache"):
        if name in tensors:
            check_last_stride(name, tensors[name])
    check_no_overlap("kv_cache", kv_cache)
    if kv_cache.dtype == torch.uint8:
        ds_mla.check_ds_mla_cache(kv_cache)
        check_dtype("ckv", ckv, (torch.bfloat16,))
        check_size("ckv", "kv_lora_rank", kv_lora_rank, ds_mla.LATENT, ds_mla.LATENT)
        check_size("kpe", "qk_rope_head_dim", rope_dim, ds_mla.ROPE, ds_mla.ROPE)
    else:
        check_shape("kv_cache", kv_cache, (num_pages, page_size, kv_lora_rank + rope_dim))

    check_k_scale(k_scale)
    return rope_dim
