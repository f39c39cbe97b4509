# mypy: ignore-errors
"""The kernel of ``write_kv_cache``: one program a token, in one of three row formats."""

from __future__ import annotations

import triton
import triton.language as tl

_E4M3_MAX = tl.constexpr(448.0)
_GROUP = tl.constexpr(128)
_MIN_SCALE = tl.constexpr(1e-4)


@triton.jit
def _e4m3_bits(values):
    """Float32 values as e4m3 bytes: saturated, rounded to nearest even; every NaN becomes the byte 0x7F."""
    # Comparisons with NaN are false, so it passes both; the last choice drops its sign, which targets treat each in
    # their way.
    values = tl.where(values > _E4M3_MAX, _E4M3_MAX, values)
    values = tl.where(values < -_E4M3_MAX, -_E4M3_MAX, values)
    values = tl.where(values == values, values, float("nan"))
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _store_grouped_latent(ckv_ptr, row_ptr, KV_LORA_RANK: tl.constexpr):
    """Store the latent as e4m3 bytes and, behind them, one float32 scale for every 128."""
    GROUPS: tl.constexpr = KV_LORA_RANK // _GROUP
    columns = tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = tl.load(ckv_ptr + columns).to(tl.float32)
    magnitudes = tl.abs(values)
    # Infinity and NaN are left out, so that they do not take the other elements of their group with them.
    amax = tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), 1)
    bits = tl.maximum(tl.div_rn(amax, 448.0), _MIN_SCALE).to(tl.int32, bitcast=True)
    # The next power of two: the exponent, and one more if any bit of the mantissa is set.
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    scales = (exponent << 23).to(tl.float32, bitcast=True)
    inverses = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(row_ptr + columns, _e4m3_bits(values * inverses[:, None]))
    scale_ptr = (row_ptr + KV_LORA_RANK).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptr + tl.arange(0, GROUPS), scales)


@triton.jit(do_not_specialize=["capacity", "slot_stride"], do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_cache_kernel(
    ckv_ptr,
    kpe_ptr,
    cache_ptr,
    slot_ptr,
    k_scale_ptr,
    k_scale,
    capacity,
    slot_stride,
    ckv_stride,
    kpe_stride,
    page_stride,
    row_stride,
    KV_LORA_RANK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write one token's row to the slot that ``slot_ptr`` names, or nothing if the cache has no such slot.

    FORMAT "same": source and cache are integers as wide as the elements, and are copied. "e4m3": the cache is bytes;
    elements are divided by the scale, in memory or an argument. "grouped": the cache is bytes, see
    ``_store_grouped_latent``; the rotary part follows, as 16-bit integers on both sides.

    The slot is 64-bit until it is known to be in the cache, and so are all offsets.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride).to(tl.int64)
    if (slot >= 0) & (slot < capacity):
        # cache[page, slot in page, :], ckv[token, :] and kpe[token, :]
        row_ptr = cache_ptr + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride
        ckv_row_ptr = ckv_ptr + token * ckv_stride
        latent = tl.arange(0, LATENT_BLOCK)
        latent_mask = latent < KV_LORA_RANK
        if FORMAT == "e4m3":
            scale = k_scale if k_scale_ptr is None else tl.load(k_scale_ptr)
            values = tl.load(ckv_row_ptr + latent, mask=latent_mask, other=0.0).to(tl.float32)
            tl.store(row_ptr + latent, _e4m3_bits(tl.div_rn(values, scale)), mask=latent_mask)
        elif FORMAT == "grouped":
            _store_grouped_latent(ckv_row_ptr, row_ptr, KV_LORA_RANK)
        else:
            tl.store(row_ptr + latent, tl.load(ckv_row_ptr + latent, mask=latent_mask), mask=latent_mask)
        if ROPE_DIM > 0:
            kpe_row_ptr = kpe_ptr + token * kpe_stride
            rope = tl.arange(0, ROPE_BLOCK)
            rope_mask = rope < ROPE_DIM
            if FORMAT == "e4m3":
                values = tl.load(kpe_row_ptr + rope, mask=rope_mask, other=0.0).to(tl.float32)
                tl.store(row_ptr + KV_LORA_RANK + rope, _e4m3_bits(tl.div_rn(values, scale)), mask=rope_mask)
            elif FORMAT == "grouped":
                rope_ptr = (row_ptr + KV_LORA_RANK + KV_LORA_RANK // _GROUP * 4).to(tl.pointer_type(tl.int16))
                tl.store(rope_ptr + rope, tl.load(kpe_row_ptr + rope, mask=rope_mask), mask=rope_mask)
            else:
                tl.store(row_ptr + KV_LORA_RANK + rope, tl.load(kpe_row_ptr + rope, mask=rope_mask), mask=rope_mask)
