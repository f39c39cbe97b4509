# mypy: ignore-errors
"""Tutorial-size Triton kernels with matrix products; tiles of 16 or 32 rows keep sm_90 on mma.sync."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, m, n, k, a_m, a_k, b_k, b_n, c_m, c_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """C = A B, one tile a program."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_ptrs = a_ptr + i[:, None] * a_m + inner[None, :] * a_k
    b_ptrs = b_ptr + inner[:, None] * b_k + j[None, :] * b_n
    acc = tl.zeros((BM, BN), dtype=ACCUMULATOR)
    for start in range(0, k, BK):
        a = tl.load(a_ptrs, mask=(i[:, None] < m) & (start + inner[None, :] < k), other=0.0)
        b = tl.load(b_ptrs, mask=(start + inner[:, None] < k) & (j[None, :] < n), other=0.0)
        acc = tl.dot(a, b, acc=acc, input_precision=PRECISION, out_dtype=ACCUMULATOR)
        a_ptrs += BK * a_k
        b_ptrs += BK * b_k
    c_ptrs = c_ptr + i[:, None] * c_m + j[None, :] * c_n
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))


@triton.jit
def causal_attention(q_ptr, k_ptr, v_ptr, out_ptr, tokens, scale, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Causal softmax attention of one head with a running maximum; ``scale`` includes log2(e)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + row[:, None] * DIM + dims[None, :], mask=row[:, None] < tokens, other=0.0)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, DIM), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        key = start + tl.arange(0, BLOCK)
        at = key[:, None] * DIM + dims[None, :]
        k = tl.load(k_ptr + at, mask=key[:, None] < tokens, other=0.0)
        v = tl.load(v_ptr + at, mask=key[:, None] < tokens, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where((key[None, :] <= row[:, None]) & (key[None, :] < tokens), score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc=acc * shrink[:, None])
        top = new_top
    out = out_ptr + row[:, None] * DIM + dims[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row[:, None] < tokens)


@triton.jit
def matrix_instruction(a_ptr, b_ptr, c_ptr, d_ptr, ASSEMBLY: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """One ``mma.sync`` a program of one warp: every lane hands over four words of A, of B and of C."""
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    a, b, c = tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(c_ptr + at)
    d = tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [a, b, c], dtype=c.dtype, is_pure=True, pack=4)
    tl.store(d_ptr + at, d)
