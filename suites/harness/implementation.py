"""Implementations under test: what an adapter offers, and how one is found by name.

An adapter is a class with a few small methods::

    class MyKernels(Implementation):
        name = "mine"

        def version(self) -> str:
            return mypackage.__version__

        def declines(self, problem):
            return None if problem.heads % 8 == 0 else f"heads={problem.heads} is no multiple of 8"

        def arithmetic(self, problem):
            return Arithmetic(operands=problem.dtype, probabilities=problem.dtype, output=problem.dtype)

        def mla_decode(self, case):
            lse = mypackage.decode(case.q, case.kv_cache, ..., out=case.out)
            return case.out, lse

and is selected with ``--impl mypackage.conformance:MyKernels``.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.reference.merge_tolerance import MergeArithmetic
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness import implementations
from mla_conformance.suites.harness.absorption_cases import HeadsProductCase
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.cache_gather_cases import KVCacheGatherCase
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.errors import BadUse
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.gguf_layer_cases import Forward, KvBCase, LinearCase, NamesCase
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase
from mla_conformance.suites.harness.op_call import OpCall
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase
from mla_conformance.suites.harness.problems import (
    GGUFLinearProblem,
    GGUFMatmulProblem,
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAPrefillProblem,
)
from mla_conformance.suites.harness.problems.absorption import HeadsProductProblem


class Implementation(ABC):
    """One implementation of some operations, as the harness sees it: it offers those whose method it defines."""

    name: ClassVar[str]
    """How reports, the ledger and ``--impl`` call it."""

    option: ClassVar[str] = "--impl"
    """The option that names it on the command line."""

    compiles_kernels: ClassVar[bool] = True
    """Whether it launches Triton kernels."""

    in_compile_lane: ClassVar[bool] = True
    """Whether the compile lane looks at them."""

    without_kernels: ClassVar[frozenset[str]] = frozenset()
    """Operations that it does without a Triton kernel, so that the compile lane has nothing to look at."""

    flattens_query_tokens: ClassVar[bool] = False
    """Whether it decodes several query tokens as requests of one, with the kernels of those."""

    invalid_pages: ClassVar[str | None] = None
    """What it documents for a used page id outside the cache: ``"nan"`` (that row is NaN), ``"refused"``
    (ValueError), or ``None`` (nothing documented)."""

    @abstractmethod
    def version(self) -> str:
        """Return the version under test."""

    @abstractmethod
    def declines(self, problem: Any) -> str | None:
        """Return why ``problem``, of an operation that it offers, is not supported, or None. Asked before launch."""

    def arithmetic(self, problem: MLADecodeProblem) -> Arithmetic:
        """Declare what a decode rounds to what; the tolerance follows from it."""
        raise NotImplementedError

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Run one decode; return ``case.out``, written, and the natural-log LSE [batch, heads]."""
        raise NotImplementedError

    def mla_decode_multi(self, case: MultiTokenCase) -> tuple[Tensor, Tensor]:
        """Run one decode of several query tokens a request.

        Returns:
            ``case.out``, written, and the natural-log LSE [batch, query_tokens, heads].
        """
        raise NotImplementedError

    def prefill_arithmetic(self, problem: MLAPrefillProblem) -> Arithmetic:
        """Declare what a prefill rounds to what; the tolerance follows from it."""
        raise NotImplementedError

    def mla_prefill(self, case: MLAPrefillCase) -> tuple[Tensor, Tensor]:
        """Run one prefill, its parts merged; return ``case.out``, written, and the natural-log LSE [queries, heads]."""
        raise NotImplementedError

    def merge_arithmetic(self, problem: MergeStatesProblem | MergeShardsProblem) -> MergeArithmetic:
        """Declare what a merge of attention states rounds to what; the tolerance follows from it."""
        raise NotImplementedError

    def merge_states(self, case: MergeStatesCase) -> tuple[Tensor, Tensor]:
        """Merge two states; return ``case.out``, written, and the natural-log LSE [tokens, heads]."""
        raise NotImplementedError

    def merge_shards(self, case: MergeShardsCase) -> tuple[Tensor, Tensor]:
        """Merge the states of all ranks; return ``case.out``, written, and the natural-log LSE [tokens, heads]."""
        raise NotImplementedError

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Write ``case.ckv`` and ``case.kpe`` into ``case.kv_cache``, in place."""
        raise NotImplementedError

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Gather rows of ``case.kv_cache``; return ``case.out``, written."""
        raise NotImplementedError

    def absorption_arithmetic(self, problem: HeadsProductProblem) -> MatmulArithmetic:
        """Declare what a product with one matrix a head rounds to what; the tolerance follows from it."""
        raise NotImplementedError

    def absorb_query(self, case: HeadsProductCase) -> Tensor:
        """Multiply each head's queries by its ``W_UK``; return ``case.out``, written."""
        raise NotImplementedError

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Multiply each head's latent outputs by its ``W_UV``; return ``case.out``, written."""
        raise NotImplementedError

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Dequantise ``case.data``; return ``case.out``, written."""
        raise NotImplementedError

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """Declare what a product with a quantised weight rounds to what; the tolerance follows from it."""
        raise NotImplementedError

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Multiply ``case.x`` by the quantised ``case.data``; return ``case.out``, written."""
        raise NotImplementedError

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Load a layer from ``case.arrivals``, in that order, on the problem's rank; return its forward."""
        raise NotImplementedError

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Return the absorbed ``W_UK`` [heads, nope, latent] and ``W_UV`` [heads, latent, v]."""
        raise NotImplementedError

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """Return which parameters of the checkpoint each tensor of the file fills, by the tensor's name."""
        raise NotImplementedError

    def registered_ops(self) -> Sequence[OpCall]:
        """Operators of ``torch.library`` that it registers, for the contract tests; none unless it says so."""
        return ()

    def offers(self, operation: str) -> bool:
        """Whether it defines the method of ``operation``."""
        return getattr(type(self), operation) is not getattr(Implementation, operation)


_HINTS = {
    "vllm": " (pip install --no-deps vllm, or leave it out with --impl)",
    "gguf_plugin": " (pip install --no-deps vllm-gguf-plugin, or leave it out with --impl)",
    "gguf_py": " (pip install gguf, or leave it out with --impl)",
    "ggml": " (pip install ggml-python, which needs a C compiler, or leave it out with --impl)",
    "vllm_0_16": " (python -m mla_conformance.suites.harness.shipped.history_install FOLDER, or leave it out)",
}


class NotInstalled(Exception):
    """An implementation, or what it needs, is not installed; the message says how to."""


def builtin_names() -> list[str]:
    """Names of the adapters that come with the suite: the modules of ``harness/implementations/``."""
    return sorted(module.name for module in pkgutil.iter_modules(implementations.__path__))


def load(spec: str) -> Implementation:
    """Return the implementation that ``spec`` names: a built-in name, or ``package.module:Class``.

    Raises:
        NotInstalled: it, or what it needs, cannot be imported.
        BadUse: there is none, or it is no :class:`Implementation`.
    """
    module_name, _, class_name = spec.partition(":")
    if not class_name:
        if spec not in builtin_names():
            raise BadUse(f"--impl {spec}: unknown; use {', '.join(builtin_names())}, or package.module:Class")
        module_name, class_name = f"{implementations.__name__}.{spec}", "Adapter"
    try:
        module = importlib.import_module(module_name)
        adapter = getattr(module, class_name)()
    except ImportError as error:
        raise NotInstalled(f"--impl {spec}: cannot be imported: {error}{_HINTS.get(spec, '')}") from error
    except AttributeError as error:
        raise BadUse(f"--impl {spec}: {error}") from error
    except TypeError as error:
        raise BadUse(f"--impl {spec}: cannot be created without arguments: {error}") from error
    if not isinstance(adapter, Implementation):
        raise BadUse(f"--impl {spec}: {class_name} does not derive from {Implementation.__qualname__}")
    return adapter
