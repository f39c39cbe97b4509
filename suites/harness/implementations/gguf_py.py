"""gguf-py's numpy dequantiser, an independent answer for most types."""

from __future__ import annotations

from importlib.metadata import version

import gguf
import torch
from torch import Tensor

from mla_conformance.suites.harness.gguf_cases import DequantizeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import GGUFDequantizeProblem

ABSENT = ("Q8_1", "Q8_K", "Q1_0")
"""Types that ggml has and gguf-py 0.19.0 does not dequantise."""

ON_THE_CPU = 2**26
"""The most elements that are dequantised on the CPU."""


class Adapter(Implementation):
    """``gguf.quants.dequantize``, rounded once by torch where float32 is not asked for."""

    name = "gguf_py"
    compiles_kernels = False

    def version(self) -> str:
        """gguf-py's version."""
        return version("gguf")

    def declines(self, problem: GGUFDequantizeProblem) -> str | None:
        """Decline what gguf-py does not have, and no rows, which it cannot reshape."""
        if problem.quant in ABSENT:
            return f"quant={problem.quant}: gguf-py has no dequantiser for it"
        if problem.rows * problem.columns > ON_THE_CPU:
            return f"more than {ON_THE_CPU} elements would take minutes on the CPU"
        return "rows=0: gguf-py takes no empty tensor" if problem.rows == 0 else None

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Dequantise on the CPU."""
        kind = gguf.GGMLQuantizationType[case.problem.quant]
        values = gguf.quants.dequantize(case.data.cpu().clone().numpy(), kind)
        return case.out.copy_(torch.from_numpy(values).view(case.out.shape))
