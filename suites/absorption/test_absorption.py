"""Each head's queries meet its own W_UK, and each head's outputs its own W_UV, in the caller's buffer."""

import pytest
from hypothesis import strategies as st

from mla_conformance.suites.harness.absorption_outcomes import check_heads_product
from mla_conformance.suites.harness.drawing import drawn, listed
from mla_conformance.suites.harness.problems import DTYPES, POISONS, AbsorbQueryProblem, VUpProjProblem
from mla_conformance.suites.harness.problems.absorption import WEIGHT_LAYOUTS
from mla_conformance.suites.harness.subject import Subject

ABSORB = AbsorbQueryProblem()
V_UP = VUpProjProblem()
SQUARE = {"kv_lora_rank": 48, "head_dim": 48}
"""Sizes with which a transposed matrix would fit."""
FIELDS = {
    "tokens": st.integers(1, 20),
    "heads": st.integers(1, 4),
    "kv_lora_rank": st.sampled_from([16, 40, 72]),
    "head_dim": st.sampled_from([7, 16, 33]),
    "dtype": st.sampled_from(DTYPES),
    "layout": st.sampled_from(["dense", "gapped", "rows", "head_major"]),
    "weight_layout": st.sampled_from(WEIGHT_LAYOUTS),
    "poison": st.sampled_from(POISONS),
    "seed": st.integers(0, 2**31 - 1),
}


@pytest.mark.requirement("MLA-ABS-01")
@listed(ABSORB, dtype=["float16", "float32"], tokens=[1, 17, 70], head_dim=[33], heads=[1])
def test_absorbed_query_is_the_product(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """One token and many, sizes that fill no tile."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-01")
@drawn(st.builds(AbsorbQueryProblem, **FIELDS))
def test_any_absorbed_query_is_the_product(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """Drawn sizes, layouts and poison."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-02")
@listed(ABSORB.replace(**SQUARE, heads=4), weight_layout=["kv_b_rows", "transposed"])
def test_each_head_has_its_own_key_matrix(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """The matrix is square, so that its transpose fits; strides say which it is, and value rows lie between."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-03")
@listed(ABSORB.replace(values="beyond_float16", head_dim=128, kv_lora_rank=32, heads=1), dtype=DTYPES)
def test_absorbing_sums_pass_what_float16_holds(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """Half of the terms add up to 76,800, the other half takes that away again."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-04")
@listed(ABSORB, layout=["gapped", "rows", "head_major"], poison=["inf"])
def test_queries_of_any_stride_reach_the_callers_buffer(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """Queries are the first part of wider rows; what lies between, before and behind the result is compared."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-05")
@listed(ABSORB.replace(values="one_nan"), tokens=[2, 17])
def test_nan_in_a_query_stays_in_its_token_and_head(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """One element of one token and head."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-06")
@listed(ABSORB.replace(layout="far", tokens=4), weight_layout=["dense"])
def test_query_offsets_beyond_two_to_the_31(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """Tokens and matrices lie 2**30 elements apart; a 32-bit offset would wrap."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-07")
@listed(ABSORB.replace(tokens=0), layout=["rows"])
def test_no_queries_write_nothing(subject: Subject, problem: AbsorbQueryProblem) -> None:
    """A batch without decoding requests."""
    check_heads_product(subject.absorb_query(problem))


@pytest.mark.requirement("MLA-ABS-11")
@listed(V_UP, dtype=["float16", "float32"], tokens=[1, 17, 70], head_dim=[33], heads=[1])
def test_value_is_the_product(subject: Subject, problem: VUpProjProblem) -> None:
    """One token and many, sizes that fill no tile."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-11")
@drawn(st.builds(VUpProjProblem, **FIELDS))
def test_any_value_is_the_product(subject: Subject, problem: VUpProjProblem) -> None:
    """Drawn sizes, layouts and poison."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-12")
@listed(V_UP.replace(**SQUARE, heads=4), weight_layout=["kv_b_rows", "transposed"])
def test_each_head_has_its_own_value_matrix(subject: Subject, problem: VUpProjProblem) -> None:
    """The matrix is square, so that its transpose fits; strides say which it is, and key rows lie between."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-13")
@listed(V_UP.replace(values="beyond_float16", kv_lora_rank=128, heads=1), dtype=DTYPES)
def test_value_sums_pass_what_float16_holds(subject: Subject, problem: VUpProjProblem) -> None:
    """Half of the terms add up to 76,800, the other half takes that away again."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-14")
@listed(V_UP.replace(layout="rows"), tokens=[1, 17], dtype=["float32"])
def test_values_reach_rows_of_a_larger_buffer(subject: Subject, problem: VUpProjProblem) -> None:
    """Rows of all heads lie apart, with rows of padding behind; the gaps are compared element by element."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-15")
@listed(V_UP.replace(layout="gapped"), layout=["head_major"], poison=["inf"])
def test_values_of_any_stride_reach_the_callers_buffer(subject: Subject, problem: VUpProjProblem) -> None:
    """Heads of the result lie apart, or outermost."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-16")
@listed(V_UP.replace(values="one_nan"), tokens=[2, 17])
def test_nan_in_an_output_stays_in_its_token_and_head(subject: Subject, problem: VUpProjProblem) -> None:
    """A request that saw no token may be NaN; its neighbours are not."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-17")
@listed(V_UP.replace(layout="far", tokens=4), weight_layout=["kv_b_rows"])
def test_value_offsets_beyond_two_to_the_31(subject: Subject, problem: VUpProjProblem) -> None:
    """Tokens and matrices lie 2**30 elements apart; a 32-bit offset would wrap."""
    check_heads_product(subject.v_up_proj(problem))


@pytest.mark.requirement("MLA-ABS-18")
@listed(V_UP.replace(tokens=0), layout=["rows"])
def test_no_outputs_write_nothing(subject: Subject, problem: VUpProjProblem) -> None:
    """A batch without decoding requests."""
    check_heads_product(subject.v_up_proj(problem))
