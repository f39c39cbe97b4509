"""ggml's own C code, an answer that shares nothing with gguf-py."""

from __future__ import annotations

import ctypes
import functools
from importlib.metadata import version
from typing import Any

import ggml
import torch
from torch import Tensor

from mla_conformance.reference.gguf import FORMATS
from mla_conformance.suites.harness.gguf_cases import DequantizeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import GGUFDequantizeProblem

ON_THE_CPU = 2**26
"""The most elements that are dequantised on the CPU."""
PLAIN = {"F32": torch.float32}
"""ggml needs no function to read these."""


class Adapter(Implementation):
    """The ``to_float`` of ggml's type traits, rounded once by torch where float32 is not asked for."""

    name = "ggml"
    compiles_kernels = False

    def version(self) -> str:
        """Version of the Python package that brings ggml's library."""
        return version("ggml-python")

    def declines(self, problem: GGUFDequantizeProblem) -> str | None:
        """Decline the types that ggml only ever multiplies by."""
        if problem.quant not in PLAIN and not _to_float(problem.quant):
            return f"quant={problem.quant}: ggml has no to_float for it"
        if problem.rows * problem.columns > ON_THE_CPU:
            return f"more than {ON_THE_CPU} elements would take minutes on the CPU"
        return None

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Dequantise on the CPU."""
        problem, data = case.problem, case.data.cpu().clone()
        if problem.quant in PLAIN:
            return case.out.copy_(data.view(PLAIN[problem.quant]).view(case.out.shape))
        values = torch.empty(problem.rows, problem.columns)
        if values.numel():
            _to_float(problem.quant)(
                ctypes.c_void_p(data.data_ptr()),
                ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float)),
                ctypes.c_int64(values.numel()),
            )
        return case.out.copy_(values)


@functools.cache
def _to_float(quant: str) -> Any:
    """The type's C function, or a null pointer, which must not be called."""
    _initialise()
    return ggml.ggml_get_type_traits(FORMATS[quant].type_id).contents.to_float


@functools.cache
def _initialise() -> None:
    """Ggml fills its float16 tables with the first context."""
    ggml.ggml_free(ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 16, mem_buffer=None, no_alloc=True)))
