"""The ``cuda`` lane: the GPU of this machine, natively."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from mla_conformance.suites.harness.errors import Mismatch, NoResult
from mla_conformance.suites.harness.lanes import base


class Lane(base.Lane):
    """Runs kernels on the first GPU that this process sees."""

    name: ClassVar[str] = "cuda"
    device = "cuda"
    repeats = 30
    # A card refuses a launch that does not fit, which running() turns into a failure.
    tells_refusals: ClassVar[bool] = True
    _lost: str | None = None

    def environment(self) -> dict[str, str]:
        """One CPU thread a worker for laying out cases: pytest-xdist's workers share the cores."""
        return {"OMP_NUM_THREADS": "1"}

    def missing(self, devices: list[str]) -> str | None:
        """A GPU must be visible."""
        return None if devices else "no GPU is visible here (nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides it)"

    def check_alive(self) -> None:
        """A device that was lost stays lost in this process."""
        if self._lost is not None:
            raise NoResult(f"the device was lost earlier: {self._lost}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for the kernels; an exhausted or lost device is nobody's verdict."""
        import torch
        from triton.runtime.errors import OutOfResources

        self.check_alive()
        try:
            yield
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            raise NoResult(f"out of device memory: {error}") from error
        except OutOfResources as error:
            raise Mismatch(f"the device refused the launch: {error}") from error
        except RuntimeError as error:
            # An illegal access poisons the context: this case fails, the rest of the process has no result.
            if "CUDA error" in str(error):
                self._lost = str(error).splitlines()[0]
            raise
