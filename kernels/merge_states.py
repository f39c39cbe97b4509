"""Merging attention states: two of one query's keys, or those of all context-parallel ranks at once."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_last_stride,
    check_no_overlap,
    check_rank,
    check_shape,
    check_size,
    check_tensor,
)
from mla_conformance.kernels.merge_states_triton import merge_shards_kernel, merge_states_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 1024
MAX_SHARDS = 16
ELEMENTS_A_PROGRAM = 2048
"""Rows that a program takes, times their width rounded up to a power of two; fewer where rows are short."""
MAX_ROWS_A_PROGRAM = 128
MAX_ROWS = 2**31 - MAX_ROWS_A_PROGRAM
"""Tokens times heads: their numbers are 32-bit, also in the last program's empty places."""


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two attention states of the same queries into the state over the keys of both.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    A side is empty where its log-sum-exp is -inf or +inf, both of which libraries use for a query without keys
    (vllm-project/vllm#15492). The output of an empty side is not read. With one side empty the result is the other, bit
    for bit; with both, out 0 and lse -inf. A NaN log-sum-exp makes its row NaN. Weights and sums are float32; the
    result is rounded once.

    It works in place: ``out`` may be ``out_a`` or ``out_b`` itself, and ``lse`` likewise ``lse_a`` or ``lse_b``.

    Args:
        out_a: [tokens, heads, width], bfloat16, float16 or float32; width 1 to 1024. Last stride 1, others free.
        lse_a: [tokens, heads] float32, natural logarithms. Any strides: a [heads, tokens] tensor is passed transposed.
        out_b: As out_a, in its dtype; strides of its own.
        lse_b: As lse_a; strides of its own.
        out: [tokens, heads, width] in out_a's dtype, fully written; allocated if None. Last stride 1, others free,
            without overlap; it shares no memory with another argument, except all of it with an input.
        lse: [tokens, heads] float32, fully written; allocated if None. Any strides without overlap; as out.

    Returns:
        ``out`` and ``lse``.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride or device.
        RuntimeError: Triton has no GPU to compile for.
    """
    _check_like("out_a", out_a, None)
    _check_like("out_b", out_b, out_a)
    _check_lse("lse_a", lse_a, out_a)
    _check_lse("lse_b", lse_b, out_a)
    out, lse = _results(out_a, out, lse)
    tokens, heads, width = out_a.shape
    block_r, block_d = _tile(width)
    if tokens > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(out_a):  # type: ignore[no-untyped-call]
            merge_states_kernel[(triton.cdiv(tokens * heads, block_r),)](
                out_a,
                lse_a,
                out_b,
                lse_b,
                out,
                lse,
                tokens * heads,
                heads,
                *out_a.stride()[:2],
                *lse_a.stride(),
                *out_b.stride()[:2],
                *lse_b.stride(),
                *out.stride()[:2],
                *lse.stride(),
                WIDTH=width,
                BLOCK_R=block_r,
                BLOCK_D=block_d,
                num_warps=4,
            )
    return out, lse


def merge_shards(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the attention states of all context-parallel ranks, each over its shard of the keys, at once.

    The rules are those of :func:`merge_states`: a shard is empty where its log-sum-exp is -inf or +inf, and then its
    output is not read; where all are, out is 0 and lse -inf. Sums are float32 in the order of the shards.

    Args:
        outs: [shards, tokens, heads, width], bfloat16, float16 or float32; 1 to 16 shards, width 1 to 1024. Last stride
            1, others free.
        lses: [shards, tokens, heads] float32, natural logarithms. Any strides.
        out: [tokens, heads, width] in outs' dtype, fully written; allocated if None. Last stride 1, others free,
            without overlap. Must not overlap another argument.
        lse: [tokens, heads] float32, fully written; allocated if None. Any strides without overlap. Must not overlap
            another argument.

    Returns:
        ``out`` and ``lse``.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride or device.
        RuntimeError: Triton has no GPU to compile for.
    """
    check_tensor("outs", outs)
    check_rank("outs", outs, "[shards, tokens, heads, width]")
    shards, tokens, heads, width = outs.shape
    check_size("outs", "shards", shards, 1, MAX_SHARDS)
    _check_state("outs", outs)
    check_tensor("lses", lses)
    check_dtype("lses", lses, (torch.float32,))
    check_rank("lses", lses, "[shards, tokens, heads]")
    check_shape("lses", lses, (shards, tokens, heads))
    _check_device("lses", lses, outs)
    out, lse = _results(outs[0], out, lse)
    block_r, block_d = _tile(width)
    if tokens > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(outs):  # type: ignore[no-untyped-call]
            merge_shards_kernel[(triton.cdiv(tokens * heads, block_r),)](
                outs,
                lses,
                out,
                lse,
                tokens * heads,
                heads,
                *outs.stride()[:3],
                *lses.stride(),
                *out.stride()[:2],
                *lse.stride(),
                SHARDS=shards,
                BLOCK_S=triton.next_power_of_2(shards),
                WIDTH=width,
                BLOCK_R=block_r,
                BLOCK_D=block_d,
                num_warps=4,
            )
    return out, lse


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    block_d = triton.next_power_of_2(width)
    return min(ELEMENTS_A_PROGRAM // block_d, MAX_ROWS_A_PROGRAM), block_d


def _results(like: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's buffers, checked, or new ones, for a result of the shape of ``like``."""
    if out is None:
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        _check_like("out", out, like)
        check_no_overlap("out", out)
    if lse is None:
        lse = torch.empty(like.shape[:2], dtype=torch.float32, device=like.device)
    else:
        _check_lse("lse", lse, like)
        check_no_overlap("lse", lse)
    return out, lse


def _check_like(name: str, tensor: Tensor, like: Tensor | None) -> None:
    """Check an output of a state; against ``like``, the first one, unless it is that."""
    check_tensor(name, tensor)
    check_rank(name, tensor, "[tokens, heads, width]")
    if like is None:
        _check_state(name, tensor)
        return
    check_dtype(name, tensor, (like.dtype,))
    check_shape(name, tensor, tuple(like.shape))
    check_last_stride(name, tensor)
    _check_device(name, tensor, like)


def _check_state(name: str, tensor: Tensor) -> None:
    """Check dtype, sizes and last stride of [..., tokens, heads, width]."""
    check_dtype(name, tensor, DTYPES)
    tokens, heads, width = tensor.shape[-3:]
    check_size(name, "width", width, 1, MAX_WIDTH)
    check_size(name, "heads", heads, 1, MAX_ROWS)
    check_size(name, "tokens * heads", tokens * heads, 0, MAX_ROWS)
    check_last_stride(name, tensor)


def _check_lse(name: str, tensor: Tensor, like: Tensor) -> None:
    """Check the log-sum-exp of a state whose output is shaped as ``like``."""
    check_tensor(name, tensor)
    check_dtype(name, tensor, (torch.float32,))
    check_rank(name, tensor, "[tokens, heads]")
    check_shape(name, tensor, tuple(like.shape[:2]))
    _check_device(name, tensor, like)


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the first argument on {like.device}; move them to one device")
