"""MLA decode touches what it must and depends on nothing else."""

import pytest

from mla_conformance.suites.harness.cases import subset
from mla_conformance.suites.harness.drawing import decode_problems, drawn, listed
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.judge import check_equal_bits, check_output
from mla_conformance.suites.harness.problems import POISONS, UNUSED_ENTRIES, MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 70))


@pytest.mark.requirement("MLA-DEC-18")
@drawn(decode_problems(poison=POISONS[0]))
def test_memory_that_must_not_matter_changes_no_bit(subject: Subject, problem: MLADecodeProblem) -> None:
    """NaN, infinity and the largest number in page tails, other pages, output and scratch give equal bits."""
    outcomes = [subject.mla_decode(problem.replace(poison=poison)) for poison in POISONS]
    for poison, outcome in zip(POISONS[1:], outcomes[1:], strict=True):
        check_equal_bits(outcome.out, outcomes[0].out, f"out with {poison} instead of {POISONS[0]}")
        check_equal_bits(outcome.lse, outcomes[0].lse, f"lse with {poison} instead of {POISONS[0]}")
    check_output(outcomes[0])


@pytest.mark.requirement("MLA-DEC-19")
@listed(BASE, page_size=[1, 16, 64], num_splits=[1, 8])
def test_unused_block_table_entries_change_no_bit(subject: Subject, problem: MLADecodeProblem) -> None:
    """Negative numbers, pages beyond the cache and somebody else's page give equal bits."""
    outcomes = [subject.mla_decode(problem.replace(unused_entries=entry)) for entry in UNUSED_ENTRIES]
    for entry, outcome in zip(UNUSED_ENTRIES[1:], outcomes[1:], strict=True):
        check_equal_bits(outcome.out, outcomes[0].out, f"out with {entry} unused entries")
    check_output(outcomes[0])


@pytest.mark.requirement("MLA-DEC-20")
@listed(BASE.replace(layout="gapped"), heads=[1, 5, 16, 20], num_splits=[1, 8])
def test_whole_output_is_written_and_nothing_else(subject: Subject, problem: MLADecodeProblem) -> None:
    """The output starts as NaN; inputs and the gaps between rows are compared byte for byte on every run."""
    outcome = subject.mla_decode(problem)
    unwritten = int(outcome.out.isnan().sum())
    if unwritten:
        raise Mismatch(f"{unwritten} of {outcome.out.numel()} output elements are still NaN")


@pytest.mark.requirement("MLA-DEC-21")
@listed(BASE.replace(layout="far", lengths=(70,)), page_size=[16, 24], num_splits=[1, 4], heads=[1, 16])
def test_offsets_beyond_two_to_the_31(subject: Subject, problem: MLADecodeProblem) -> None:
    """Pages lie 2**30 elements apart; a 32-bit offset would wrap into memory that holds zeros."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-22")
@listed(BASE.replace(pages="invalid", poison="huge"), seed=[0, 1], page_size=[1, 16, 64])
def test_page_ids_outside_the_cache(subject: Subject, problem: MLADecodeProblem) -> None:
    """The last request's first page is negative or beyond the cache; the others must not notice.

    The poison is finite, so that a NaN cannot come from reading some other page.
    """
    documented = subject.implementation.invalid_pages
    if documented is None:
        raise Unsupported("documents nothing for page ids outside the cache")
    case = subject.build(problem)
    if documented == "refused":
        with pytest.raises(ValueError, match="page"):
            subject.run(case)
        return
    outcome = subject.run(case)
    last = len(problem.lengths) - 1
    if not (outcome.out[last].isnan().all() and outcome.lse[last].isnan().all()):
        raise Mismatch("the request with an invalid page is not NaN throughout")
    alone = subject.run(subset(case, list(range(last))))
    check_equal_bits(outcome.out[:last], alone.out, "out of the other requests")
