"""Planted misuse of memory, registers, warps and barriers: each is reported with its kind and says where it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.suites.emulator import EmulationStopped, Finding, Kind, Run, run_ptx

from .builds import Build

Builds = Callable[[str], Build]
Edit = Callable[[Build], Run]
CACHE, TABLE = 1, 4
"""Arguments of vLLM's grouped decode stage 1: the cache's keys, and the block table."""
HALF = "mov.u32 %l, %laneid; setp.lt.u32 %half, %l, 16;"


def _with(build: Build, index: int, value: Any) -> Run:
    return build.run(arguments=[*build.arguments[:index], value, *build.arguments[index + 1 :]])


def _page_out_of_range(build: Build) -> Run:
    table = build.arguments[TABLE].clone()
    table[0, 1] = 123_456
    return _with(build, TABLE, table)


def _short_table(build: Build) -> Run:
    return _with(build, TABLE, build.arguments[TABLE].flatten()[:3].clone())


def _edit(pattern: str, change: Callable[[str], str], index: int = 0) -> Edit:
    return lambda build: build.run(build.edited(build.sites(pattern)[index], change))


def _replace(pattern: str, replacement: str) -> Callable[[str], str]:
    def change(line: str) -> str:
        changed, count = re.subn(pattern, replacement, line)
        assert count
        return changed

    return change


def _in_scope(text: str) -> Callable[[str], str]:
    """Put a line, named LINE, among others with registers of their own."""
    registers = "{ .reg .pred %half; .reg .b32 %l; .reg .b64 %at;"
    return lambda line: f"{registers} {text.replace('LINE', line.strip())} }}"


FAULTS: dict[str, tuple[str, Kind, Edit]] = {
    "page id out of range": ("vllm_bf16", Kind.GLOBAL_BOUNDS, _page_out_of_range),
    "block table too short": ("vllm_bf16", Kind.GLOBAL_BOUNDS, _short_table),
    "null pointer": ("vllm_bf16", Kind.GLOBAL_BOUNDS, lambda build: _with(build, CACHE, 0)),
    "tensor too short": ("softmax", Kind.GLOBAL_BOUNDS, lambda build: _with(build, 1, torch.zeros(999))),
    "misaligned global vector": (
        "vllm_bf16",
        Kind.MISALIGNED,
        _edit(r"ld\.global.*v4", _replace(r"\+ 0 \];", "+ 4 ];")),
    ),
    "misaligned shared vector": ("merge", Kind.MISALIGNED, _edit(r"st\.shared.*v4", _replace(r"\+ 0 \]", "+ 8 ]"))),
    "misaligned copy": ("matmul_3", Kind.MISALIGNED, _edit(r"cp\.async\.ca", _replace(r"(%rd\d+) \+ 0", r"\1 + 2"))),
    "shared memory too small": (
        "vllm_bf16",
        Kind.SHARED_BOUNDS,
        lambda build: build.run(shared_bytes=build.shared_bytes - 16),
    ),
    "global store of all lanes to one address": (
        "softmax",
        Kind.UNEQUAL_LANES,
        _edit(
            r"st\.global",
            lambda line: _in_scope("ld.param.b64 %at, [softmax_rows_param_1]; LINE")(re.sub(r"%rd\d+", "%at", line)),
        ),
    ),
    "shared store of all lanes to one address": (
        "transpose_1_warp",
        Kind.UNEQUAL_LANES,
        _edit(r"st\.shared", _replace(r"\[ %r\d+ \+ 0 \]", "[ global_smem + 0 ]")),
    ),
    "two CTAs store to one address": ("softmax", Kind.TWO_CTAS, _edit(r"%ctaid\.x", _replace("%ctaid.x", "0"))),
    "half a warp skips a barrier": (
        "softmax",
        Kind.BARRIER,
        _edit(r"bar\.sync", _in_scope(f"{HALF} @%half bra past; LINE past:"), 1),
    ),
    "half a warp ends before a barrier": (
        "softmax",
        Kind.BARRIER,
        _edit(r"bar\.sync", _in_scope(f"{HALF} @%half exit; LINE")),
    ),
    "half a warp shuffles": ("softmax", Kind.DIVERGED, _edit(r"shfl\.sync", _in_scope(f"{HALF} @%half LINE"))),
    "half a warp at a warp barrier": (
        "transpose_1_warp",
        Kind.DIVERGED,
        _edit(r"bar\.warp\.sync", _in_scope(f"{HALF} @%half LINE")),
    ),
    "register never written": (
        "softmax",
        Kind.UNINITIALISED_REGISTER,
        _edit(r"mov\.u32\s+%r\d+, %tid\.x", lambda _: ""),
    ),
    "device assertion": ("softmax", Kind.TRAP, _edit(r"bar\.sync", _in_scope("LINE trap;"))),
}
WHERE = {
    Kind.GLOBAL_BOUNDS: r"accesses \d+ byte\(s\) at (byte -?\d+ of tensor \d+ \(.*\), which has \d+|address 0x\w+)",
    Kind.MISALIGNED: r"accesses \d+ byte(\(s\)|s) at (0x\w+|shared byte \d+)",
    Kind.SHARED_BOUNDS: r"at shared byte -?\d+; the CTA has \d+ bytes",
    Kind.UNEQUAL_LANES: r"byte \d+",
    Kind.TWO_CTAS: r"byte \d+ of tensor \d+",
    Kind.UNINITIALISED_REGISTER: r"%\w+ was never written",
    Kind.UNINITIALISED_SHARED: r"shared byte \d+; nothing wrote it",
    Kind.PENDING_READ: r"shared byte \d+; the copy: [\w.]+:\d+.*PTX line \d+ `cp\.async",
    Kind.PENDING_WRITE: r"shared byte \d+; the copy: [\w.]+:\d+.*PTX line \d+ `cp\.async",
    Kind.READ_AFTER_WRITE: r"shared byte \d+; CTA \d+ thread \d+ of (its own|another) warp: .*PTX line \d+ `",
    Kind.WRITE_AFTER_READ: r"shared byte \d+; CTA \d+ thread \d+ of (its own|another) warp: .*PTX line \d+ `",
    Kind.WRITE_AFTER_WRITE: r"shared byte \d+; CTA \d+ thread \d+ of (its own|another) warp: .*PTX line \d+ `",
}
"""What a message says besides the two lines and the thread: the address or the register, and the other access."""


@pytest.mark.parametrize("fault", FAULTS)
def test_misuse_is_reported(fault: str, build_of: Builds) -> None:
    """The planted fault is found as what it is; its message names source line, PTX line, CTA, thread and place."""
    name, kind, plant = FAULTS[fault]
    build = build_of(name)
    assert not build.run().findings
    found = [finding for finding in plant(build).findings if finding.kind == kind]
    assert found
    for finding in found:
        _check_message(finding)


def _check_message(finding: Finding) -> None:
    message = str(finding)
    assert re.search(r"\b\w+\.py:\d+", finding.source), message
    assert f"{finding.source}, PTX line {finding.line}: `{finding.text}`" in message
    assert re.search(r"\bCTA \d+ thread \d+\b", finding.detail), message
    assert re.search(WHERE.get(finding.kind, ""), finding.detail), message
    assert finding.count >= 1


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (r"bar\.sync", {Kind.READ_AFTER_WRITE, Kind.WRITE_AFTER_READ}),
        (r"cp\.async\.wait_group", {Kind.PENDING_READ, Kind.PENDING_WRITE, Kind.PENDING_AT_EXIT}),
        (r"st\.shared", {Kind.UNINITIALISED_SHARED}),
    ],
)
def test_messages_of_missing_synchronisation_name_both_sides(pattern: str, kinds: set[Kind], build_of: Builds) -> None:
    """A race names the access and the earlier one; an early read names the copy; all name thread and byte."""
    build, seen = build_of("split_bf16"), set()
    for site in build.sites(pattern):
        for finding in build.run(build.without(site)).findings:
            seen.add(finding.kind)
            _check_message(finding)
    assert kinds <= seen


def test_out_of_range_page_names_the_cache(build_of: Builds) -> None:
    """The address is given as a byte of the tensor that was meant, with that tensor's size."""
    build = build_of("vllm_bf16")
    found = _page_out_of_range(build).findings
    cache = build.arguments[CACHE]
    page_bytes = cache.stride(0) * cache.element_size()
    size = cache.untyped_storage().nbytes()
    offsets = [
        int(m[1]) for f in found for m in [re.search(rf"byte (\d+) of tensor 1 .* has {size} bytes", f.detail)] if m
    ]
    assert offsets
    assert all(offset // page_bytes == 123_456 for offset in offsets)


def test_two_ctas_are_told_from_two_lanes(build_of: Builds) -> None:
    """CTAs that store equal values to one address are reported as such, and no lanes are said to disagree."""
    kinds = {finding.kind for finding in FAULTS["two CTAs store to one address"][2](build_of("softmax")).findings}
    assert kinds == {Kind.TWO_CTAS}


@pytest.mark.parametrize("name", ["softmax", "matmul_2", "transpose_1_warp"])
def test_every_register_without_its_writer_is_reported(name: str, build_of: Builds) -> None:
    """Deleting the only instruction that writes a register gives a finding wherever its value is of use."""
    build = build_of(name)
    writers: dict[str, list[int]] = {}
    for number, line in enumerate(build.ptx.splitlines(), 1):
        if m := re.match(r"\s*(?:@!?%\w+ )?(?!st|cp|bar|bra|red)[a-z][\w.:]*\s+\{?\s*((?:%\w+[,|\s]*)+)", line):
            for register in re.findall(r"%\w+", m[1] if "{" in line.split("%")[0] else m[1].split(",")[0]):
                writers.setdefault(register, []).append(number)
    single = sorted({numbers[0] for numbers in writers.values() if len(numbers) == 1})
    assert len(single) > 40
    silent = {}
    for number in single:
        try:
            found = build.run(build.without(number), budget=1000).findings
        except EmulationStopped:
            # Without its counter a loop does not end, which is a report too.
            continue
        if not any(finding.kind == Kind.UNINITIALISED_REGISTER for finding in found):
            silent[number] = build.line(number)
    assert not silent


def test_endless_loop_is_given_up(build_of: Builds) -> None:
    """A loop whose branch no longer depends on its counter ends with the budget, in a message that says so."""
    build = build_of("matmul_2")
    endless = build.edited(build.sites(r"@%p\d+ bra")[-1], _replace(r"@%p\d+ ", ""))
    with pytest.raises(EmulationStopped, match=r"more than 5000 instructions.*loop"):
        build.run(endless, budget=5000)


def test_endless_loop_names_what_was_found_before(build_of: Builds) -> None:
    """A loop that ends by a register that nobody wrote is given up, and its branch is named as undefined."""
    build = build_of("matmul_2")
    predicate = build.line(build.sites(r"@%p\d+ bra")[-1]).split()[0].lstrip("@")
    decision = build.sites(rf"setp\.lt\.s32\s+{predicate},")[-1]
    replaced = _replace(r"(%p\d+), %r\d+", r"\1, %never")
    endless = build.edited(decision, lambda line: f"{{ .reg .b32 %never; {replaced(line)} }}")
    found = rf"Found before that: use of an uninitialised register.*{predicate} was never written, or computed from"
    with pytest.raises(EmulationStopped, match=found):
        build.run(endless, budget=5000)


def test_faults_do_not_leak_into_the_next_run(build_of: Builds) -> None:
    """After a launch with findings the same kernel on good arguments has none, and its results are as before."""
    build = build_of("vllm_bf16")
    before = build.outcome()[1]
    assert _short_table(build).findings
    run, after = build.outcome()
    assert not run.findings
    assert after == before


def test_arguments_are_what_the_tests_take_them_for(build_of: Builds) -> None:
    """The arguments edited above are the cache and the block table."""
    arguments = build_of("vllm_bf16").arguments
    assert isinstance(arguments[CACHE], Tensor)
    assert arguments[CACHE].dtype == torch.bfloat16
    assert arguments[TABLE].dtype == torch.int32
    assert arguments[TABLE].ndim == 2


PAIR = """
.version 9.1
.target sm_120a
.address_size 64
.visible .entry k(.param .u64 p0)
.reqntid 32
{
    .reg .b64 %at;
    .reg .b32 %never;
    .reg .b32 %one;
    .reg .b16 %pair;
    ld.param.b64 %at, [p0];
    mov.b32 %one, 0f3F800000;
    cvt.rn.satfinite.e4m3x2.f32 %pair, UPPER, LOWER;
    st.global.WIDTH [%at], %pair;
    ret;
}
"""


@pytest.mark.parametrize(
    ("upper", "lower", "width", "found"),
    [
        ("%never", "%one", "b8", []),
        ("%never", "%one", "b16", [Kind.UNINITIALISED_REGISTER]),
        ("%one", "%never", "b8", [Kind.UNINITIALISED_REGISTER]),
        ("%one", "%one", "b16", []),
    ],
)
def test_half_of_a_pair_may_be_undefined_where_only_the_other_is_stored(
    upper: str, lower: str, width: str, found: list[Kind]
) -> None:
    """Triton packs a single value with an undefined one and stores the lower byte."""
    ptx = PAIR.replace("UPPER", upper).replace("LOWER", lower).replace("WIDTH", width)
    memory = torch.zeros(2, dtype=torch.uint8)
    assert [finding.kind for finding in run_ptx(ptx, (1,), [memory]).findings] == found
