"""vLLM's ``MLAAttention._v_up_proj``, called on an attention object without its constructor, whatever the release.

What the method reads is set by hand: the sizes, ``W_UV``, and that no compiled product of another vendor is in use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mla_conformance.suites.harness.problems import VUpProjProblem

VENDORS = ("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled")
"""Switches of products that are not here; the last is unknown to 0.16.0."""


def declines(problem: VUpProjProblem) -> str | None:
    """The layer hands over dense outputs, and a buffer of one row for each token."""
    if problem.layout in ("gapped", "head_major"):
        return f"layout={problem.layout}: the layer's buffer has one row of all heads for each token"
    return None


def v_up_proj(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """Run the shipped method.

    Args:
        latent: [tokens, heads, kv_lora_rank].
        w_uv: [heads, kv_lora_rank, v_head_dim].
        out: [tokens, heads * v_head_dim], any row stride, to be written.

    """
    attention = torch.nn.Module.__new__(_attention_class())
    torch.nn.Module.__init__(attention)
    heads, kv_lora_rank, v_head_dim = w_uv.shape
    sizes = {"num_heads": heads, "kv_lora_rank": kv_lora_rank, "v_head_dim": v_head_dim}
    for name, value in (sizes | dict.fromkeys(VENDORS, False)).items():
        setattr(attention, name, value)
    attention.W_UV = w_uv
    attention._v_up_proj(latent, out)


@functools.cache
def _attention_class() -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return MLAAttention
