"""Dequantisation: every type, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mla_conformance.reference.gguf import dequantize
from mla_conformance.suites.harness.drawing import dequantize_problems, drawn, listed
from mla_conformance.suites.harness.gguf_judge import check_dequantised
from mla_conformance.suites.harness.judge import check_exact
from mla_conformance.suites.harness.problems import POISONS, GGUFDequantizeProblem
from mla_conformance.suites.harness.problems.gguf import QUANTS
from mla_conformance.suites.harness.subject import Subject

ALL = [GGUFDequantizeProblem(quant=quant) for quant in QUANTS]
HOSTILE = ["zeros", "ones", "denormal", "negative", "extreme", "counting"]
HUGE = GGUFDequantizeProblem(quant="Q4_0", rows=2**23 + 2, columns=256, dtype="bfloat16")

every_type = pytest.mark.parametrize("problem", ALL, ids=[f"quant={problem.quant}" for problem in ALL])


@pytest.mark.requirement("GGUF-DEQ-01")
@every_type
def test_random_blocks_have_ggmls_bits(subject: Subject, problem: GGUFDequantizeProblem) -> None:
    """Any byte in every integer field, any finite factor."""
    check_dequantised(subject.gguf_dequantize(problem))


@pytest.mark.requirement("GGUF-DEQ-01")
@drawn(dequantize_problems())
def test_drawn_matrices_have_ggmls_bits(subject: Subject, problem: GGUFDequantizeProblem) -> None:
    """Types, sizes, dtypes and layouts together."""
    check_dequantised(subject.gguf_dequantize(problem))


@pytest.mark.requirement("GGUF-DEQ-02")
@pytest.mark.parametrize("values", HOSTILE)
@every_type
def test_hostile_factors_have_ggmls_bits(subject: Subject, problem: GGUFDequantizeProblem, values: str) -> None:
    """Subnormal, negative, smallest and largest factors; fields all zeros and all ones; each byte at each place."""
    check_dequantised(subject.gguf_dequantize(problem.replace(values=values)))


@pytest.mark.requirement("GGUF-DEQ-03")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_type
def test_narrow_results_are_rounded_once(subject: Subject, problem: GGUFDequantizeProblem, dtype: str) -> None:
    """From the float32 value: arithmetic in the narrow type rounds more often."""
    check_dequantised(subject.gguf_dequantize(problem.replace(dtype=dtype)))


@pytest.mark.requirement("GGUF-DEQ-04")
@pytest.mark.parametrize("quant", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_every_entry_of_a_grid_is_right(subject: Subject, quant: str) -> None:
    """32,768 groups of eight: each of up to 2,048 entries of the type's table comes up five times or more."""
    check_dequantised(subject.gguf_dequantize(GGUFDequantizeProblem(quant=quant, rows=256, columns=1024)))


@pytest.mark.requirement("GGUF-DEQ-05")
@every_type
def test_odd_strides_and_unaligned_starts(subject: Subject, problem: GGUFDequantizeProblem) -> None:
    """Rows lie an odd number of bytes apart, so that words cannot be loaded as such."""
    check_dequantised(subject.gguf_dequantize(problem.replace(layout="gapped", rows=5)))


@pytest.mark.requirement("GGUF-DEQ-06")
@listed(GGUFDequantizeProblem(), rows=[0, 1, 2, 37], columns=[256, 768, 2816, 7168])
def test_any_number_of_rows_and_blocks(subject: Subject, problem: GGUFDequantizeProblem) -> None:
    """None, one, and numbers that fill no tile."""
    check_dequantised(subject.gguf_dequantize(problem))


@pytest.mark.requirement("GGUF-DEQ-07")
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "IQ3_S", "MXFP4"])
def test_memory_that_must_not_matter_changes_no_bit(subject: Subject, quant: str, poison: str) -> None:
    """The whole output is written, nothing beside it, whatever lay there."""
    check_dequantised(subject.gguf_dequantize(GGUFDequantizeProblem(quant=quant, poison=poison, layout="gapped")))


@pytest.mark.requirement("GGUF-DEQ-08")
@listed(GGUFDequantizeProblem(rows=3), quant=["Q8_0"])
def test_rows_beyond_32_bit_offsets(subject: Subject, problem: GGUFDequantizeProblem) -> None:
    """Rows of the blocks and of the result lie more than 2**30 elements apart."""
    check_dequantised(subject.gguf_dequantize(problem.replace(layout="far", dtype="float16")))


@pytest.mark.requirement("GGUF-DEQ-08")
def test_more_than_2_to_the_31_elements(subject: Subject) -> None:
    """A dense matrix too large for 32-bit counts; its last rows are judged."""
    outcome = subject.gguf_dequantize(HUGE)
    last = slice(HUGE.rows - 3, HUGE.rows)
    expected = dequantize(outcome.case.data[last], HUGE.quant).to(torch.bfloat16)
    check_exact(outcome.out[last], expected, "the last rows")


@pytest.mark.requirement("GGUF-DEQ-09")
def test_microscaling_factors_follow_ggml_at_the_ends(subject: Subject) -> None:
    """E8M0 codes 0 (a subnormal) and 255 (a number to ggml, NaN to the OCP standard) in MXFP4."""
    outcome = subject.run(_with_first_bytes(subject, "MXFP4", [0, 255, 1, 254]))
    check_dequantised(outcome)


@pytest.mark.requirement("GGUF-DEQ-10")
@pytest.mark.parametrize("values", ["random", "extreme"])
def test_a_block_of_q8_1_is_36_bytes(subject: Subject, values: str) -> None:
    """Two float16 and 32 integers, as ggml has it; gguf-py's table says 40."""
    check_dequantised(subject.gguf_dequantize(GGUFDequantizeProblem(quant="Q8_1", columns=1024, values=values)))


def _with_first_bytes(subject: Subject, quant: str, first: list[int]):
    """A case of one row whose blocks begin with these bytes."""
    case = subject.build(GGUFDequantizeProblem(quant=quant, rows=1, columns=32 * len(first)))
    step = case.problem.row_bytes // len(first)
    for i, byte in enumerate(first):
        case.data[0, i * step] = byte
    case.buffers[0].guard()
    return case
