"""Absorption: folding kv_b_proj into the query and the output so that attention runs in the latent space.

kv_b_proj maps a latent row to every head's key part and value part. Since scores are q . (W_UK c), the key
part can be moved to the query: (q W_UK) . c; the value part can be applied once, after the weighted sum of
latents.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_kv_b(kv_b_weight: Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Cut the weight of kv_b_proj into its key and value parts.

    Args:
        kv_b_weight: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]. Rows go head by head, and
            within a head key rows first, then value rows (ggml-org/llama.cpp#13094).
        num_heads: heads in this weight.
        qk_nope_head_dim: key rows per head.
        v_head_dim: value rows per head.

    Returns:
        w_uk [num_heads, qk_nope_head_dim, kv_lora_rank] and w_uv [num_heads, v_head_dim,
        kv_lora_rank].

    Raises:
        ValueError: if the number of rows is not the product of the sizes.

    """
    rows_per_head = qk_nope_head_dim + v_head_dim
    if kv_b_weight.dim() != 2 or kv_b_weight.shape[0] != num_heads * rows_per_head:
        raise ValueError(
            f"kv_b_weight has shape {list(kv_b_weight.shape)}; "
            f"{num_heads} heads of {qk_nope_head_dim} + {v_head_dim} need [{num_heads * rows_per_head}, any]"
        )
    per_head = kv_b_weight.reshape(num_heads, rows_per_head, kv_b_weight.shape[1])
    return per_head[:, :qk_nope_head_dim], per_head[:, qk_nope_head_dim:]


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Move q_nope [..., heads, qk_nope_head_dim] into the latent space: [..., heads, kv_lora_rank]."""
    return torch.einsum("...hp,hpl->...hl", q_nope, w_uk)


def project_output(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Bring a latent attention output [..., heads, kv_lora_rank] to [..., heads, v_head_dim]."""
    return torch.einsum("...hl,hvl->...hv", out_latent, w_uv)
