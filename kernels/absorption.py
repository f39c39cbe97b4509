"""The two products that let attention run in the latent space, and the way back: one small matrix for each head."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import absorption_launch, launch
from mla_conformance.kernels.absorption_triton import heads_matmul_kernel
from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_last_stride,
    check_no_overlap,
    check_one_device,
    check_rank,
    check_shape,
    check_size,
    check_tensor,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TOKENS = 2**31 - 1
"""CUDA's limit for the first axis of a grid; a program takes at least as many tokens as a row has tiles."""
MAX_WIDTH = 1024


def absorb_query(q_nope: Tensor, w_uk: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Move queries into the latent space: ``out[t, h] = q_nope[t, h] @ w_uk[h]`` (arXiv:2405.04434, section 2.1.2).

    Args:
        q_nope: [tokens, heads, qk_nope_head_dim], bfloat16, float16 or float32; qk_nope_head_dim 1 to 1024, heads 1 to
            65,535. Last stride 1, others free.
        w_uk: [heads, qk_nope_head_dim, kv_lora_rank] in q_nope's dtype; kv_lora_rank 1 to 1024. One of its last two
            strides must be 1, others free: the key rows of a kv_b_proj weight [rows, kv_lora_rank] in place, vLLM's
            ``W_UK_T``, or a transposed view of a GGUF file's ``attn_k_b`` [heads, kv_lora_rank, qk_nope_head_dim].
        out: Where to write, or None: [tokens, heads, kv_lora_rank] in q_nope's dtype. Last stride 1, others free,
            without overlap. Must not overlap an input.

    Returns:
        ``out``, or a new tensor. Products are summed in float32 (float32 products are IEEE, not TF32), and the sum is
        rounded once, so that a partial sum may exceed what float16 holds (ggml-org/llama.cpp#13137). What a row holds
        beside numbers, NaN say, stays in its own token and head. The same call gives the same bits.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride or device.
        RuntimeError: Triton has no GPU to compile for.
    """
    sizes = ("qk_nope_head_dim", "kv_lora_rank")
    return _multiply(("q_nope", q_nope), ("w_uk", w_uk), sizes, out)


def v_up_proj(latent: Tensor, w_uv: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Bring latent attention outputs to values: ``out[t, h] = latent[t, h] @ w_uv[h]``.

    Args:
        latent: [tokens, heads, kv_lora_rank], bfloat16, float16 or float32; kv_lora_rank 1 to 1024, heads 1 to 65,535.
            Last stride 1, others free.
        w_uv: [heads, kv_lora_rank, v_head_dim] in latent's dtype; v_head_dim 1 to 1024. One of its last two strides
            must be 1, others free: a transposed view of the value rows of a kv_b_proj weight, or vLLM's ``W_UV``.
        out: Where to write, or None: [tokens, heads, v_head_dim] or [tokens, heads * v_head_dim] in latent's dtype,
            such as the first rows of a larger buffer. Last stride 1, others free, without overlap. Nothing but its
            elements is written. Must not overlap an input.

    Returns:
        ``out`` itself, or a new tensor [tokens, heads, v_head_dim]. Rounding as :func:`absorb_query`.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride or device.
        RuntimeError: Triton has no GPU to compile for.
    """
    return _multiply(("latent", latent), ("w_uv", w_uv), ("kv_lora_rank", "v_head_dim"), out)


def _multiply(
    named_x: tuple[str, Tensor], named_weight: tuple[str, Tensor], sizes: tuple[str, str], out: Tensor | None
) -> Tensor:
    _check(named_x, named_weight, sizes, out)
    x, weight = named_x[1], named_weight[1]
    tokens, heads, _ = x.shape
    width = weight.shape[2]
    if out is None:
        out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    if tokens > 0:
        # A row of heads * width elements always splits into heads without a copy: its last stride is 1.
        target = out if out.dim() == 3 else out.view(tokens, heads, width)
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _launch(x, weight, target)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
    tokens, heads, inner = x.shape
    width = weight.shape[2]
    config = absorption_launch.absorption_config(launch.current_target(), x.dtype, tokens)
    tiles = triton.cdiv(tokens, config.block_t) * triton.cdiv(width, config.block_n)
    heads_matmul_kernel[(tiles, heads)](
        x,
        weight,
        out,
        tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        INNER=inner,
        WIDTH=width,
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(
    named_x: tuple[str, Tensor], named_weight: tuple[str, Tensor], sizes: tuple[str, str], out: Tensor | None
) -> None:
    (x_name, x), (weight_name, weight) = named_x, named_weight
    inner_name, width_name = sizes
    tensors = {x_name: x, weight_name: weight} | ({} if out is None else {"out": out})
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    check_one_device(tensors)
    check_dtype(x_name, x, DTYPES)
    check_rank(x_name, x, f"[tokens, heads, {inner_name}]")
    tokens, heads, inner = x.shape
    check_size(x_name, "tokens", tokens, 0, MAX_TOKENS)
    check_size(x_name, "heads", heads, 1, launch.MAX_GRID_YZ)
    check_size(x_name, inner_name, inner, 1, MAX_WIDTH)
    check_last_stride(x_name, x)

    check_dtype(weight_name, weight, (x.dtype,))
    check_rank(weight_name, weight, f"[heads, {inner_name}, {width_name}]")
    width = weight.shape[2]
    check_size(weight_name, width_name, width, 1, MAX_WIDTH)
    check_shape(weight_name, weight, (heads, inner, width))
    if 1 not in weight.stride()[1:] and inner > 1 and width > 1:
        raise ValueError(f"{weight_name} has strides {weight.stride()}; one of its last two must be 1")

    if out is not None:
        check_dtype("out", out, (x.dtype,))
        flat = weight_name == "w_uv" and out.dim() == 2
        check_shape("out", out, (tokens, heads * width) if flat else (tokens, heads, width))
        check_last_stride("out", out)
        check_no_overlap("out", out)
