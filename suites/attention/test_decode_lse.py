"""The log-sum-exp of MLA decode: base, dtype, value, and what merging by it gives."""

import math

import pytest
import torch

from mla_conformance.reference.split_kv import merge_states
from mla_conformance.suites.harness.cases import subset
from mla_conformance.suites.harness.drawing import decode_problems, drawn, listed
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.judge import check_equal_bits, check_lse, check_within
from mla_conformance.suites.harness.outcomes import expected
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 50))


@pytest.mark.requirement("MLA-DEC-02")
@drawn(decode_problems())
def test_lse_is_within_the_derived_bound(subject: Subject, problem: MLADecodeProblem) -> None:
    """Drawn problems give the oracle's natural-log lse."""
    check_lse(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-12")
@listed(BASE.replace(values="constant"), lengths=[(1, 2, 3), (37, 64, 100)], num_splits=[1, 3], heads=[2, 8])
def test_equal_keys_give_their_latent_and_score_plus_ln_n(subject: Subject, problem: MLADecodeProblem) -> None:
    """All weights are equal, so the output is the one latent there is, exactly, and lse grows by ln n."""
    outcome = subject.mla_decode(problem)
    for row, keys in enumerate(outcome.case.rows):
        latent = keys[0, : problem.kv_lora_rank].expand_as(outcome.out[row])
        check_equal_bits(outcome.out[row], latent, f"out of request {row}")
    check_lse(outcome)


@pytest.mark.requirement("MLA-DEC-12")
@listed(BASE.replace(values="zero_query"), lengths=[(1, 2, 3), (37, 64, 100)], num_splits=[1, 3])
def test_zero_query_gives_ln_n(subject: Subject, problem: MLADecodeProblem) -> None:
    """Every score is 0, so the lse is ln n: base 2 would give log2 n."""
    outcome = subject.mla_decode(problem)
    for row, length in enumerate(problem.lengths):
        ln_n = torch.full_like(outcome.lse[row], math.log(length), dtype=torch.float64)
        check_within(outcome, "lse", row, outcome.lse[row], ln_n, outcome.bound(row).lse)


@pytest.mark.requirement("MLA-DEC-23")
@listed(BASE, dtype=["float16", "bfloat16", "float32"])
def test_lse_is_float32(subject: Subject, problem: MLADecodeProblem) -> None:
    """An lse of 10 in bfloat16 is off by up to 0.03, and so is the weight that a merge makes of it."""
    outcome = subject.mla_decode(problem.replace(cache_dtype=problem.dtype))
    if outcome.lse.dtype != torch.float32:
        raise Mismatch(f"lse is {outcome.lse.dtype}, not torch.float32")


@pytest.mark.requirement("MLA-DEC-24")
@listed(BASE.replace(lengths=(70, 33)), page_size=[16, 32], num_splits=[1, 3], dtype=["float16", "float32"])
def test_halves_merged_by_their_lse_give_the_whole(subject: Subject, problem: MLADecodeProblem) -> None:
    """Decode the first page and the rest apart; merge with the reference; compare with one float64 pass."""
    whole = subject.build(problem.replace(cache_dtype=problem.dtype))
    requests = list(range(len(problem.lengths)))
    first = subject.run(subset(whole, requests, lengths=[problem.page_size] * len(requests)))
    rest = subject.run(subset(whole, requests, first_page=1))
    for row in requests:
        states = [(o.out[row].double(), o.lse[row].double(), o.bound(row)) for o in (first, rest)]
        (out_a, lse_a, bound_a), (out_b, lse_b, bound_b) = states
        merged = merge_states(out_a, lse_a, out_b, lse_b)
        weight = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
        # An error of the lse moves the weights by at most weight (1 - weight) of it.
        moved = weight * (1 - weight) * (bound_a.lse + bound_b.lse).unsqueeze(-1) * (out_a - out_b).abs()
        bound = weight * bound_a.out + (1 - weight) * bound_b.out + moved
        check_within(rest, "merged out", row, merged.out, expected(whole, row).out, bound)
