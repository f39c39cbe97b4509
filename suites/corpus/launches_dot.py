"""The cases with matrix products: tiled products, attention, and single matrix instructions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_conformance.suites.corpus import kernels_dot
from mla_conformance.suites.corpus.case import Case, blank, draw


def cases() -> list[Case]:
    """Return the cases."""
    return [*_products(), *_instructions()]


@dataclass(frozen=True)
class _Product:
    a: torch.dtype
    out: torch.dtype = torch.float32
    accumulator: Any = tl.float32
    precision: str = "tf32"
    tile: tuple[int, int, int] = (16, 32, 32)
    warps: int = 4
    stages: int = 1
    transposed: bool = False

    def run(self, device: torch.device) -> None:
        m, n, k = 37, 40, 96
        a = draw((m, k), torch.float32, device) if self.a.is_floating_point else draw((m, k), self.a, device)
        b = draw((n, k), torch.float32, device, 1) if self.a.is_floating_point else draw((n, k), self.a, device, 1)
        a, b = a.to(self.a), b.to(self.a).t()
        b = b if self.transposed else b.contiguous()
        c = blank((m, n), self.out, device)
        bm, bn, bk = self.tile
        grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))
        kernels_dot.matmul[grid](
            a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), BM=bm, BN=bn, BK=bk,
            PRECISION=self.precision, ACCUMULATOR=self.accumulator, num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip


def _products() -> list[Case]:
    bf16, f16, f32, i8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    products = {
        "bf16": _Product(bf16),
        "bf16_3_stages": _Product(bf16, bf16, stages=3),
        "bf16_transposed": _Product(bf16, tile=(32, 16, 64), warps=2, transposed=True),
        "bf16_64_rows_2_warps": _Product(bf16, tile=(64, 32, 32), warps=2, stages=2),
        "f16": _Product(f16, f16, warps=1),
        "f16_3_stages": _Product(f16, tile=(32, 32, 32), stages=3, transposed=True),
        "f16_accumulator": _Product(f16, f16, tl.float16, tile=(32, 32, 32)),
        "e4m3": _Product(e4m3),
        "e4m3_3_stages": _Product(e4m3, bf16, stages=3, transposed=True),
        "e5m2": _Product(e5m2, warps=2, transposed=True),
        "tf32": _Product(f32),
        "tf32_3_stages": _Product(f32, stages=3, transposed=True),
        "3xtf32": _Product(f32, precision="tf32x3"),
        "ieee": _Product(f32, precision="ieee", tile=(16, 16, 16)),
        "i8": _Product(i8, torch.int32, tl.int32),
        "i8_3_stages": _Product(i8, torch.int32, tl.int32, stages=3, transposed=True, warps=2),
    }

    def attention(dtype: torch.dtype, stages: int, device: torch.device) -> None:
        q, k, v = (draw((70, 32), dtype, device, seed) for seed in range(3))
        out = blank((70, 32), dtype, device)
        scale = math.log2(math.e) / math.sqrt(32)
        kernels_dot.causal_attention[(3,)](q, k, v, out, 70, scale, BLOCK=32, DIM=32, num_stages=stages)

    return [
        *(Case(f"dot_{name}", product.run, exact=product.a == i8) for name, product in products.items()),
        Case("dot_attention_f16", partial(attention, f16, 1)),
        Case("dot_attention_bf16_2_stages", partial(attention, bf16, 2)),
    ]


def _instructions() -> list[Case]:
    """Single matrix instructions on operands of very different magnitude, where the order of summation shows.

    Triton turns fp8 products into float16 ones on sm_90, so that only these reach the fp8 instructions.
    """
    programs, registers = 6, 4

    def run(shape: str, types: str, a: torch.dtype, b: torch.dtype, device: torch.device) -> None:
        result = torch.int32 if a == torch.int8 else torch.float32
        letter = "r" if a == torch.int8 else "f"
        constraints = ",".join(["=" + letter] * 4 + ["r"] * 8 + [letter] * 4)
        assembly = (
            f"mma.sync.aligned.{shape}.row.col.{types} "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$12,$13,$14,$15};"
        )
        words = (programs * 32 * registers,)
        c = draw(words, torch.float32, device, 5, scale=4.0) if result == torch.float32 else draw(words, result, device)
        c = c // 2 if result == torch.int32 else c
        kernels_dot.matrix_instruction[(programs,)](
            _operands(words[0], a, 0).to(device), _operands(words[0], b, 2).to(device), c, blank(words, result, device),
            ASSEMBLY=assembly, CONSTRAINTS=constraints, num_warps=1,
        )  # fmt: skip

    bf16, f16, f32, i8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    forms = {
        "bf16": ("m16n8k16", "f32.bf16.bf16.f32", bf16, bf16),
        "f16": ("m16n8k16", "f32.f16.f16.f32", f16, f16),
        "tf32": ("m16n8k8", "f32.tf32.tf32.f32", f32, f32),
        "e4m3": ("m16n8k32", "f32.e4m3.e4m3.f32", e4m3, e4m3),
        "e5m2": ("m16n8k32", "f32.e5m2.e5m2.f32", e5m2, e5m2),
        "e4m3_e5m2": ("m16n8k32", "f32.e4m3.e5m2.f32", e4m3, e5m2),
        "i8": ("m16n8k32", "s32.s8.s8.s32", i8, i8),
    }
    return [Case(f"dot_instruction_{name}", partial(run, *form), exact=name == "i8") for name, form in forms.items()]


def _operands(words: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Words full of finite numbers of ``dtype`` whose exponents vary by a few bits: int32 [words]."""
    count, cpu = words * 4 // dtype.itemsize, torch.device("cpu")
    if not dtype.is_floating_point:
        return draw((count,), dtype, cpu, seed).view(torch.int32)
    spread = torch.exp2(draw((count,), torch.float32, cpu, seed + 1, scale=2.0).round())
    return (draw((count,), torch.float32, cpu, seed) * spread).clamp(-400, 400).to(dtype).view(torch.int32)
