"""What an implementation says that it can do, it can."""

import pytest
from hypothesis import strategies as st

from mla_conformance.suites.harness.drawing import drawn
from mla_conformance.suites.harness.judge import check_lse, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

WHOLE_RANGE = st.builds(
    MLADecodeProblem,
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple),
    heads=st.integers(2, 140),
    kv_lora_rank=st.integers(3, 33).map(lambda n: 16 * n),
    qk_rope_head_dim=st.sampled_from([0, 16, 32, 48, 64, 80]),
    page_size=st.integers(1, 140),
    num_splits=st.integers(1, 9),
    cache_dtype=st.sampled_from(["float16", "float8_e4m3fn"]),
    seed=st.integers(0, 2**31 - 1),
)


@pytest.mark.requirement("MLA-DEC-32")
@drawn(WHOLE_RANGE)
def test_what_is_not_declined_is_right(subject: Subject, problem: MLADecodeProblem) -> None:
    """Sizes across and beyond every declared range: each is either declined before launch or right."""
    outcome = subject.mla_decode(problem)
    check_output(outcome)
    check_lse(outcome)
