"""What a run is made of: lanes, implementations, targets, the registry and the ledger, from the command line."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mla_conformance.suites.harness import lanes, ledger, placement, requirements
from mla_conformance.suites.harness.errors import BadUse
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.ledger import Expectation
from mla_conformance.suites.harness.requirements import Requirement
from mla_conformance.suites.harness.targets import TARGETS

if TYPE_CHECKING:
    from mla_conformance.suites.harness.compiler import Compiler
    from mla_conformance.suites.harness.implementation import Implementation
    from mla_conformance.suites.harness.op_subject import RegisteredOp
    from mla_conformance.suites.harness.problems import Problem
    from mla_conformance.suites.harness.subject import Subject

COMPILED_TARGETS = ["sm_90", "sm_100", "sm_120", "sm_121"]
"""What the compile lane compiles for if nothing is asked."""
DEFAULT_IMPLEMENTATIONS = ["reference", "vllm", "kernels", "gguf_py", "ggml", "gguf_plugin", "vllm_0_16"]
OPTIONAL = ("gguf_py", "ggml", "gguf_plugin", "vllm_0_16")
"""Of the default implementations those that are left out, with a word in the report's header, if not installed."""


@dataclass
class Plan:
    """One run."""

    lanes: list[Lane]
    implementations: dict[str, Implementation]
    """By the ``--impl`` text that named it."""
    asked_targets: list[str]
    """As ``--target`` names them; none if it was not given."""
    requirements: dict[str, Requirement]
    ledger: list[Expectation]
    problem: Problem | None
    device: str
    absent: list[str] = field(default_factory=list)
    """Why default implementations are not part of the run."""
    _versions: dict[str, str] = field(default_factory=dict)

    def subjects(self, operations: set[str]) -> list[Subject]:
        """Every implementation that offers ``operations``, in the lane that executes kernels."""
        from mla_conformance.suites.harness.subject import Subject

        offering = [impl for impl in self.implementations.values() if all(map(impl.offers, operations))]
        return [Subject(impl, lane) for lane in self._executing() for impl in offering]

    def compilers(self, operations: set[str]) -> list[Compiler]:
        """Every implementation with kernels for ``operations``, for every target, if the compile lane was asked for."""
        from mla_conformance.suites.harness.compiler import Compiler

        found = [lane for lane in self.lanes if not lane.executes]
        return [
            Compiler(spec, impl, lane, TARGETS[target])
            for lane in found
            for spec, impl in self.implementations.items()
            if impl.compiles_kernels and impl.in_compile_lane and all(map(impl.offers, operations))
            if not impl.without_kernels & operations
            for target in self.asked_targets or COMPILED_TARGETS
        ]

    def registered_ops(self, operations: set[str]) -> list[RegisteredOp]:
        """Every operator of every implementation that ``operations`` are about, in the lane that executes kernels."""
        from mla_conformance.suites.harness.op_subject import RegisteredOp

        return [
            RegisteredOp(impl, lane, call)
            for lane in self._executing()
            for impl in self.implementations.values()
            for call in impl.registered_ops()
            if all(map(call.offers, operations))
        ]

    def _executing(self) -> list[Lane]:
        return [made for lane in self.lanes if lane.executes for made in lane.for_targets(self.asked_targets)]

    def applies(self, expectation: Expectation, implementation: Implementation, lane: Lane) -> bool:
        """Whether the ledger entry speaks of this implementation in this lane, on this device, with this Triton."""
        return expectation.covers(
            implementation.name, self.version_of(implementation), lane.name, self.device, self.triton
        )

    @functools.cached_property
    def triton(self) -> str:
        """Version of Triton."""
        return version("triton")

    def version_of(self, implementation: Implementation) -> str:
        """Its version, asked once: every test is held against every entry of the ledger."""
        if implementation.name not in self._versions:
            self._versions[implementation.name] = implementation.version()
        return self._versions[implementation.name]

    def option_of(self, implementation: str) -> list[str]:
        """The option that named an implementation."""
        spec, found = next((spec, impl) for spec, impl in self.implementations.items() if impl.name == implementation)
        return [found.option, spec]


KEY = pytest.StashKey[Plan]()


def make(config: pytest.Config) -> Plan:
    """Set the process up for the lanes asked for, then load what the run needs.

    Raises:
        BadUse: anything that the command line or a data file has wrong.
    """
    devices = placement.visible_devices()
    chosen = lanes.choose(config.getoption("--lane") or ["auto"], devices)
    targets = config.getoption("--target") or []
    for target in targets:
        if target not in TARGETS:
            raise BadUse(f"--target {target}: unknown; use {', '.join(TARGETS)}")
    registry = requirements.load()
    expectations = ledger.load(Path(config.getoption("--expectations")))
    for expectation in expectations:
        if expectation.requirement not in registry:
            raise BadUse(f"expectations: {expectation.requirement} is no requirement; see --list-requirements")

    environment = {"TRITON_DEFAULT_FP_FUSION": "1"}
    for lane in chosen:
        environment |= lane.environment()
    device = placement.device_of_worker(os.environ.get("PYTEST_XDIST_WORKER"), devices)
    if device is not None:
        environment.setdefault("CUDA_VISIBLE_DEVICES", device)
    stale = {name for name, value in environment.items() if os.environ.get(name) != value}
    if stale and "triton" in sys.modules:
        raise BadUse(f"triton was imported before {', '.join(sorted(stale))} could be set; run pytest without what did")
    os.environ.update(environment)

    from mla_conformance.suites.harness import given_ops, implementation
    from mla_conformance.suites.harness.environment import device_name
    from mla_conformance.suites.harness.problems import parse_problem

    asked = config.getoption("--impl")
    operators = config.getoption("--op") or []
    found: dict[str, Implementation] = {spec: given_ops.load(spec) for spec in operators}
    absent = []
    for spec in dict.fromkeys(asked or ([] if operators else DEFAULT_IMPLEMENTATIONS)):
        try:
            found[spec] = implementation.load(spec)
        except implementation.NotInstalled as error:
            if asked or spec not in OPTIONAL:
                raise BadUse(str(error)) from error
            absent.append(str(error).removeprefix("--impl "))
    named = [impl.name for impl in found.values()]
    if len(set(named)) < len(named):
        raise BadUse(f"--impl: two implementations have the same name: {', '.join(named)}")
    for lane in chosen:
        lane.prepare()
    line = config.getoption("--problem")
    try:
        problem = None if line is None else parse_problem(line)
    except ValueError as error:
        raise BadUse(f"--problem: {error}") from error
    return Plan(chosen, found, targets, registry, expectations, problem, device_name(chosen), absent)
