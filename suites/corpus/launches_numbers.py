"""The cases about numbers: functions, arithmetic of every dtype, and conversions."""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
from torch import Tensor

from mla_conformance.suites.corpus import kernels
from mla_conformance.suites.corpus.case import Case, blank, draw


def cases() -> list[Case]:
    """Return the cases."""
    return [*_math(), *_integers(), *_conversions()]


def _math() -> list[Case]:
    def function(what: str, x: Tensor, device: torch.device) -> None:
        x = x.to(device)
        kernels.elementwise_math[(2,)](x, torch.full_like(x, math.nan), BLOCK=256, WHAT=what)

    def arithmetic(dtype: torch.dtype, fusion: bool, device: torch.device) -> None:
        x, y = draw((200,), dtype, device, scale=3), draw((200,), dtype, device, 1)
        out = blank((7, 200), dtype, device)
        kernels.float_arithmetic[(1,)](x, y, out, 200, BLOCK=256, enable_fp_fusion=fusion)

    def divide(device: torch.device) -> None:
        x, y = draw((256,), torch.float32, device, scale=1e3), draw((256,), torch.float32, device, 1)
        kernels.divide_rounded[(1,)](x, y, blank((256,), torch.float32, device), BLOCK=256)

    cpu = torch.device("cpu")
    signed = draw((512,), torch.float32, cpu, scale=3)
    positive = torch.exp2(draw((512,), torch.float32, cpu, scale=20))
    positive[:4] = torch.tensor([0.0, 1.0, math.inf, 1e-42])
    wide = torch.cat([signed[:256], signed[256:] * 40])
    wide[:4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    angles = torch.cat([signed[:256], signed[256:] * 1e6])
    functions = {
        "exp": wide, "exp2": wide, "log": positive, "log2": positive, "sin": angles, "cos": angles, "erf": signed,
        "tanh": signed, "sigmoid": wide, "sqrt": positive[4:].repeat(2)[:512], "sqrt_rn": positive, "floor": signed,
    }  # fmt: skip
    f64 = signed.double() + 1e-9
    return [
        *(Case(f"math_{name}_f32", partial(function, name, x), name == "sqrt_rn") for name, x in functions.items()),
        Case("math_sqrt_f64", partial(function, "sqrt", f64.abs() + 1e-3)),
        Case("math_exp_f64", partial(function, "exp", f64)),
        Case("math_divide_rounded", divide, exact=True),
        Case("math_arithmetic_f32", partial(arithmetic, torch.float32, True)),
        Case("math_arithmetic_f32_unfused", partial(arithmetic, torch.float32, False)),
        Case("math_arithmetic_f16", partial(arithmetic, torch.float16, True)),
        Case("math_arithmetic_bf16", partial(arithmetic, torch.bfloat16, True)),
        Case("math_arithmetic_f64", partial(arithmetic, torch.float64, True)),
    ]


def _integers() -> list[Case]:
    def arithmetic(dtype: torch.dtype, device: torch.device) -> None:
        x, y = draw((200,), dtype, device), draw((200,), dtype, device, 1)
        y = torch.where(torch.arange(200, device=device) % 2 == 0, y % 100, y)
        y = torch.where((y == 0) | (y == -1), torch.full_like(y, 3), y)
        kernels.integer_arithmetic[(1,)](x, y, blank((7, 200), dtype, device), 200, BLOCK=256)

    def high(dtype: torch.dtype, device: torch.device) -> None:
        x, y = draw((128,), dtype, device), draw((128,), dtype, device, 1)
        kernels.high_product[(1,)](x, y, blank((128,), dtype, device), BLOCK=128)

    def nibbles(device: torch.device) -> None:
        x = draw((256,), torch.uint8, device)
        kernels.interleave_bytes[(1,)](x, blank((1024,), torch.int8, device), BLOCK=256)

    dtypes = {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
    return [
        *(Case(f"integer_arithmetic_{name}", partial(arithmetic, dtype), exact=True) for name, dtype in dtypes.items()),
        Case("integer_high_i32", partial(high, torch.int32), exact=True),
        Case("integer_high_i64", partial(high, torch.int64), exact=True),
        Case("integer_nibbles", nibbles, exact=True),
    ]


def _conversions() -> list[Case]:
    def convert(source: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        n = source.numel()
        kernels.convert[(triton.cdiv(n, 256),)](source.to(device), blank((n,), dtype, device), n, BLOCK=256)

    cpu = torch.device("cpu")
    floats = torch.cat([draw((300,), torch.float32, cpu), draw((300,), torch.float32, cpu, 1) * 1e-3])
    ties = torch.arange(-128, 128) * 0.0625 + 0.03125
    floats = torch.cat([floats, ties, torch.tensor([0.0, -0.0, 448.0, 2.0**-9, 2.0**-10, 2.0**-17])])
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e5m2, bf16, f16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
    finite = codes.view(e4m3)[codes.view(e4m3).float().isfinite()]
    sources = {
        "f32_e4m3": (floats, e4m3), "f32_e5m2": (floats, e5m2), "f16_e4m3": (floats.half(), e4m3),
        "bf16_e4m3": (floats.bfloat16(), e4m3), "bf16_e5m2": (floats.bfloat16(), e5m2),
        "e4m3_f32": (finite, torch.float32), "e4m3_bf16": (finite, bf16),
        "e5m2_f16": (codes[:124].view(e5m2), f16), "f32_bf16": (floats, bf16), "f32_f16": (floats, f16),
        "f16_bf16": (floats.half(), bf16), "f32_i8": (floats * 30, torch.int8),
        "bf16_i16": (ties.bfloat16(), torch.int16),
        "f32_i64": (floats * 1e9, torch.int64), "f64_f32": (floats.double() / 3, torch.float32),
        "i8_f16": (codes.view(torch.int8), f16), "i8_bf16": (codes.view(torch.int8), bf16),
        "i16_f32": (draw((300,), torch.int16, cpu), torch.float32), "i8_i64": (codes.view(torch.int8), torch.int64),
        "i64_f32": (draw((300,), torch.int64, cpu), torch.float32), "u8_i16": (codes, torch.int16),
        "i32_i8": (draw((300,), torch.int32, cpu), torch.int8),
    }  # fmt: skip
    return [Case(f"convert_{name}", partial(convert, *arguments), exact=True) for name, arguments in sources.items()]
