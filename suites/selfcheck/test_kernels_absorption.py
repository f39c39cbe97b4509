"""The public functions of the products with one matrix a head: what they refuse, and what no other lane runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_conformance.kernels.absorption import absorb_query, v_up_proj
from mla_conformance.reference import absorption
from mla_conformance.suites.harness.absorption_cases import build
from mla_conformance.suites.harness.problems import AbsorbQueryProblem, VUpProjProblem
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize

ABSORB = AbsorbQueryProblem(dtype="float32")
V_UP = VUpProjProblem(dtype="float32")


@pytest.fixture(autouse=True)
def _in_a_lane() -> Iterator[None]:
    with AnySize().running():
        yield


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("q_nope", lambda c: [1.0], TypeError),
        ("q_nope", lambda c: c.x.double(), TypeError),
        ("q_nope", lambda c: c.x[0], ValueError),
        ("q_nope", lambda c: c.x[:, :0], ValueError),
        ("q_nope", lambda c: c.x[..., :0], ValueError),
        ("q_nope", lambda c: c.x.new_zeros(5, 3, 1025), ValueError),
        ("q_nope", lambda c: c.x.new_zeros(1, 1, 32).expand(1, 65_536, 32), ValueError),
        ("q_nope", lambda c: c.x.new_zeros(5, 32, 3).mT, ValueError),
        ("w_uk", lambda c: None, TypeError),
        ("w_uk", lambda c: c.weight.half(), TypeError),
        ("w_uk", lambda c: c.weight[0], ValueError),
        ("w_uk", lambda c: c.weight[:2], ValueError),
        ("w_uk", lambda c: c.weight[:, :31], ValueError),
        ("w_uk", lambda c: c.weight.new_zeros(3, 32, 1025), ValueError),
        ("w_uk", lambda c: c.weight.new_zeros(3, 64, 128)[:, ::2, ::2], ValueError),
        ("w_uk", lambda c: c.weight.to("meta"), ValueError),
        ("out", lambda c: "out", TypeError),
        ("out", lambda c: c.out.half(), TypeError),
        ("out", lambda c: c.out[:4], ValueError),
        ("out", lambda c: c.out.flatten(1), ValueError),
        ("out", lambda c: c.out.new_zeros(5, 64, 3).mT, ValueError),
        ("out", lambda c: c.out[:1].expand(5, -1, -1), ValueError),
        ("out", lambda c: c.out.to("meta"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """And nothing is written."""
    case = build(ABSORB)
    given = {"q_nope": case.x, "w_uk": case.weight, "out": case.out} | {name: change(case)}
    with pytest.raises(error, match=rf"^{name} "):
        absorb_query(**given)
    assert case.out.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("latent", lambda c: c.x.double(), TypeError),
        ("latent", lambda c: c.x[0], ValueError),
        ("w_uv", lambda c: c.weight.mT, ValueError),
        ("out", lambda c: c.out[:, :-1], ValueError),
        ("out", lambda c: c.out.new_zeros(96, 5).T, ValueError),
    ],
)
def test_a_wrong_argument_of_the_way_back_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """And nothing is written."""
    case = build(V_UP)
    given = {"latent": case.x, "w_uv": case.weight, "out": case.out} | {name: change(case)}
    with pytest.raises(error, match=rf"^{name} "):
        v_up_proj(**given)
    assert case.out.isnan().all()


def test_results_are_allocated_where_none_are_given() -> None:
    """With the shape of heads, also on the way back."""
    queries, values = build(ABSORB), build(V_UP)
    absorbed, projected = absorb_query(queries.x, queries.weight), v_up_proj(values.x, values.weight)
    expected = absorption.absorb_query(queries.x.double(), queries.weight.double())
    torch.testing.assert_close(absorbed, expected.float())
    expected = absorption.project_output(values.x.double(), values.weight.double().mT)
    torch.testing.assert_close(projected, expected.float())
