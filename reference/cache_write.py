"""Rows of new tokens written into a paged cache, in three row formats; the oracle of the cache-writing kernels.

Nothing here rounds through a float8 dtype: codes are computed from the definition of e4m3 in float64, where every
product and quotient by a power of two is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
GROUP = 128
MIN_SCALE = 1e-4


def write_rows(ckv: Tensor, kpe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float | Tensor = 1.0) -> None:
    """Write row t of ``[ckv, kpe]`` to slot ``slot_mapping[t]`` of the cache, in place, one token after another.

    Args:
        ckv: [tokens, kv_lora_rank], bfloat16, float16 or float32.
        kpe: [tokens, qk_rope_head_dim] in ckv's dtype; the width may be 0.
        kv_cache: [num_pages, page_size, width], in ckv's dtype (bits are copied), float8_e4m3fn (elements over
            k_scale) or uint8 (vLLM's ``fp8_ds_mla``, see :func:`ds_mla_row`).
        slot_mapping: [tokens] integers; a slot outside ``[0, num_pages * page_size)`` is skipped.
        k_scale: what one unit of a float8_e4m3fn cache is worth, a float32.

    """
    num_pages, page_size, _ = kv_cache.shape
    scale = float(torch.as_tensor(k_scale, dtype=torch.float32))
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < num_pages * page_size:
            continue
        page, position = divmod(slot, page_size)
        if kv_cache.dtype == torch.uint8:
            row = ds_mla_row(ckv[token], kpe[token])
        elif kv_cache.dtype == torch.float8_e4m3fn:
            # Correctly rounded to float32: float64 is wide enough for that not to round twice.
            quotient = (torch.cat((ckv[token], kpe[token])).double() / scale).float()
            row = e4m3_codes(quotient).view(torch.float8_e4m3fn)
        else:
            row = torch.cat((ckv[token], kpe[token]))
        kv_cache[page, position] = row


def ds_mla_row(latent: Tensor, rope: Tensor) -> Tensor:
    """Return a row of ``fp8_ds_mla`` as uint8 [656]: e4m3 codes, a float32 scale for each 128 latents, bfloat16 rope.

    A scale is the smallest power of two that is at least amax / 448 and at least 1e-4, with amax the largest finite
    magnitude of the group (vllm-project/vllm#49435).

    Args:
        latent: [512] bfloat16.
        rope: [64] bfloat16.

    """
    codes, scales = [], []
    for group in torch.split(latent.double(), GROUP):
        amax = float(torch.where(group.isfinite(), group.abs(), 0.0).max())
        mantissa, exponent = math.frexp(max(amax / E4M3_MAX, MIN_SCALE))
        scales.append(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
        codes.append(e4m3_codes(group / scales[-1]))
    stored = torch.tensor(scales, dtype=torch.float32, device=latent.device)
    return torch.cat((*codes, stored.view(torch.uint8), rope.contiguous().view(torch.uint8)))


def e4m3_codes(values: Tensor) -> Tensor:
    """Return the e4m3 codes (uint8) nearest to ``values``, ties to the even one, saturated; NaN gives 0x7F.

    The codes of one sign are consecutive: 8 steps of 2**-9 below 2**-6, then 8 steps in each power of two (OCP 8-bit
    floating point specification, section 5.1).
    """
    values = values.double()
    magnitudes = values.abs().clamp(max=E4M3_MAX)
    mantissas, exponents = torch.frexp(magnitudes)
    subnormal = magnitudes < 2.0**-6
    steps = torch.where(subnormal, magnitudes * 2.0**9, mantissas * 16).round()
    codes = torch.where(subnormal, 0, (exponents + 5) * 8) + steps + torch.where(values.signbit(), 128, 0)
    return torch.where(values.isnan(), E4M3_NAN, codes).to(torch.uint8)
