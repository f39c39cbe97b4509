"""The emulator against the hardware corpus: launches recorded on an H200, replayed here."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mla_conformance.suites.corpus import record, replay, stored
from mla_conformance.suites.corpus.compare import compare, steps
from mla_conformance.suites.emulator.findings import Kind

MOST_BYTES = 4 * 2**20
UNEQUAL_REPLICAS = re.compile(r"iq[123]_\w+_gemm_kernel")
"""Kernels of the GGUF plugin in which lanes that hold replicas of one sum store them to one address, and the
replicas differ in the last bits: fma contraction fuses a lane's own product and not the one it was sent."""
RECORD_WITHOUT_A_GPU = """
import sys
from pathlib import Path
from triton.runtime.jit import JITFunction
from mla_conformance.suites.corpus import launches, record, stored
from mla_conformance.suites.emulator import emulate

folder = Path(sys.argv[1])
cases = [case for case in launches.cases() if case.name in sys.argv[2:]]
with emulate("sm_90"):
    rows = record.record(cases, folder, "cpu", {}, launch=JITFunction.run, synchronise=lambda: None)
stored.write_manifest(folder)
print(*(row[3] for row in rows), sep="\\n")
"""


@pytest.mark.parametrize("name", stored.names())
def test_replay_agrees_with_the_hardware(name: str) -> None:
    """Every element that the launch wrote on the GPU comes out within the launch's bound, and nothing else is written.

    No finding may be reported for these kernels, but for the one fault that some of them are known to have.
    """
    launch = stored.read(name)
    result = replay.replay(launch)
    allowed = {Kind.UNEQUAL_LANES} if UNEQUAL_REPLICAS.fullmatch(launch.function) else set()
    assert not [str(finding) for finding in result.findings if finding.kind not in allowed]
    bound = replay.bounds()[name]
    assert bound.holds(result.agreement), f"{result.agreement}, bit_equal {result.agreement.bit_equal}, bound {bound}"


def test_corpus_is_the_recorded_one() -> None:
    """Every file has the sha256 that was written down when it was made, and none is missing or added."""
    assert {name: stored.digest(name) for name in stored.names()} == stored.manifest()


def test_corpus_is_wide_and_small() -> None:
    """At least 48 launches, each of which changed something on the GPU, in less than 4 MB."""
    launches = [stored.read(name) for name in stored.names()]
    assert len(launches) >= 48
    idle = [launch.case for launch in launches if all(torch.equal(s.before, s.after) for s in launch.storages)]
    assert not idle
    assert sum(path.stat().st_size for path in stored.DATA.iterdir()) < MOST_BYTES


def test_corpus_says_what_made_it() -> None:
    """Every launch names the card, the driver, the date and the versions, and is PTX for that card."""
    for name in stored.names():
        launch = stored.read(name)
        assert "H200" in launch.made_by["device"], name
        assert launch.made_by["triton"] == "3.6.0", name
        assert {"driver", "cuda", "torch", "python", "date"} <= launch.made_by.keys(), name
        assert ".target sm_90" in launch.ptx, name
        assert f".entry {launch.function}(" in launch.ptx, name


def test_every_launch_has_a_bound_and_fixed_bits_are_required() -> None:
    """``bounds.toml`` names exactly the stored launches, and asks equality where the bits are fixed."""
    bounds = replay.bounds()
    assert sorted(bounds) == stored.names()
    lax = [name for name in stored.names() if stored.read(name).exact and bounds[name] != replay.EXACT]
    assert not lax


def test_measured_bound_never_loosens_fixed_bits() -> None:
    """A wrong result of an exact kernel does not become its bound, and that of another kernel is rounded down."""
    bytes_before, bytes_after = torch.zeros(12, dtype=torch.uint8), torch.ones(12, dtype=torch.uint8)
    other = bytes_after.clone()
    other[0] = 3
    agreement = compare(bytes_before, bytes_after, other, torch.float32)
    assert replay.measured_bound(_launch(exact=True), agreement) == replay.EXACT
    assert not replay.EXACT.holds(agreement)
    loose = replay.measured_bound(_launch(exact=False), agreement)
    assert loose == replay.Bound(0.6666, 2.0)
    assert loose.holds(agreement)


def test_a_comparison_of_nothing_is_no_agreement() -> None:
    """A launch that writes nothing on either side meets no bound."""
    same = torch.zeros(8, dtype=torch.uint8)
    assert not replay.EXACT.holds(compare(same, same, same, torch.int32))


@pytest.mark.parametrize(
    ("dtype", "one", "two", "expected"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1),
        (torch.float32, 1.0, 1.0 - 2**-24, 1),
        (torch.float32, 0.0, -0.0, 0),
        (torch.float32, -(2.0**-149), 2.0**-149, 2),
        (torch.float32, math.nan, math.nan, 0),
        (torch.float32, math.nan, 1.0, math.inf),
        (torch.float32, math.inf, 3.4028234663852886e38, 1),
        (torch.bfloat16, 1.0, 1.0078125, 1),
        (torch.float16, 65504.0, math.inf, 1),
        (torch.float8_e4m3fn, 448.0, -448.0, 252),
        (torch.float8_e5m2, 1.0, 1.5, 2),
        (torch.float64, 1.0, 1.0 + 2**-52, 1),
        (torch.int8, -128, 127, 255),
        (torch.uint8, 0, 255, 255),
        (torch.int64, -(2**63), 2**63 - 1, 2.0**64),
    ],
)
def test_steps_count_the_values_in_between(dtype: torch.dtype, one: float, two: float, expected: float) -> None:
    """A step is the way to the next value of the dtype, through zero and to infinity."""
    assert steps(torch.tensor([one], dtype=dtype), torch.tensor([two], dtype=dtype)).tolist() == [expected]


def test_only_what_either_side_changed_is_compared() -> None:
    """Untouched memory cannot raise the share, and a stray write counts as a difference."""
    before = _bytes([1, 2, 3, 4])
    agreement = compare(before, _bytes([1, 9, 3, 4]), _bytes([1, 9, 7, 4]), torch.int32)
    assert (agreement.elements, agreement.equal, agreement.steps) == (2, 1, 4.0)


def test_signs_of_zero_and_payloads_of_nan_are_not_bit_equal() -> None:
    """Bits are bits: zeros of either sign and NaNs of another payload count as unequal, 0 steps apart."""
    expected = torch.tensor([0x0000_0000, 0x7FFF_FFFF], dtype=torch.int32).view(torch.uint8)
    actual = torch.tensor([-0x8000_0000, 0x7FC0_0000], dtype=torch.int32).view(torch.uint8)
    agreement = compare(_bytes([1, 1]), expected, actual, torch.float32)
    assert (agreement.elements, agreement.equal, agreement.steps) == (2, 0, 0.0)


def test_a_stored_launch_reads_back_as_written(tmp_path: Path) -> None:
    """Writing and reading a launch changes nothing, and a storage that no kernel changed is stored once."""
    launch = _launch(exact=True)
    path = stored.write("case.function", launch, tmp_path)
    again = stored.read("case.function", tmp_path)
    assert vars(again) | {"storages": ()} == vars(launch) | {"storages": ()}
    for one, two in zip(launch.storages, again.storages, strict=True):
        assert torch.equal(one.before, two.before)
        assert torch.equal(one.after, two.after)
        assert one.dtype == two.dtype
    assert again.storages[0].after is again.storages[0].before
    stored.write_manifest(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert stored.manifest(tmp_path) != {"case.function": stored.digest("case.function", tmp_path)}


def test_recorder_stores_what_a_replay_needs(tmp_path: Path) -> None:
    """With the emulator in the GPU's place, a replay gives the recorded bits: views, gaps, shared storages, grids."""
    cases = ["cache_copy_bf16", "rows_atomics", "dot_bf16_3_stages", "kernels_gapped"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    command = [sys.executable, "-c", RECORD_WITHOUT_A_GPU, str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.splitlines()
    assert len(outcomes) >= len(cases)
    assert all(re.fullmatch(r"ok, \d+ bytes changed", outcome) for outcome in outcomes), outcomes
    names = stored.names(tmp_path)
    assert {stored.read(name, tmp_path).case for name in names} == set(cases)
    for name in names:
        assert replay.EXACT.holds(replay.replay(stored.read(name, tmp_path)).agreement), name
    copied = stored.read("cache_copy_bf16.copy_strided", tmp_path)
    assert [vars(argument) for argument in copied.arguments[:3]] == [
        {"name": "x_ptr", "storage": 0, "offset": 2},
        {"name": "out_ptr", "storage": 1, "offset": 0},
        {"name": "n", "type": "i32", "value": 23},
    ]


@pytest.mark.parametrize(
    ("ptx", "scratch_bytes", "reason"),
    [("wgmma.mma_async.sync", 0, "wgmma"), ("tcgen05.mma", 0, "tcgen05"), ("ret;", 128, "global_scratch_size 128")],
)
def test_recorder_refuses_what_the_emulator_does_not_run(ptx: str, scratch_bytes: int, reason: str) -> None:
    """A launch that the corpus has no use for is named, not stored."""
    metadata = SimpleNamespace(global_scratch_size=scratch_bytes, profile_scratch_size=0, num_ctas=1)
    with pytest.raises(record.NotStored, match=reason):
        record.check_storable(SimpleNamespace(asm={"ptx": ptx}, metadata=metadata))


def test_recorder_fills_scratch_parameters_with_null() -> None:
    """Triton's two extra pointers become null; any other surplus is refused."""
    kernel = SimpleNamespace(asm={"ptx": ".entry f(\n.param .u64 a,\n.param .u64 b,\n.param .u64 c\n)\n{"})
    assert [scalar.value for scalar in record.scratch(kernel, 1)] == [0, 0]
    assert record.scratch(kernel, 3) == []
    with pytest.raises(record.NotStored, match="2 arguments for 3 parameters"):
        record.scratch(kernel, 2)


def test_reading_what_is_not_there_says_so(tmp_path: Path) -> None:
    """An unknown name gives a ValueError that names it."""
    with pytest.raises(ValueError, match=r"nothing\.safetensors"):
        stored.read("nothing", tmp_path)


def _bytes(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).view(torch.uint8)


def _launch(*, exact: bool) -> stored.StoredLaunch:
    constant, empty = _bytes([1, 2, 3]), torch.empty(0, dtype=torch.uint8)
    return stored.StoredLaunch(
        case="case",
        function="function",
        exact=exact,
        grid=(2, 1, 1),
        num_warps=4,
        shared_bytes=0,
        arguments=(stored.Pointer("x", 0, 4), stored.Scalar("n", "i32", 3), stored.Scalar("scale", "fp32", 0.1)),
        storages=(
            stored.Storage(constant, constant, torch.int32),
            stored.Storage(constant, _bytes([1, 2, 4]), torch.float32),
            stored.Storage(empty, empty, torch.bfloat16),
        ),
        ptx=".version 8.7",
        made_by={"device": "none"},
    )
