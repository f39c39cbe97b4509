"""The cases with kernels from elsewhere: MLA decode of vLLM and of this repository, and vLLM's GGUF plugin."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_conformance.suites.corpus.case import Case, draw
from mla_conformance.suites.harness import implementation
from mla_conformance.suites.harness.cases import build
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.shipped import gguf_plugin

GGUF_TYPES = {
    "q4_0": (2, 32, 18, (0,)), "q4_1": (3, 32, 20, (0, 2)), "q5_0": (6, 32, 22, (0,)), "q5_1": (7, 32, 24, (0, 2)),
    "q8_0": (8, 32, 34, (0,)), "q8_1": (9, 32, 36, (0, 2)), "q2_k": (10, 256, 84, (80, 82)),
    "q3_k": (11, 256, 110, (108,)), "q4_k": (12, 256, 144, (0, 2)), "q5_k": (13, 256, 176, (0, 2)),
    "q6_k": (14, 256, 210, (208,)), "iq2_xxs": (16, 256, 66, (0,)), "iq2_xs": (17, 256, 74, (0,)),
    "iq3_xxs": (18, 256, 98, (0,)), "iq1_s": (19, 256, 50, (0,)), "iq4_nl": (20, 32, 18, (0,)),
    "iq3_s": (21, 256, 110, (0,)), "iq2_s": (22, 256, 82, (0,)), "iq4_xs": (23, 256, 136, (0,)),
    "iq1_m": (29, 256, 56, (54,)),
}  # fmt: skip
"""ggml's number, values of a block, bytes of a block, and where its float16 factors lie (ggml-common.h).

IQ1_M spreads its factor over the high nibbles of four words; 54 is the word with the exponent.
"""


def cases() -> list[Case]:
    """Return the cases; the packages are imported when one runs."""
    return [*_decode_cases(), *_dequantise_cases(), *_gemm_cases()]


def _decode_cases() -> list[Case]:
    bf16 = MLADecodeProblem(lengths=(37, 21), heads=5, dtype="bfloat16", cache_dtype="bfloat16")
    f16 = bf16.replace(dtype="float16", cache_dtype="float16")
    fp8 = bf16.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)
    problems = {
        "bf16": bf16,
        "f16": f16,
        "fp8": fp8,
        "one_head": bf16.replace(heads=1, lengths=(37, 21, 5)),
        "one_head_f16": f16.replace(heads=1, num_splits=1),
        "gapped": f16.replace(layout="gapped", page_size=1, lengths=(20, 9), heads=3),
        "full_width": bf16.replace(lengths=(21,), kv_lora_rank=512, qk_rope_head_dim=64, page_size=4),
        "full_width_fp8": fp8.replace(lengths=(40,), kv_lora_rank=512, qk_rope_head_dim=64, page_size=8),
    }
    kernels_only = {
        "f32": bf16.replace(dtype="float32", cache_dtype="float32", lengths=(30,)),
        "no_rope": f16.replace(qk_rope_head_dim=0, lengths=(50, 0)),
    }

    def decode(name: str, problem: MLADecodeProblem, device: torch.device) -> None:
        adapter = implementation.load(name)
        if reason := adapter.declines(problem):
            raise ValueError(reason)
        adapter.mla_decode(build(problem, device))

    return [
        *(Case(f"vllm_{name}", partial(decode, "vllm", problem)) for name, problem in problems.items()),
        *(
            Case(f"kernels_{name}", partial(decode, "kernels", problem))
            for name, problem in {**problems, **kernels_only}.items()
        ),
    ]


def _dequantise_cases() -> list[Case]:
    def dequantise(name: str, dtype: torch.dtype, device: torch.device) -> None:
        rows, width = 3, 512
        plugin("dequantize").ggml_dequantize_triton(
            quantised(name, rows, width, device), GGUF_TYPES[name][0], rows, width, dtype
        )

    wanted = [(name, torch.bfloat16) for name in GGUF_TYPES]
    wanted += [(name, torch.float32) for name in ("q4_0", "q8_1", "q4_k", "q6_k", "iq1_m", "iq4_xs")]
    wanted += [(name, torch.float16) for name in ("q5_1", "q3_k", "q5_k", "iq2_xxs", "iq3_s")]
    return [
        Case(f"dequantise_{name}_{_short(dtype)}", partial(dequantise, name, dtype), exact=True)
        for name, dtype in wanted
    ]


def _gemm_cases() -> list[Case]:
    def gemm(name: str, dtype: torch.dtype, device: torch.device) -> None:
        width = 576 if GGUF_TYPES[name][1] == 32 else 512
        weight = quantised(name, 40, width, device)
        x = draw((5, width), dtype, device, 1)
        plugin("gemm").ggml_mul_mat_a8_triton(weight, x, GGUF_TYPES[name][0], 40)

    bf16, f16 = torch.bfloat16, torch.float16
    wanted = [("q4_0", bf16), ("q5_1", f16), ("q8_0", bf16), ("q4_k", bf16), ("q4_k", f16), ("q6_k", f16)]
    wanted += [("iq4_xs", bf16), ("iq4_nl", f16), ("iq2_xxs", bf16)]
    return [Case(f"gemm_{name}_{_short(dtype)}", partial(gemm, name, dtype)) for name, dtype in wanted]


def quantised(name: str, rows: int, width: int, device: torch.device) -> Tensor:
    """Random blocks of a GGUF type whose factors are finite and below 2**-7: uint8 [rows, bytes]."""
    number, values, size, factors = GGUF_TYPES[name]
    blocks = draw((rows * width // values, size), torch.uint8, torch.device("cpu"), number)
    for at in factors:
        blocks[:, at + 1] &= 0x9F
    return blocks.view(rows, -1).to(device)


def plugin(part: str) -> Any:
    """Import ``triton/<part>/interface.py`` of vLLM's GGUF plugin without the plugin's ``__init__``."""
    return gguf_plugin.part(f"triton.{part}.interface")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
