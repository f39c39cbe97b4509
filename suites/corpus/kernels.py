# mypy: ignore-errors
"""Tutorial-size Triton kernels that together use most of what Triton compiles to on sm_90, wgmma apart."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def scatter_rows(rows_ptr, slots_ptr, cache_ptr, width, row_stride, slot_stride, BLOCK: tl.constexpr):
    """Write row i at ``slots[i]`` of the cache; a negative slot drops the row."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(rows_ptr + row * row_stride + columns, mask=inside)
    tl.store(cache_ptr + slot.to(tl.int64) * slot_stride + columns, values, mask=inside)


@triton.jit
def gather_pages(cache_ptr, table_ptr, out_ptr, tokens, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy token t of a paged cache to row t, 8 tokens a program."""
    token = tl.program_id(0) * 8 + tl.arange(0, 8)
    page = tl.load(table_ptr + token // PAGE, mask=token < tokens, other=0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (columns < width)[None, :]
    source = cache_ptr + (page * PAGE + token % PAGE)[:, None] * width + columns[None, :]
    values = tl.load(source, mask=inside, other=0.0)
    tl.store(out_ptr + token[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def quantise_rows(x_ptr, out_ptr, inverse_scale, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Scale, clamp and round to the 8-bit dtype of the output."""
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < width
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse_scale
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def copy_strided(x_ptr, out_ptr, n, m, x_n, x_m, out_n, out_m, BN: tl.constexpr, BM: tl.constexpr):
    """Copy and convert [n, m] between any strides; a transpose is a matter of strides."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    j = tl.program_id(1) * BM + tl.arange(0, BM)[None, :]
    inside = (i < n) & (j < m)
    values = tl.load(x_ptr + i * x_n + j * x_m, mask=inside)
    tl.store(out_ptr + i * out_n + j * out_m, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def transpose_tile(x_ptr, out_ptr, N: tl.constexpr, M: tl.constexpr):
    """Transpose one tile in registers and shared memory, both sides contiguous."""
    x = tl.load(x_ptr + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :])
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.trans(x))


@triton.jit
def reduce_rows(x_ptr, out_ptr, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    """Reduce each of ROWS rows to one number: sum, max, min, argmax, argmin or xor."""
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = x_ptr + row[:, None] * width + columns[None, :]
    inside = columns[None, :] < width
    if WHAT == "sum":
        result = tl.sum(tl.load(at, mask=inside, other=0).to(out_ptr.dtype.element_ty), 1)
    elif WHAT == "max":
        result = tl.max(tl.load(at, mask=inside, other=float("-inf")), 1)
    elif WHAT == "argmax":
        result = tl.argmax(tl.load(at, mask=inside, other=float("-inf")), 1)
    elif WHAT == "argmin":
        result = tl.argmin(tl.load(at, mask=inside, other=float("inf")), 1)
    else:
        result = tl.xor_sum(tl.load(at, mask=inside, other=0), 1)
    tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _affine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scan_rows(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    """Scan one row: cumulative sum, reversed product, or the recurrence ``h = x h + y``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if WHAT == "sum":
        result = tl.cumsum(x, 0)
    elif WHAT == "product":
        result = tl.cumprod(x, 0, reverse=True)
    else:
        _, result = tl.associative_scan((x, tl.load(y_ptr + at)), 0, _affine)
    tl.store(out_ptr + at, result)


@triton.jit
def softmax_rows(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Softmax of one row a program."""
    columns = tl.arange(0, BLOCK)
    at = tl.program_id(0) * width + columns
    x = tl.load(x_ptr + at, mask=columns < width, other=float("-inf")).to(tl.float32)
    weight = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + at, (weight / tl.sum(weight, 0)).to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def layer_norm(x_ptr, gain_ptr, bias_ptr, out_ptr, width, epsilon, BLOCK: tl.constexpr):
    """Layer norm of one row a program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + tl.program_id(0) * width + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + epsilon)
    gain = tl.load(gain_ptr + columns, mask=inside)
    bias = tl.load(bias_ptr + columns, mask=inside)
    y = centred * inverse * gain + bias
    tl.store(out_ptr + tl.program_id(0) * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sort_rows(x_ptr, out_ptr, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    """Sort one row a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at), descending=DESCENDING))


@triton.jit
def count_values(x_ptr, out_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Histogram in shared memory, added to a common one."""
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


@triton.jit
def atomics(x_ptr, bins_ptr, sums_ptr, tops_ptr, bits_ptr, old_ptr, BLOCK: tl.constexpr):
    """Atomics of which no result depends on the order: integers, maxima, bits and sums of small whole numbers."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane)
    bins = tl.load(bins_ptr + lane)
    tl.atomic_add(sums_ptr + bins, tl.floor(x))
    tl.atomic_max(tops_ptr + bins, x)
    tl.atomic_or(bits_ptr + bins, 1 << (lane % 32))
    tl.atomic_xor(bits_ptr + 16 + bins, lane * 40503)
    tl.atomic_min(bits_ptr + 32 + bins, lane - 37)
    tl.store(old_ptr + lane, tl.atomic_cas(bits_ptr + 64 + lane, lane, bins))
    tl.atomic_xchg(bits_ptr + 64 + lane, bins + 7, mask=lane % 3 == 0)


@triton.jit
def elementwise_math(x_ptr, out_ptr, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    """One function of every element."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if WHAT == "exp":
        y = tl.exp(x)
    elif WHAT == "exp2":
        y = tl.exp2(x)
    elif WHAT == "log":
        y = tl.log(x)
    elif WHAT == "log2":
        y = tl.log2(x)
    elif WHAT == "sin":
        y = tl.sin(x)
    elif WHAT == "cos":
        y = tl.cos(x)
    elif WHAT == "erf":
        y = tl.erf(x)
    elif WHAT == "tanh":
        y = libdevice.tanh(x)
    elif WHAT == "sigmoid":
        y = tl.sigmoid(x)
    elif WHAT == "sqrt":
        y = tl.sqrt(x) + tl.rsqrt(x)
    elif WHAT == "sqrt_rn":
        y = tl.sqrt_rn(x)
    else:
        y = tl.floor(x) + tl.ceil(x * 0.5) + tl.abs(x)
    tl.store(out_ptr + at, y)


@triton.jit
def float_arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Sum, product, quotient, maximum, fused and chained expressions, in the dtype of the inputs."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    y = tl.load(y_ptr + at, mask=at < n, other=1.0)
    results = (x + y, x * y, x / y, tl.maximum(x, y), tl.fma(x, y, x), x * x - y * y, -x)
    for i in tl.static_range(7):
        tl.store(out_ptr + i * n + at, results[i].to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def divide_rounded(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    """Correctly rounded quotient."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.div_rn(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def integer_arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Quotient, remainder, product, shifts, bits, order, in the integer dtype of the inputs."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1)
    y = tl.load(y_ptr + at, mask=at < n, other=1)
    shift = (y & 7).to(x.dtype)
    tl.store(out_ptr + at, x // y, mask=at < n)
    tl.store(out_ptr + n + at, x % y, mask=at < n)
    tl.store(out_ptr + 2 * n + at, x * y - x, mask=at < n)
    tl.store(out_ptr + 3 * n + at, x << shift, mask=at < n)
    tl.store(out_ptr + 4 * n + at, x >> shift, mask=at < n)
    tl.store(out_ptr + 5 * n + at, (x & y) ^ (~x | y), mask=at < n)
    tl.store(out_ptr + 6 * n + at, tl.where(x < y, x, y), mask=at < n)


@triton.jit
def high_product(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    """High half of the unsigned product."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.umulhi(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def convert(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Convert to the dtype of the output."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def collatz(x_ptr, out_ptr):
    """Steps to 1, one number a program: programs loop a different number of times."""
    x = tl.load(x_ptr + tl.program_id(0)).to(tl.int64)
    steps = 0
    while x != 1:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    tl.store(out_ptr + tl.program_id(0), steps)


@triton.jit
def dropout(x_ptr, out_ptr, random_ptr, n, probability, seed, BLOCK: tl.constexpr):
    """Drop elements by Philox; the random words are stored too."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > probability
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, tl.where(keep, x / (1 - probability), 0.0), mask=at < n)
    tl.store(random_ptr + at, tl.randint(seed, at), mask=at < n)


@triton.jit
def interleave_bytes(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Unpack 4-bit numbers: low and high half of each byte side by side, then reversed, added and gathered."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    both = tl.interleave((x & 15).to(tl.int8), (x >> 4).to(tl.int8) - 8)
    wide = tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + wide, both + tl.flip(both, 0))
    tl.store(out_ptr + 2 * BLOCK + wide, tl.gather(both, (wide * 7) % (2 * BLOCK), 0))
