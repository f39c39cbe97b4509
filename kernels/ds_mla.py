"""The rows of vLLM's ``fp8_ds_mla`` cache: 512 e4m3 latents, four float32 scales and 64 bfloat16, 656 bytes."""

from __future__ import annotations

from torch import Tensor

LATENT = 512
ROPE = 64
ROW_BYTES = 656
ALIGNMENT = 4
"""Bytes that the start of a row is a multiple of, for its float32 scales."""


def check_ds_mla_cache(kv_cache: Tensor) -> None:
    """Raise ValueError unless a uint8 ``kv_cache`` [num_pages, page_size, width] has such rows, each aligned."""
    if kv_cache.shape[2] != ROW_BYTES:
        raise ValueError(
            f"kv_cache is uint8 with rows of {kv_cache.shape[2]} bytes; fp8_ds_mla has {ROW_BYTES}, and an e4m3 "
            "cache is passed as float8_e4m3fn"
        )
    starts = {"its first byte at": kv_cache.data_ptr()}
    starts |= {f"stride {i}": kv_cache.stride(i) for i in (0, 1) if kv_cache.shape[i] > 1}
    for what, start in starts.items():
        if start % ALIGNMENT:
            raise ValueError(
                f"kv_cache has {what} {start}; rows of fp8_ds_mla hold float32 and start at multiples of "
                f"{ALIGNMENT} bytes"
            )
