"""The cases of the corpus: each builds its inputs from a fixed seed and launches one or two kernels.

Kernels that move, reduce and count are listed here; ``launches_dot`` adds matrix products, ``launches_numbers``
functions, arithmetic and conversions, ``launches_models`` the decode and GGUF kernels of vLLM and of this repository.
"""

from __future__ import annotations

from functools import partial

import torch

from mla_conformance.suites.corpus import kernels, launches_dot, launches_models, launches_numbers
from mla_conformance.suites.corpus.case import Case, blank, draw


def cases() -> list[Case]:
    """Return all cases."""
    others = [*launches_dot.cases(), *launches_numbers.cases(), *launches_models.cases()]
    return [*_cache(), *_rows(), *_control(), *others]


def _cache() -> list[Case]:
    def scatter(device: torch.device) -> None:
        rows = draw((9, 100), torch.bfloat16, device)[:, :80]
        slots = torch.tensor([3, -1, 17, 0, 31, 8, -5, 22, 9], device=device)
        cache = blank((32, 88), torch.bfloat16, device)
        kernels.scatter_rows[(9,)](rows, slots, cache, 80, rows.stride(0), 88, BLOCK=128, num_warps=1)

    def gather(dtype: torch.dtype, device: torch.device) -> None:
        cache = draw((7, 16, 40), torch.float32, device).to(dtype)
        table = torch.tensor([5, 1, 6, 2], dtype=torch.int32, device=device)
        out = blank((50, 40), dtype, device)
        kernels.gather_pages[(7,)](cache, table, out, 50, 40, PAGE=16, BLOCK=64, num_warps=2)

    def quantise(dtype: torch.dtype, source: torch.dtype, device: torch.device) -> None:
        x = draw((6, 200), source, device, scale=100)
        out = blank((6, 200), dtype, device)
        kernels.quantise_rows[(6,)](x, out, 1.7, 200, LIMIT=torch.finfo(dtype).max, BLOCK=256)

    def copy(dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> None:
        x = draw((23, 31, 3), torch.float32, device).to(dtype)[:, :, 1]
        out = blank((31, 29), out_dtype, device)[:, :23].t()
        kernels.copy_strided[(2, 2)](x, out, 23, 31, *x.stride(), *out.stride(), BN=16, BM=16, num_warps=2)

    def transpose(dtype: torch.dtype, device: torch.device) -> None:
        x = draw((32, 64), dtype, device)
        kernels.transpose_tile[(1,)](x, blank((64, 32), dtype, device), N=32, M=64)

    bf16, f32, e4m3, e5m2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
    return [
        Case("cache_scatter_bf16", scatter, exact=True),
        Case("cache_gather_bf16", partial(gather, bf16), exact=True),
        Case("cache_gather_e4m3", partial(gather, e4m3), exact=True),
        Case("cache_quantise_e4m3", partial(quantise, e4m3, f32), exact=True),
        Case("cache_quantise_e5m2", partial(quantise, e5m2, bf16), exact=True),
        Case("cache_copy_bf16", partial(copy, bf16, bf16), exact=True),
        Case("cache_copy_bf16_f32", partial(copy, bf16, f32), exact=True),
        Case("cache_copy_e4m3_bf16", partial(copy, e4m3, bf16), exact=True),
        Case("cache_transpose_bf16", partial(transpose, bf16), exact=True),
        Case("cache_transpose_f32", partial(transpose, f32), exact=True),
        Case("cache_transpose_i8", partial(transpose, torch.int8), exact=True),
    ]


def _rows() -> list[Case]:
    def reduce(what: str, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> None:
        x = draw((16, 100), dtype, device)
        kernels.reduce_rows[(1,)](x, blank((16,), out_dtype, device), 100, ROWS=16, BLOCK=128, WHAT=what)

    def scan(what: str, dtype: torch.dtype, device: torch.device) -> None:
        x = draw((3, 256), dtype, device, scale=0.3)
        x = 1 + x * 0.1 if what == "product" else x
        y = draw((3, 256), dtype, device, 1)
        kernels.scan_rows[(3,)](x, y, blank((3, 256), dtype, device), BLOCK=256, WHAT=what)

    def softmax(dtype: torch.dtype, device: torch.device) -> None:
        x = draw((4, 300), dtype, device, scale=3)
        kernels.softmax_rows[(4,)](x, blank((4, 300), dtype, device), 300, BLOCK=512)

    def layer_norm(dtype: torch.dtype, fusion: bool, device: torch.device) -> None:
        x, gain, bias = draw((4, 200), dtype, device), draw((200,), dtype, device, 1), draw((200,), dtype, device, 2)
        out = blank((4, 200), dtype, device)
        kernels.layer_norm[(4,)](x, gain, bias, out, 200, 1e-5, BLOCK=256, enable_fp_fusion=fusion)

    def sort(dtype: torch.dtype, descending: bool, device: torch.device) -> None:
        x = draw((3, 128), dtype, device)
        kernels.sort_rows[(3,)](x, blank((3, 128), dtype, device), BLOCK=128, DESCENDING=descending)

    def histogram(device: torch.device) -> None:
        x = draw((4, 256), torch.int32, device) % 32
        kernels.count_values[(4,)](x, torch.zeros(32, dtype=torch.int32, device=device), BLOCK=256, BINS=32)

    def atomics(device: torch.device) -> None:
        x = draw((3, 128), torch.float32, device, scale=9)
        bins = draw((3, 128), torch.int32, device) % 16
        sums = torch.zeros(16, device=device)
        tops = torch.full((16,), -1e30, device=device)
        bits = torch.arange(64 + 384, dtype=torch.int32, device=device) % 384
        bits[64:] = torch.arange(384, dtype=torch.int32, device=device) // 2 * 2
        old = blank((384,), torch.int32, device)
        kernels.atomics[(3,)](x, bins, sums, tops, bits, old, BLOCK=128)

    bf16, f16, f32, i32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
    return [
        Case("rows_sum_f32", partial(reduce, "sum", f32, f32)),
        Case("rows_sum_bf16", partial(reduce, "sum", bf16, f32)),
        Case("rows_sum_i64", partial(reduce, "sum", torch.int64, torch.int64), exact=True),
        Case("rows_max_f16", partial(reduce, "max", f16, f16), exact=True),
        Case("rows_argmax_f32", partial(reduce, "argmax", f32, i32), exact=True),
        Case("rows_argmin_bf16", partial(reduce, "argmin", bf16, i32), exact=True),
        Case("rows_xor_i32", partial(reduce, "xor", i32, i32), exact=True),
        Case("rows_cumsum_f32", partial(scan, "sum", f32)),
        Case("rows_cumsum_i32", partial(scan, "sum", i32), exact=True),
        Case("rows_cumprod_f32", partial(scan, "product", f32)),
        Case("rows_recurrence_f32", partial(scan, "affine", f32)),
        Case("rows_softmax_f32", partial(softmax, f32)),
        Case("rows_softmax_bf16", partial(softmax, bf16)),
        Case("rows_layer_norm_f32", partial(layer_norm, f32, True)),
        Case("rows_layer_norm_f32_unfused", partial(layer_norm, f32, False)),
        Case("rows_layer_norm_f16", partial(layer_norm, f16, True)),
        Case("rows_sort_f32", partial(sort, f32, False), exact=True),
        Case("rows_sort_i16", partial(sort, torch.int16, True), exact=True),
        Case("rows_sort_bf16", partial(sort, bf16, True), exact=True),
        Case("rows_histogram", histogram, exact=True),
        Case("rows_atomics", atomics, exact=True),
    ]


def _control() -> list[Case]:
    def collatz(device: torch.device) -> None:
        x = torch.tensor([1, 7, 27, 97, 6171, 2, 871, 703], dtype=torch.int32, device=device)
        kernels.collatz[(8,)](x, blank((8,), torch.int32, device), num_warps=1)

    def dropout(device: torch.device) -> None:
        x = draw((700,), torch.float32, device)
        out, words = blank((700,), torch.float32, device), blank((700,), torch.int32, device)
        kernels.dropout[(3,)](x, out, words, 700, 0.5, 12_345, BLOCK=256)

    return [Case("control_collatz", collatz, exact=True), Case("control_dropout", dropout, exact=True)]
