"""Dequantisation and quantised products as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.kernels import gguf
from mla_conformance.kernels.ops.fake import nothing


@torch.library.custom_op("mla_conformance::gguf_dequantize", mutates_args=())
def gguf_dequantize(data: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    """The numbers that a matrix of blocks stands for, [..., columns] in ``dtype``.

    Arguments and errors as :func:`mla_conformance.kernels.gguf.dequantize`; ``quant`` is ggml's name of the format.
    """
    return gguf.dequantize(data, quant, dtype=dtype)


@torch.library.custom_op("mla_conformance::gguf_dequantize_out", mutates_args=("out",))
def gguf_dequantize_out(data: Tensor, quant: str, out: Tensor) -> None:
    """The same into ``out``, in its dtype; it must not overlap ``data``."""
    gguf.dequantize(data, quant, out=out)


@torch.library.custom_op("mla_conformance::gguf_matmul", mutates_args=())
def gguf_matmul(x: Tensor, data: Tensor, quant: str) -> Tensor:
    """Tokens times a quantised matrix, ``x @ W.T``: [..., rows] in x's dtype.

    Arguments and errors as :func:`mla_conformance.kernels.gguf.matmul`; ``quant`` is ggml's name of the format.
    """
    return gguf.matmul(x, data, quant)


@torch.library.custom_op("mla_conformance::gguf_matmul_out", mutates_args=("out",))
def gguf_matmul_out(x: Tensor, data: Tensor, quant: str, out: Tensor) -> None:
    """The same into ``out``, which must not overlap another argument."""
    gguf.matmul(x, data, quant, out=out)


def _dequantized(data: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    found = gguf.find(quant)
    columns = data.shape[-1] // found.block_bytes * found.block_elements
    return data.new_empty((*data.shape[:-1], columns), dtype=dtype)


def _multiplied(x: Tensor, data: Tensor, quant: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], data.shape[0]))


gguf_dequantize.register_fake(_dequantized)
gguf_dequantize_out.register_fake(nothing)
gguf_matmul.register_fake(_multiplied)
gguf_matmul_out.register_fake(nothing)
