"""Quantised weights of GGUF files: Triton kernels for every block format, and the layers that own them."""

from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import FORMATS, QuantFormat, find
from mla_conformance.kernels.gguf.matmul import matmul

__all__ = ["FORMATS", "QuantFormat", "dequantize", "find", "matmul"]
