"""Capture what a launcher would launch, compiled for a GPU that is not there.

Triton asks its *driver* which GPU it compiles for. A stand-in answers for the absent one, and
``JITFunction.run`` is made to stop before the launch. So the launcher's own choices and the JIT's own
specialisation (a pointer or an integer divisible by 16, an integer that is 1, the dtypes at hand) decide what
is compiled; no constant of a kernel is repeated here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from mla_conformance.suites.harness.targets import Target

WARP_SIZE = 32
REGISTERS_PER_BLOCK = 65_536
"""Of every target so far (CUDA C++ Programming Guide, technical specifications per compute capability)."""


@dataclass(frozen=True)
class Launch:
    """One launch that did not take place.

    Args:
        function: name of the ``@triton.jit`` function.
        grid: the grid asked for, as given (one to three numbers).
        constants: compile-time constants by argument name, as text; integers that are 1 are constants too.
        kernel: Triton's compiled kernel, with its ``asm``, ``metadata`` and ``hash``.
    """

    function: str
    grid: tuple[int, ...]
    constants: dict[str, str]
    kernel: Any


class Launches(list[Launch]):
    """The launches in order, and the last exception that compiling one raised."""

    failed_function: str = ""
    failure: BaseException | None = None


@contextmanager
def capture(target: Target, *, specialise: bool = True) -> Iterator[Launches]:
    """Compile every ``kernel[grid](...)`` inside for ``target`` and launch nothing.

    Outputs are therefore never written. An autotuned kernel is compiled in every configuration that its
    pruning leaves, because each may be the one chosen on a card. An exception of Triton passes through to the
    launcher, which may handle it, and is noted.

    Args:
        target: the GPU to stand in for.
        specialise: False leaves out what the JIT knows of divisibility by 16: a control, which shows that a
            probe without it compiles another kernel.

    Yields:
        the launches so far.

    Raises:
        RuntimeError: this process decorates kernels for Triton's interpreter, so there is nothing to compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and not compiled: unset it")
    launches = Launches()
    tune = Autotuner.run

    with ExitStack() as stack:
        compile_only = stack.enter_context(standing_in(target))

        def run(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            try:
                kernel = compile_only(fn, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:
                launches.failed_function, launches.failure = fn.__name__, error
                raise
            if not warmup:
                sizes = grid(bound_arguments(fn, args, kwargs)) if callable(grid) else grid
                launches.append(Launch(fn.__name__, tuple(sizes), _constants(fn, kernel), kernel))
            return kernel

        def run_every_config(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            # No earlier choice and no cache on disk may shorten the list, and no made-up time may enter it.
            with patch.multiple(tuner, cache={}, cache_results=False, _do_bench=_run_once):
                return tune(tuner, *args, **kwargs)

        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(Autotuner, "run", run_every_config))
        if not specialise:
            stack.enter_context(patch.object(ASTSource, "__init__", _without_attributes(ASTSource.__init__)))
        yield launches


@contextmanager
def standing_in(target: Target) -> Iterator[Callable[..., Any]]:
    """Triton and ``torch.cuda`` answer for ``target`` inside.

    Yields:
        ``JITFunction.run`` for use with ``warmup=True``: it compiles, and forgets afterwards.
    """
    compile_only = JITFunction.run
    touched: set[int] = set()
    with ExitStack() as stack:

        def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if id(fn) not in touched:
                # The JIT remembers a device's target and its kernels; the stand-in's must not outlive it.
                stack.enter_context(patch.object(fn, "device_caches", defaultdict(fn.create_binder)))
                touched.add(id(fn))
            return compile_only(fn, *args, **kwargs)

        stack.callback(driver.set_active, driver._active)
        driver.set_active(StandIn(target))
        for name, answer in _torch_answers(target).items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(posing_as_cuda())
        yield run


@contextmanager
def posing_as_cuda() -> Iterator[None]:
    """CPU tensors say ``is_cuda`` inside, for launchers that insist on it."""
    with patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)):
        yield


class StandIn(DriverBase):  # type: ignore[misc]
    """A Triton driver that answers for an absent GPU, and cannot load or launch anything."""

    def __init__(self, target: Target) -> None:
        self._target = target
        properties = {
            "max_shared_mem": target.shared_bytes,
            "max_num_regs": REGISTERS_PER_BLOCK,
            "multiprocessor_count": target.multiprocessors,
            "warpSize": WARP_SIZE,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by Triton itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a launcher's C source needs this."""
        raise NotImplementedError(f"{ty}: nothing is launched for an absent GPU")

    def get_current_target(self) -> GPUTarget:
        """The absent GPU's target."""
        return GPUTarget("cuda", self._target.capability, WARP_SIZE)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """The absent GPU's compute capability."""
        return divmod(self._target.capability, 10)

    def get_current_device(self) -> int:
        """The one device that there seems to be."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of a case are."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """What an autotuner measures with."""
        return _run_once


def _run_once(kernel_call: Callable[[], Any], quantiles: Any = (0.5,), **_: Any) -> list[float]:
    kernel_call()
    return [1.0 for _ in quantiles]


def _torch_answers(target: Target) -> dict[str, Callable[..., Any]]:
    """What ``torch.cuda`` says of the absent GPU, for launchers that ask it rather than Triton."""
    major, minor = divmod(target.capability, 10)
    properties = SimpleNamespace(
        name=target.card,
        # PyTorch has the name here too on NVIDIA cards, and inductor asks for it.
        gcnArchName=target.card,
        major=major,
        minor=minor,
        multi_processor_count=target.multiprocessors,
        warp_size=WARP_SIZE,
        shared_memory_per_block_optin=target.shared_bytes,
        regs_per_multiprocessor=REGISTERS_PER_BLOCK,
    )
    return {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: target.card,
        "get_device_properties": lambda device=None: properties,
    }


def _without_attributes(initialise: Callable[..., None]) -> Callable[..., None]:
    def bare(source: Any, fn: Any, signature: Any, constexprs: Any = None, attrs: Any = None) -> None:
        initialise(source, fn, signature, constexprs, {})

    return bare


def bound_arguments(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The kernel's arguments by name, as a grid given as a function expects them."""
    named = {name: value for name, value in kwargs.items() if name in fn.arg_names}
    bound = fn.signature.bind(*args, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _constants(fn: Any, kernel: Any) -> dict[str, str]:
    """Compile-time constants as text; an element of a tuple argument is called ``name.index``."""
    return {
        ".".join([fn.arg_names[path[0]], *map(str, path[1:])]): str(value)
        for path, value in kernel.src.constants.items()
    }
