"""Names: every tensor of a model's GGUF file fills something, and every parameter is filled."""

from __future__ import annotations

import re

import pytest

from mla_conformance.suites.gguf.hf_parameters import load
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.problems import GGUFNamesProblem
from mla_conformance.suites.harness.subject import Subject

FILES = {
    "GLM-5": GGUFNamesProblem(),
    "GLM-5 with its predictor": GGUFNamesProblem(mtp=True),
    "GLM-5, fused kv_b": GGUFNamesProblem(split_kv_b=False),
    "DeepSeek-V3": GGUFNamesProblem(model="DeepSeek-V3"),
    "DeepSeek-V3, fused kv_b": GGUFNamesProblem(model="DeepSeek-V3", split_kv_b=False),
    "DeepSeek-V3, dense layers": GGUFNamesProblem(model="DeepSeek-V3", layers=3),
    "DeepSeek-V3, dense layers, fused kv_b": GGUFNamesProblem(model="DeepSeek-V3", layers=3, split_kv_b=False),
    "DeepSeek-V2-Lite": GGUFNamesProblem(model="DeepSeek-V2-Lite"),
    "GLM-4.7-Flash": GGUFNamesProblem(model="GLM-4.7-Flash"),
    "Kimi-K2": GGUFNamesProblem(model="Kimi-K2"),
}
SHOWN = 5

every_file = pytest.mark.parametrize("problem", list(FILES.values()), ids=list(FILES))


@pytest.mark.requirement("GGUF-NAM-01")
@every_file
def test_no_tensor_of_the_file_is_dropped(subject: Subject, problem: GGUFNamesProblem) -> None:
    """A tensor without a place is a weight that stays uninitialised without a word."""
    outcome = subject.gguf_names(problem)
    unused = [name for name, *_ in outcome.case.tensors if not outcome.fills.get(name)]
    _nothing("tensors of the file fill nothing", unused)


@pytest.mark.requirement("GGUF-NAM-02")
@every_file
def test_every_parameter_is_filled_and_none_invented(subject: Subject, problem: GGUFNamesProblem) -> None:
    """The parameters are those that transformers' own model class has; the predictor's are beyond it."""
    outcome = subject.gguf_names(problem)
    filled = {parameter for parameters in outcome.fills.values() for parameter in parameters}
    layers = outcome.case.model.config["num_hidden_layers"]
    known = {name for name in load(problem.model) if _layer(name) < layers}
    _nothing("parameters are filled by no tensor", sorted(known - filled))
    invented = [name for name in filled - known if not (problem.mtp and _layer(name) == layers)]
    _nothing("parameters are none of the model's", sorted(invented))


def _layer(parameter: str) -> int:
    """The layer that a parameter belongs to, -1 for those of no layer."""
    found = re.match(r"model\.layers\.(\d+)\.", parameter)
    return int(found[1]) if found else -1


def _nothing(what: str, names: list[str]) -> None:
    """Raise Mismatch if there are any names."""
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise Mismatch(f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}")
