"""Each phantom is caught by the requirement that one would expect, in words that name the caller's trouble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.suites.contracts import test_contracts as contracts
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.op_call import OpCall
from mla_conformance.suites.harness.op_subject import RegisteredOp
from mla_conformance.suites.selfcheck import phantoms
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.conftest import Run
from mla_conformance.suites.selfcheck.planting import requirements_of
from mla_conformance.suites.selfcheck.readme import example_with
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize

PHANTOM = "phantom output"
# Operator, the test that must catch it, and what it must say.
CAUGHT: list[tuple[str, Any, str]] = [
    ("undeclared", contracts.test_what_is_written_is_declared, f"{PHANTOM}.*its schema does not say so"),
    ("undeclared", contracts.test_opcheck_agrees, "opcheck"),
    ("undeclared", contracts.test_a_compiled_caller_gets_the_bits_of_eager, PHANTOM),
    ("undeclared", contracts.test_inductor_gives_the_bits_of_eager, PHANTOM),
    ("rebinds", contracts.test_what_is_written_is_declared, f"{PHANTOM}.*left the caller's 'out' as it was"),
    ("rebinds", contracts.test_the_callers_buffer_receives_the_result, PHANTOM),
    ("returns", contracts.test_what_is_written_is_declared, f"{PHANTOM}.*returns a tensor instead"),
    ("returns", contracts.test_the_callers_buffer_receives_the_result, f"{PHANTOM}.*returns a tensor instead"),
    ("flattens", contracts.test_the_callers_buffer_receives_the_result, f"row-strided buffer: {PHANTOM}"),
    ("resizes", contracts.test_the_callers_buffer_receives_the_result, f"row-strided buffer: {PHANTOM}.*other memory"),
    ("depends_on_the_buffer", contracts.test_the_callers_buffer_receives_the_result, "depends on what its buffer held"),
    ("leaves_the_last_row", contracts.test_the_callers_buffer_receives_the_result, "8 of 40 elements of 'out' still"),
    (
        "writes_past_the_end",
        contracts.test_the_callers_buffer_receives_the_result,
        r"padded buffer: .*out \(1 elements",
    ),
    ("scratches_its_input", contracts.test_what_is_written_is_declared, "writes 'q'"),
    (
        "writes_the_last_buffer_too",
        contracts.test_a_later_call_leaves_earlier_results_alone,
        "changed 'out' of the",
    ),
    ("returns_its_workspace", contracts.test_a_later_call_leaves_earlier_results_alone, "an earlier call handed out"),
    ("answers_late", contracts.test_a_later_call_leaves_earlier_results_alone, "depends on the calls made before"),
    ("returns_a_view", contracts.test_results_are_memory_of_their_own, "is a view of 'q'"),
    ("returns_one_memory_twice", contracts.test_results_are_memory_of_their_own, "are one memory"),
    ("fakes_another_shape", contracts.test_tracing_promises_what_the_call_gives, "tracing promises"),
    ("fakes_another_dtype", contracts.test_tracing_promises_what_the_call_gives, "tracing promises.*float32.*float16"),
    ("fakes_other_strides", contracts.test_tracing_promises_what_the_call_gives, "tracing promises"),
    ("has_no_fake", contracts.test_tracing_promises_what_the_call_gives, "register a fake"),
    ("has_no_fake", contracts.test_a_compiled_caller_gets_the_bits_of_eager, "does not run"),
]
if torch.cuda.is_available():
    CAUGHT.append(("reads_on_the_host", contracts.test_a_captured_graph_follows_its_inputs, "captured"))
ON_A_GPU = {"reads_on_the_host"}
"""Phantoms that only a CUDA graph shows."""


def subject(call: OpCall, device: str = "cpu") -> RegisteredOp:
    """The operator as somebody's, on ``device``."""
    phantoms._seen.clear()
    lane = AnySize()
    lane.device = device
    return RegisteredOp(Broken(), lane, call)


@pytest.mark.parametrize(("name", "test", "words"), CAUGHT, ids=[f"{n}-{test.__name__}" for n, test, _ in CAUGHT])
def test_a_phantom_is_caught(name: str, test: Callable[..., None], words: str) -> None:
    """And the same test passes for an operator of its kind that is right."""
    wrong, device = phantoms.call(name), "cuda" if name in ON_A_GPU else "cpu"
    test(registered_op=subject(phantoms.call("right" if wrong.written else "right_result"), device))
    with pytest.raises(Mismatch, match=words):
        test(registered_op=subject(wrong, device))


def test_every_contract_has_a_phantom() -> None:
    """All but graphs, which only a GPU can capture."""
    expected = {i for i in requirements.load() if i.startswith("MLA-OPS-")}
    found = requirements_of([(Broken, test, {}) for _, test, _ in CAUGHT])
    assert found | {"MLA-OPS-09"} == expected


def test_every_operator_that_is_wrong_is_caught() -> None:
    """A phantom in no line above would be one that nothing was seen to catch."""
    registered = {
        str(name).split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if str(name).startswith("mla_conformance_phantom::")
    }
    assert {name for name, _, _ in CAUGHT} | ON_A_GPU == registered - {"right", "right_result"}


def test_an_operator_of_ones_own_is_checked(run_pytest: Callable[..., Run]) -> None:
    """``--op`` names it; the failure says what the caller would see, and the reproduction line runs it again."""
    module = "mla_conformance.suites.selfcheck.phantoms"
    right = run_pytest("suites/contracts", "--op", f"{module}:RIGHT", "-k", "not inductor")
    assert right.code == 0, right.output
    assert right.results["counts"] == {"pass": 6, "unsupported": 1}
    chosen = "suites/contracts/test_contracts.py::test_what_is_written_is_declared"
    wrong = run_pytest(chosen, "--op", f"{module}:UNDECLARED")
    assert wrong.code == pytest.ExitCode.TESTS_FAILED
    (result,) = wrong.results["results"]
    assert "phantom output" in result["reason"]
    assert f"--op {module}:UNDECLARED" in result["reproduce"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nosuchmodule:CALL", "--op nosuchmodule:CALL: cannot be imported"),
        ("mla_conformance.suites.selfcheck.phantoms", "package.module:NAME"),
        ("mla_conformance.suites.selfcheck.phantoms:NONE", "has no attribute 'NONE'"),
        ("mla_conformance.suites.selfcheck.phantoms:answer", "is a function; make it an OpCall"),
    ],
)
def test_a_wrong_op_is_one_sentence(run_pytest: Callable[..., Run], spec: str, words: str) -> None:
    run = run_pytest("suites/contracts", "--op", spec)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert words in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("outputs", [("out2",), ("x",), ()])
def test_an_output_that_is_no_tensor_argument_is_refused(outputs: tuple[str, ...]) -> None:
    """Another name; a name that the operator does not have; none, of an operator that returns nothing."""
    with pytest.raises(ValueError, match=r"no tensor argument|returns nothing"):
        OpCall(torch.ops.mla_conformance_phantom.right.default, phantoms.rows_and_buffer, outputs)


def test_a_packet_is_no_overload() -> None:
    with pytest.raises(TypeError, match="pass an overload"):
        OpCall(torch.ops.mla_conformance_phantom.right, phantoms.rows_and_buffer, ("out",))


def test_the_example_of_the_readme_is_a_phantom() -> None:
    """It registers an operator that loses its result, and is caught as such."""
    found: dict[str, Any] = {}
    exec(compile(example_with("OpCall"), "README.md", "exec"), found)
    with pytest.raises(Mismatch, match=PHANTOM):
        contracts.test_what_is_written_is_declared(registered_op=subject(found["DOUBLE"]))
