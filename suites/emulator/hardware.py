"""The same call on a real GPU: :func:`run_ptx` through the CUDA driver, for tests that both must pass.

``pytest suites/selfcheck/emulator -k instructions --lane cuda`` runs the instruction tests on the card at hand.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from mla_conformance.suites.emulator.errors import EmulatorError, UnsupportedInstruction
from mla_conformance.suites.emulator.execution import Run
from mla_conformance.suites.emulator.ptx import parse

_LOG_BYTES = 8192
_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE = 5, 6
_MAX_DYNAMIC_SHARED = 8
_WIDTHS: dict[str, Any] = {"16": ctypes.c_uint16, "32": ctypes.c_uint32, "64": ctypes.c_uint64}


def run_ptx(
    ptx: str, grid: tuple[int, ...], arguments: Sequence[Any], *, shared_bytes: int = 0, check: bool = True
) -> Run:
    """Assemble a PTX text for the current GPU, launch it, and copy the tensors back; a card makes no findings.

    Args:
        ptx: the text; its ``.target`` is replaced by the GPU's, its ``.version`` by the driver's.
        grid: one to three numbers of CTAs.
        arguments: as :func:`mla_conformance.suites.emulator.run_ptx` takes them; CPU tensors are copied to and fro.
        shared_bytes: dynamic shared memory of a CTA.
        check: ignored.

    Raises:
        UnsupportedInstruction: the driver's assembler refuses the text; the message has its log.
        EmulatorError: another error of the driver, such as an illegal address.
    """
    entry = parse(ptx)
    threads = entry.threads or 0
    torch.cuda.current_stream()  # makes the context of the current device current
    handle = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(handle), _module(_retargeted(ptx)), entry.name.encode())
    _call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED, shared_bytes)
    copies: dict[int, tuple[Any, torch.Tensor]] = {}
    values: list[Any] = []
    for parameter, argument in zip(entry.parameters, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            if storage.data_ptr() not in copies:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                copies[storage.data_ptr()] = flat, flat.cuda()
            base = copies[storage.data_ptr()][1].data_ptr()
            values.append(ctypes.c_uint64(base + argument.data_ptr() - storage.data_ptr()))
        elif isinstance(argument, float):
            values.append(ctypes.c_float(argument) if parameter.type.endswith("32") else ctypes.c_double(argument))
        else:
            width = _WIDTHS[re.sub(r"\D", "", parameter.type)]
            values.append(width(int(argument) % 2 ** (8 * ctypes.sizeof(width))))
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    sizes = (*grid, 1, 1)[:3]
    _call("cuLaunchKernel", handle, *sizes, threads, 1, 1, shared_bytes, None, pointers, None)
    _call("cuCtxSynchronize")
    for here, there in copies.values():
        here.copy_(there)
    return Run([], 0, sizes[0] * sizes[1] * sizes[2])


def _retargeted(ptx: str) -> str:
    major, minor = torch.cuda.get_device_capability()
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    # CUDA 12.x reads PTX 8.x, CUDA 13.x reads PTX 9.x (PTX ISA, release notes).
    spoken = f"{version.value // 1000 - 4}.{version.value % 1000 // 10}"
    suffix = "a" if major >= 9 else ""
    ptx = re.sub(r"^\.target .*$", f".target sm_{major}{minor}{suffix}", ptx, flags=re.MULTILINE)
    return re.sub(r"^\.version .*$", f".version {spoken}", ptx, flags=re.MULTILINE)


@cache
def _module(ptx: str) -> ctypes.c_void_p:
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE)
    values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p).value, _LOG_BYTES)
    module = ctypes.c_void_p()
    try:
        _call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
    except EmulatorError as error:
        raise UnsupportedInstruction(
            f"the driver does not assemble it: {log.value.decode(errors='replace')}"
        ) from error
    return module


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise EmulatorError(f"{name}: CUDA driver error {status}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
