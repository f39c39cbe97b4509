"""Operators keep their word to a caller: in eager, while tracing, compiled, and in a CUDA graph."""

from __future__ import annotations

import functools
import shutil

import pytest

from mla_conformance.suites.contracts import eager, graphs, tracing
from mla_conformance.suites.harness.errors import Unsupported
from mla_conformance.suites.harness.op_subject import RegisteredOp


@pytest.mark.requirement("MLA-OPS-01")
def test_what_is_written_is_declared(registered_op: RegisteredOp) -> None:
    """Every byte of every argument, before and after."""
    registered_op.check(eager.check_declared_mutation)


@pytest.mark.requirement("MLA-OPS-02")
def test_the_callers_buffer_receives_the_result(registered_op: RegisteredOp) -> None:
    """Whole, with gaps between rows, from the middle of an allocation, with spare rows; one row and none."""
    registered_op.check(eager.check_caller_receives)


@pytest.mark.requirement("MLA-OPS-03")
def test_a_later_call_leaves_earlier_results_alone(registered_op: RegisteredOp) -> None:
    """And is not answered from them."""
    registered_op.check(eager.check_second_call)


@pytest.mark.requirement("MLA-OPS-04")
def test_results_are_memory_of_their_own(registered_op: RegisteredOp) -> None:
    """No view of an argument, and no two of them one."""
    registered_op.check(eager.check_returned)


@pytest.mark.requirement("MLA-OPS-05")
def test_tracing_promises_what_the_call_gives(registered_op: RegisteredOp) -> None:
    """In every dtype and odd shape that the operator accepts."""
    registered_op.check(tracing.check_fake)


@pytest.mark.requirement("MLA-OPS-06")
def test_opcheck_agrees(registered_op: RegisteredOp) -> None:
    """Schema, autograd registration, fake tensors and ahead-of-time dispatch."""
    registered_op.check(tracing.check_with_opcheck)


@pytest.mark.requirement("MLA-OPS-07")
def test_a_compiled_caller_gets_the_bits_of_eager(registered_op: RegisteredOp) -> None:
    """Functionalised as for every backend, and run as it is."""
    registered_op.check(functools.partial(tracing.check_compiled, backend="aot_eager"))


@pytest.mark.requirement("MLA-OPS-08")
def test_inductor_gives_the_bits_of_eager(registered_op: RegisteredOp) -> None:
    """Buffers are planned, reused and written in place by the compiler."""
    if registered_op.lane.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Unsupported("inductor needs a C++ compiler on a CPU, and there is none")
    registered_op.check(functools.partial(tracing.check_compiled, backend="inductor"))


@pytest.mark.requirement("MLA-OPS-09")
def test_a_captured_graph_follows_its_inputs(registered_op: RegisteredOp) -> None:
    """Lengths, tables and slots change between replays, and rows of length 0 move."""
    if registered_op.lane.device == "cpu":
        raise Unsupported("CUDA graphs are captured on a GPU only")
    registered_op.check(graphs.check_graph_replay)
