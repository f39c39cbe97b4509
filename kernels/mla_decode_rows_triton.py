# mypy: ignore-errors
"""What the two kernels of ``mla_decode`` must agree on: how long a request is and where it is cut."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_length(seq_lens_ptr, seq_lens_stride, request, table_width, PAGE_SIZE: tl.constexpr):
    """Tokens of a request as int32, and whether it has more than its block table can name.

    Such a request counts as empty, so that nothing is read past the table. The comparison happens in the dtype of
    seq_lens: narrowing first would let 2**32 + 5 pass as 5.
    """
    seq_len = tl.load(seq_lens_ptr + request.to(tl.int64) * seq_lens_stride)
    too_long = seq_len > table_width * PAGE_SIZE
    usable = tl.where(too_long | (seq_len < 0), 0, seq_len)
    return usable.to(tl.int32), too_long


@triton.jit
def tokens_per_split(seq_len, num_splits, BLOCK_N: tl.constexpr):
    """Tokens of every split of a request but its last: the even share, rounded up to whole tiles.

    It sees the request's own length only, so what the others of the batch hold cannot move a cut. Whole tiles leave
    only the last tile partly filled and put every tile start on a multiple of BLOCK_N.
    """
    return tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
