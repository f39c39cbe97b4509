"""Merges of attention states as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.kernels import merge_states as merges
from mla_conformance.kernels.ops.fake import nothing


@torch.library.custom_op("mla_conformance::merge_states", mutates_args=())
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states: out [tokens, heads, width] in out_a's dtype, and float32 lse [tokens, heads].

    Arguments and errors as :func:`mla_conformance.kernels.merge_states.merge_states`.
    """
    return merges.merge_states(out_a, lse_a, out_b, lse_b)


@torch.library.custom_op("mla_conformance::merge_states_out", mutates_args=("out", "lse"))
def merge_states_out(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """The same into ``out`` and ``lse``; as an operator it does not work in place: neither may overlap an argument."""
    merges.merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)


@torch.library.custom_op("mla_conformance::merge_shards", mutates_args=())
def merge_shards(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of all context-parallel ranks, [shards, tokens, heads, width]: out and float32 lse.

    Arguments and errors as :func:`mla_conformance.kernels.merge_states.merge_shards`.
    """
    return merges.merge_shards(outs, lses)


@torch.library.custom_op("mla_conformance::merge_shards_out", mutates_args=("out", "lse"))
def merge_shards_out(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """The same into ``out`` and ``lse``; neither may overlap another argument."""
    merges.merge_shards(outs, lses, out=out, lse=lse)


def _merged(out_a: Tensor, *_others: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), out_a.new_empty(out_a.shape[:-1], dtype=torch.float32)


def _merged_shards(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


merge_states.register_fake(_merged)
merge_states_out.register_fake(nothing)
merge_shards.register_fake(_merged_shards)
merge_shards_out.register_fake(nothing)
