"""Compile the builds for sm_120 and write them to files: ``python -m ...capture_builds FOLDER``."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl

from mla_conformance.suites.corpus import kernels, kernels_dot
from mla_conformance.suites.corpus.case import blank, draw
from mla_conformance.suites.corpus.launches_models import GGUF_TYPES, plugin, quantised
from mla_conformance.suites.emulator import Run, emulate, run_ptx
from mla_conformance.suites.harness import implementation
from mla_conformance.suites.harness.cases import build
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.shipped import gguf_plugin
from mla_conformance.suites.selfcheck.emulator.builds import Build, copied, write

CPU = torch.device("cpu")


def captured(launcher: Callable[[], object]) -> list[Build]:
    """Every launch of a launcher, compiled for sm_120."""
    found: list[Build] = []

    def note(ptx: str, grid: tuple[int, ...], arguments: Sequence[Any], **options: Any) -> Run:
        shared, threads = options["shared_bytes"], options["threads"]
        found.append(Build(ptx, grid, copied(arguments), shared, threads))
        return run_ptx(ptx, grid, arguments, **options)

    # vLLM, when it is imported where no GPU is, turns Triton off unless this variable hides the GPUs.
    pinned = {"CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_FP_FUSION": "1"}
    module = importlib.import_module(emulate.__module__)
    with patch.dict(os.environ, pinned), patch.object(module, "run_ptx", note), emulate("sm_120"):
        launcher()
    return found


BF16 = MLADecodeProblem(lengths=(70, 0), heads=5, num_splits=1, dtype="bfloat16", cache_dtype="bfloat16")
FP8 = BF16.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)
WIDE = BF16.replace(heads=20)


def _decode(name: str, problem: MLADecodeProblem) -> None:
    implementation.load(name).mla_decode(build(problem, CPU))


def _matmul(stages: int) -> None:
    a, b = draw((16, 96), torch.bfloat16, CPU), draw((96, 16), torch.bfloat16, CPU, 1)
    c = blank((16, 16), torch.float32, CPU)
    kernels_dot.matmul[(1, 1)](
        a, b, c, 16, 16, 96, *a.stride(), *b.stride(), *c.stride(),
        BM=16, BN=16, BK=16, PRECISION="ieee", ACCUMULATOR=tl.float32, num_stages=stages, num_warps=4,
    )  # fmt: skip


def _transpose() -> None:
    x = draw((32, 64), torch.bfloat16, CPU)
    kernels.transpose_tile[(1,)](x, blank((64, 32), torch.bfloat16, CPU), N=32, M=64, num_warps=1)


def _softmax() -> None:
    kernels.softmax_rows[(2,)](draw((2, 500), torch.float32, CPU), blank((2, 500), torch.float32, CPU), 500, BLOCK=512)


def _gguf() -> None:
    weight = quantised("q4_k", 128, 512, CPU)
    plugin("gemm").ggml_mul_mat_a8_triton(weight, draw((32, 512), torch.float16, CPU, 1), GGUF_TYPES["q4_k"][0], 128)


LAUNCHERS: dict[str, tuple[Callable[[], object], int]] = {
    "vllm_bf16": (partial(_decode, "vllm", BF16), 0),
    "vllm_fp8": (partial(_decode, "vllm", FP8), 0),
    "vllm_one_head": (partial(_decode, "vllm", BF16.replace(heads=1)), 0),
    "split_bf16": (partial(_decode, "kernels", BF16), 0),
    "split_bf16_wide": (partial(_decode, "kernels", WIDE), 0),
    "split_fp16": (partial(_decode, "kernels", BF16.replace(dtype="float16", cache_dtype="float16")), 0),
    "split_fp8": (partial(_decode, "kernels", FP8), 0),
    "merge": (partial(_decode, "kernels", BF16.replace(num_splits=3)), 1),
    "matmul_2": (partial(_matmul, 2), 0),
    "matmul_3": (partial(_matmul, 3), 0),
    "matmul_4": (partial(_matmul, 4), 0),
    "transpose_1_warp": (_transpose, 0),
    "softmax": (_softmax, 0),
    "gguf_q4_k": (_gguf, 0),
}
"""A launcher, and which of its launches is meant."""


def main(folder: Path) -> None:
    """Write every build of which the packages are installed."""
    for name, (launcher, index) in LAUNCHERS.items():
        if not name.startswith("gguf") or importlib.util.find_spec(gguf_plugin.PLUGIN) is not None:
            write(captured(launcher)[index], folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
