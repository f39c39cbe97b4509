"""A whole MLA attention layer, to compare the oracle with other people's layers.

It goes from hidden states to the output of o_proj with causal attention, in three forms. In two of them every token
decodes against the cache rows of its own request up to and including itself, so the decode oracles do the attention; in
the third the prefill oracle takes a prompt at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mla_conformance.reference.absorption import absorb_query, project_output, split_kv_b
from mla_conformance.reference.mla import decode_absorbed, decode_expanded
from mla_conformance.reference.paged_cache import split_latent
from mla_conformance.reference.prefill import prefill
from mla_conformance.reference.rope import rope_frequencies, rotate_half_split, rotate_interleaved
from mla_conformance.reference.softmax_scale import YarnScaling, rope_magnitude, softmax_scale

Method = Literal["expanded", "absorbed", "prefill"]


@dataclass(frozen=True)
class MlaConfig:
    """What the layer needs to know beside its weights, named as in the Hugging Face configs.

    `q_lora_rank` None means that the query comes from one projection, `q_proj` (DeepSeek-V2-Lite).
    `rms_norm_eps` is that of the two norms inside attention, which need not be the model's.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_interleave: bool
    yarn: YarnScaling | None = None
    rms_norm_eps: float = 1e-6


class LayerResult(NamedTuple):
    """`output` [batch, tokens, hidden], and `attention` [batch, tokens, heads, v_head_dim] before o_proj."""

    output: Tensor
    attention: Tensor


def attention_layer(
    hidden_states: Tensor,
    weights: Mapping[str, Tensor],
    config: MlaConfig,
    *,
    method: Method,
) -> LayerResult:
    """Run the layer on prompts of equal length that start at position 0.

    Args:
        hidden_states: [batch, tokens, hidden].
        weights: Hugging Face names within the attention module, such as `kv_b_proj.weight` [rows, columns];
            dtype as `hidden_states`.
        config: sizes and rotary settings.
        method: which oracle to use: either decode, token by token, or the prefill of a whole prompt.

    Raises:
        ValueError: if the method is unknown, or a weight is missing or not known to this layer (a bias, say).

    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; use one of {get_args(Method)}")
    _check_names(weights, config)
    q_nope, q_pe = _queries(hidden_states, weights, config)
    ckv, kpe = _cache_rows(hidden_states, weights, config)
    q_pe, kpe = _rotate(q_pe, config), _rotate(kpe.unsqueeze(-2), config).squeeze(-2)
    w_uk, w_uv = split_kv_b(weights["kv_b_proj.weight"], config.num_heads, config.qk_nope_head_dim, config.v_head_dim)
    scale = softmax_scale(config.qk_nope_head_dim + config.qk_rope_head_dim, config.yarn)

    def attend(request: int, token: int) -> Tensor:
        query, query_pe = q_nope[request, token], q_pe[request, token]
        rows, rows_pe = ckv[request, : token + 1], kpe[request, : token + 1]
        if method == "expanded":
            return decode_expanded(query, query_pe, rows, rows_pe, w_uk, w_uv, softmax_scale=scale).out
        latent = decode_absorbed(absorb_query(query, w_uk), query_pe, rows, rows_pe, softmax_scale=scale)
        return project_output(latent.out, w_uv)

    def attend_prompt(request: int) -> Tensor:
        keys, values = (torch.einsum("tl,hdl->thd", ckv[request], weight) for weight in (w_uk, w_uv))
        queries = q_nope[request], q_pe[request]
        return prefill(*queries, keys, kpe[request], values, softmax_scale=scale, causal=True).out

    batch, tokens = hidden_states.shape[:2]
    if method == "prefill":
        attention = torch.stack([attend_prompt(b) for b in range(batch)])
    else:
        attention = torch.stack([torch.stack([attend(b, t) for t in range(tokens)]) for b in range(batch)])
    return LayerResult(attention.flatten(-2) @ weights["o_proj.weight"].T, attention)


def weight_names(config: MlaConfig) -> set[str]:
    """Return the names of the weights that the layer takes, no more and no fewer."""
    query = ["q_proj"] if config.q_lora_rank is None else ["q_a_proj", "q_a_layernorm", "q_b_proj"]
    return {f"{n}.weight" for n in [*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]}


def _check_names(weights: Mapping[str, Tensor], config: MlaConfig) -> None:
    difference = weight_names(config) ^ set(weights)
    if difference:
        raise ValueError(f"weights are missing or unknown: {sorted(difference)}")


def _queries(hidden: Tensor, weights: Mapping[str, Tensor], config: MlaConfig) -> tuple[Tensor, Tensor]:
    """Return q_nope and the unrotated q_pe, each [batch, tokens, heads, width]."""
    if config.q_lora_rank is None:
        query = hidden @ weights["q_proj.weight"].T
    else:
        low_rank = hidden @ weights["q_a_proj.weight"].T
        normed = _rms_norm(low_rank, weights["q_a_layernorm.weight"], config.rms_norm_eps)
        query = normed @ weights["q_b_proj.weight"].T
    per_head = query.reshape(*query.shape[:-1], config.num_heads, -1)
    return per_head[..., : config.qk_nope_head_dim], per_head[..., config.qk_nope_head_dim :]


def _cache_rows(hidden: Tensor, weights: Mapping[str, Tensor], config: MlaConfig) -> tuple[Tensor, Tensor]:
    """Return the normalised latent and the unrotated shared key, each [batch, tokens, width]."""
    joined = hidden @ weights["kv_a_proj_with_mqa.weight"].T
    latent, key = split_latent(joined, config.kv_lora_rank)
    return _rms_norm(latent, weights["kv_a_layernorm.weight"], config.rms_norm_eps), key


def _rotate(x: Tensor, config: MlaConfig) -> Tensor:
    """Rotate [batch, tokens, heads, qk_rope_head_dim] for positions 0, 1, 2, ..."""
    rotate = rotate_interleaved if config.rope_interleave else rotate_half_split
    inv_freq = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    return rotate(x, torch.arange(x.shape[-3]), inv_freq, rope_magnitude(config.yarn))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
