"""MLA decode in two independent forms, and the paged form that the kernels are judged against.

The absorbed form attends in the latent space, where all heads share one key row per token. The expanded form
rebuilds every head's own keys and values first and then attends as any other attention does. They share no
code, and compute softmax and LSE in different ways, so that one mistake cannot hide in both.

Source of both forms: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.reference.paged_cache import gather, split_latent


class DecodeResult(NamedTuple):
    """What attention returns: `out` [..., heads, width] and `lse` [..., heads].

    `lse` is the natural logarithm of the sum of exp(scaled score) over the keys. No keys at all is the
    identity of the merge: out 0, lse -inf (vllm-project/vllm#27491). Both have the dtype of the query.
    """

    out: Tensor
    lse: Tensor


def decode_absorbed(q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, softmax_scale: float) -> DecodeResult:
    """Attend from one token of one request in the latent space.

    Args:
        q_nope: [heads, kv_lora_rank], already multiplied by W_UK.
        q_pe: [heads, qk_rope_head_dim], already rotated; the width may be 0.
        ckv: [tokens, kv_lora_rank], normalised latent rows: the keys and the values. tokens may be 0.
        kpe: [tokens, qk_rope_head_dim], already rotated.
        softmax_scale: factor on the scores; a property of the model, not of these widths.

    Returns:
        out [heads, kv_lora_rank], still in the latent space, and lse [heads].

    Raises:
        ValueError: if shapes disagree or the scale is not finite.
        TypeError: if the four tensors differ in dtype or are not floating point.

    """
    _check_same_float_dtype(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe)
    _check_shape("q_nope", q_nope, (None, None))
    _check_shape("q_pe", q_pe, (q_nope.shape[0], None))
    _check_shape("ckv", ckv, (None, q_nope.shape[1]))
    _check_shape("kpe", kpe, (ckv.shape[0], q_pe.shape[1]))
    _check_scale(softmax_scale)

    if ckv.shape[0] == 0:
        return DecodeResult(torch.zeros_like(q_nope), q_nope.new_full(q_nope.shape[:1], -math.inf))
    scores = (q_nope @ ckv.T + q_pe @ kpe.T) * softmax_scale
    largest = scores.max(dim=1).values
    weights = torch.exp(scores - largest[:, None])
    total = weights.sum(dim=1)
    return DecodeResult(out=(weights @ ckv) / total[:, None], lse=largest + torch.log(total))


def decode_expanded(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    softmax_scale: float,
) -> DecodeResult:
    """Attend from one token of one request with every head's keys and values written out.

    Args:
        q_nope: [heads, qk_nope_head_dim], not absorbed.
        q_pe: [heads, qk_rope_head_dim], already rotated; the width may be 0.
        ckv: [tokens, kv_lora_rank], normalised latent rows. tokens may be 0.
        kpe: [tokens, qk_rope_head_dim], already rotated, the same for all heads.
        w_uk: [heads, qk_nope_head_dim, kv_lora_rank], latent to key.
        w_uv: [heads, v_head_dim, kv_lora_rank], latent to value.
        softmax_scale: factor on the scores.

    Returns:
        out [heads, v_head_dim] and lse [heads].

    Raises:
        ValueError: if the shapes of two arguments disagree.
        TypeError: if the tensors differ in dtype.

    """
    if not w_uk.dim() == w_uv.dim() == 3 or kpe.dim() != 2:
        raise ValueError("w_uk and w_uv must have three dimensions and kpe two")
    heads, nope_dim, latent_dim = w_uk.shape
    expected = {
        "q_nope": (q_nope, (heads, nope_dim)),
        "q_pe": (q_pe, (heads, kpe.shape[-1])),
        "ckv": (ckv, (kpe.shape[0], latent_dim)),
        "w_uv": (w_uv, (heads, w_uv.shape[1], latent_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; w_uk and kpe ask for {shape}")
    for name, tensor in {"q_pe": q_pe, "ckv": ckv, "kpe": kpe, "w_uk": w_uk, "w_uv": w_uv}.items():
        if tensor.dtype != q_nope.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and q_nope is {q_nope.dtype}; widen to one dtype")

    out = q_nope.new_zeros(heads, w_uv.shape[1])
    lse = q_nope.new_full((heads,), -math.inf)
    if ckv.shape[0] == 0:
        return DecodeResult(out, lse)
    for head in range(heads):
        query = torch.cat([q_nope[head], q_pe[head]])
        keys = torch.cat([ckv @ w_uk[head].T, kpe], dim=1)
        values = ckv @ w_uv[head].T
        scores = softmax_scale * (keys * query).sum(dim=1)
        out[head] = (torch.softmax(scores, dim=0)[:, None] * values).sum(dim=0)
        lse[head] = torch.logsumexp(scores, dim=0)
    return DecodeResult(out, lse)


def decode_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    cache_scale: float = 1.0,
) -> DecodeResult:
    """Attend from one token of each request of a batch, reading only the cache slots in use.

    Args:
        q_nope: [requests, heads, kv_lora_rank], already multiplied by W_UK.
        q_pe: [requests, heads, qk_rope_head_dim], already rotated.
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], latent first, in any floating
            dtype. Rows are widened to the dtype of `q_nope` and then multiplied by `cache_scale`.
        block_table: [requests, max_pages] page numbers; entries past the length are never read.
        seq_lens: [requests] tokens of each request; 0 gives out 0 and lse -inf.
        softmax_scale: factor on the scores.
        cache_scale: value of one unit of the stored cache, latent and rope alike.

    Returns:
        out [requests, heads, kv_lora_rank] and lse [requests, heads].

    Raises:
        ValueError: if shapes disagree, a length does not fit the block table, or a page number in use is out
            of range.
        TypeError: if the queries differ in dtype or are not floating point.

    """
    _check_shape("q_nope", q_nope, (None, None, None))
    requests, heads, kv_lora_rank = q_nope.shape
    _check_shape("q_pe", q_pe, (requests, heads, None))
    _check_shape("kv_cache", kv_cache, (None, None, kv_lora_rank + q_pe.shape[2]))
    _check_shape("block_table", block_table, (requests, None))
    _check_shape("seq_lens", seq_lens, (requests,))

    out = torch.zeros_like(q_nope)
    lse = q_nope.new_full((requests, heads), -math.inf)
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = gather(kv_cache, block_table[request], seq_len).to(q_nope.dtype) * cache_scale
        ckv, kpe = split_latent(rows, kv_lora_rank)
        result = decode_absorbed(q_nope[request], q_pe[request], ckv, kpe, softmax_scale=softmax_scale)
        out[request], lse[request] = result
    return DecodeResult(out, lse)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """Compare a shape with one where None stands for any size."""
    matches = tensor.dim() == len(expected) and all(
        want is None or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}]")


def _check_same_float_dtype(**tensors: Tensor) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) != 1 or not next(iter(dtypes.values())).is_floating_point:
        raise TypeError(f"expected one floating dtype for all tensors, got {dtypes}; widen them before the call")


def _check_scale(softmax_scale: float) -> None:
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be finite")
