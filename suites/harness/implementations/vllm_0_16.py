"""vLLM 0.16.0's in-tree GGUF linear method, a control with a fault that is known: the story's shard order."""

from __future__ import annotations

from torch import Tensor

from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_layer_cases import Forward, LinearCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.implementations.gguf_plugin import as_caller_sees_it, layer_of, shard_id
from mla_conformance.suites.harness.problems import GGUFLinearProblem, GGUFMatmulProblem
from mla_conformance.suites.harness.shipped import vllm_0_16 as shipped
from mla_conformance.suites.harness.shipped.vllm_layers import PLAIN, ShippedError

WITHOUT_KERNEL = ("Q8_K", "Q1_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
"""Types that its GGUF code does not name."""


class Adapter(Implementation):
    """Real layers of the old release in a process of their own, on the CPU, with an exact product for its kernels."""

    name = "vllm_0_16"
    compiles_kernels = False

    def __init__(self) -> None:
        reason = shipped.available()
        if reason is not None:
            raise ImportError(reason)

    def version(self) -> str:
        """The release whose files are used."""
        return shipped.VERSION

    def declines(self, problem: GGUFLinearProblem) -> str | None:
        """Decline types that the release does not name."""
        missing = [quant for quant, _ in problem.shards if quant in WITHOUT_KERNEL and quant not in PLAIN]
        return f"quant={missing[0]}: vLLM 0.16.0 has no kernel for it" if missing else None

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """The exact product rounds its result."""
        return MatmulArithmetic(activations="float64", weights="float64", output=problem.dtype)

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Build, load and run the layer in one request; what its forward raised is raised by the forward."""
        order = [shard_id(arrival.shard_id, case.problem) for arrival in case.arrivals]
        tensors = dict(zip(order, (arrival.data.cpu() for arrival in case.arrivals), strict=True))
        try:
            result = shipped.linear(layer_of(case.problem), tensors, case.x.cpu(), order)
        except ShippedError as error:
            if error.stage != "apply":
                raise as_caller_sees_it(error) from error
            broken = Mismatch(f"loaded without an error, and the forward raised {error.kind}: {error.message}")
            return _raising(broken)
        return lambda x: result.to(x.device)


def _raising(error: Exception) -> Forward:
    def forward(x: Tensor) -> Tensor:
        raise error

    return forward
