"""What a launch asks of the card, and what its threads do to each other's memory."""

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 70))
FULL = BASE.replace(kv_lora_rank=512, qk_rope_head_dim=64, page_size=64, dtype="bfloat16", cache_dtype="bfloat16")


@pytest.mark.requirement("MLA-LAU-01")
@listed(FULL, cache_dtype=["bfloat16", "float8_e4m3fn"], heads=[1, 5, 20, 64, 128])
def test_every_launch_fits_the_target(subject: Subject, problem: MLADecodeProblem) -> None:
    """A launch over the limit computes rightly in the emulator, and a card refuses it."""
    if not subject.implementation.compiles_kernels:
        raise Unsupported("launches no kernel")
    if not subject.lane.tells_refusals:
        raise Unsupported(f"the {subject.lane.name} lane does not know the limits of a card that is absent")
    subject.mla_decode(problem)
    refusals = subject.lane.refusals
    if refusals:
        raise Mismatch("; ".join(refusals))


@pytest.mark.requirement("MLA-LAU-02")
@listed(
    BASE.replace(lengths=(0, 1, 16, 150)),
    dtype=["bfloat16", "float16", "float32"],
    cache_dtype=["float8_e4m3fn"],
    heads=[1, 5, 20, 64],
    page_size=[1, 64],
    num_splits=[1, 5],
    layout=["gapped", "layers"],
    qk_rope_head_dim=[0, 64],
    kv_lora_rank=[192, 512],
)
def test_no_race_no_early_read_no_wild_access(subject: Subject, problem: MLADecodeProblem) -> None:
    """The lane keeps records of every access; each test fails on a fault, this one is about nothing else."""
    if not subject.implementation.compiles_kernels:
        raise Unsupported("launches no kernel")
    if not subject.lane.tells_faults:
        raise Unsupported(f"the {subject.lane.name} lane keeps no records of accesses")
    subject.mla_decode(problem.replace(cache_dtype=problem.dtype) if not problem.is_fp8 else problem)
