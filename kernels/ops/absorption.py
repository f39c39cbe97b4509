"""The products with one matrix a head as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.kernels import absorption
from mla_conformance.kernels.ops.fake import nothing


@torch.library.custom_op("mla_conformance::absorb_query", mutates_args=())
def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Each head's queries [tokens, heads, qk_nope_head_dim] times its ``W_UK``: [tokens, heads, kv_lora_rank].

    Arguments and errors as :func:`mla_conformance.kernels.absorption.absorb_query`.
    """
    return absorption.absorb_query(q_nope, w_uk)


@torch.library.custom_op("mla_conformance::absorb_query_out", mutates_args=("out",))
def absorb_query_out(q_nope: Tensor, w_uk: Tensor, out: Tensor) -> None:
    """The same into ``out``, which must not overlap another argument."""
    absorption.absorb_query(q_nope, w_uk, out=out)


@torch.library.custom_op("mla_conformance::v_up_proj", mutates_args=())
def v_up_proj(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Each head's latent outputs [tokens, heads, kv_lora_rank] times its ``W_UV``: [tokens, heads, v_head_dim].

    Arguments and errors as :func:`mla_conformance.kernels.absorption.v_up_proj`.
    """
    return absorption.v_up_proj(latent, w_uv)


@torch.library.custom_op("mla_conformance::v_up_proj_out", mutates_args=("out",))
def v_up_proj_out(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """The same into ``out``, with or without a dimension for heads; it must not overlap another argument."""
    absorption.v_up_proj(latent, w_uv, out=out)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty((*rows.shape[:2], weight.shape[2]))


absorb_query.register_fake(_product)
absorb_query_out.register_fake(nothing)
v_up_proj.register_fake(_product)
v_up_proj_out.register_fake(nothing)
