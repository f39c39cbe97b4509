"""Faults planted in compiled kernels: every deleted or weakened synchronisation is found, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mla_conformance.suites.emulator import Kind

from .builds import Build
from .traces import judged

UNORDERED = {Kind.READ_AFTER_WRITE, Kind.WRITE_AFTER_READ, Kind.WRITE_AFTER_WRITE}
UNFINISHED = {Kind.PENDING_READ, Kind.PENDING_WRITE, Kind.PENDING_AT_EXIT}
COPYING = ["vllm_bf16", "vllm_fp8", "split_bf16", "split_bf16_wide", "split_fp16"]
COPYING += ["matmul_2", "matmul_3", "matmul_4", "gguf_q4_k"]
"""The builds that Triton pipelines with cp.async."""
ONE_WARP = "transpose_1_warp"
BUILDS = ["vllm_one_head", "split_fp8", "merge", "softmax", ONE_WARP, *COPYING]


@dataclass(frozen=True)
class Edit:
    """A change of one PTX line: which lines, how, and what must be found; or else the result must be wrong."""

    pattern: str
    change: Callable[[str], str]
    kinds: set[Kind]
    or_wrong: bool = False


def _nothing(line: str) -> str:
    return ""


def _one_group_later(line: str) -> str:
    return re.sub(r"\d+", lambda number: str(int(number[0]) + 1), line)


EDITS = {
    "barrier deleted": Edit(r"\bbar\.sync\b", _nothing, UNORDERED),
    "warp barrier deleted": Edit(r"\bbar\.warp\.sync\b", _nothing, UNORDERED),
    "wait deleted": Edit(r"\bcp\.async\.wait_group\b", _nothing, UNFINISHED),
    "wait a group later": Edit(r"\bcp\.async\.wait_group\b", _one_group_later, UNFINISHED),
    "commit deleted": Edit(r"\bcp\.async\.commit_group\b", _nothing, UNFINISHED),
    "store deleted": Edit(r"\b(st\.shared|stmatrix)\b", _nothing, {Kind.UNINITIALISED_SHARED}, or_wrong=True),
}
STAGES_APART = "orders nothing: on either side of it are only copies, issued into the buffers of two stages"
ONE_WAIT = "splits nothing: its group and the next are waited for together, by a wait that leaves no fewer groups"
EXPLAINED = {
    ("matmul_3", "barrier deleted"): {0: STAGES_APART},
    ("matmul_4", "barrier deleted"): {0: STAGES_APART, 1: STAGES_APART},
    ("split_bf16", "barrier deleted"): {0: STAGES_APART},
    ("split_fp16", "barrier deleted"): {0: STAGES_APART},
    ("matmul_2", "commit deleted"): {0: ONE_WAIT, 2: ONE_WAIT},
    ("matmul_3", "commit deleted"): {0: ONE_WAIT},
    ("matmul_4", "commit deleted"): {0: ONE_WAIT},
    ("split_bf16", "commit deleted"): {0: ONE_WAIT},
    ("split_fp16", "commit deleted"): {0: ONE_WAIT},
    ("split_bf16_wide", "commit deleted"): {0: ONE_WAIT, 2: ONE_WAIT},
    ("vllm_fp8", "commit deleted"): {0: ONE_WAIT, 2: ONE_WAIT},
    ("gguf_q4_k", "commit deleted"): {0: ONE_WAIT, 2: ONE_WAIT},
}
"""Edits after which the kernel is still right, by the site's number among those of its kind.

A pair of commits closes the two copies of one stage. Without the first of them both copies are in one group. That
changes what a wait covers only if it leaves younger groups alone; the very first pair is the oldest, and waits count
from the youngest.
"""
CASES = [
    *((build, "barrier deleted") for build in BUILDS if build != ONE_WARP),
    *((build, "store deleted") for build in BUILDS),
    (ONE_WARP, "warp barrier deleted"),
    *((build, edit) for build in COPYING for edit in ("wait deleted", "wait a group later", "commit deleted")),
]
Builds = Callable[[str], Build]


@pytest.mark.parametrize("name", BUILDS)
def test_unedited_kernels_have_no_finding(name: str, build_of: Builds) -> None:
    """As compiled, no kernel is reported, and it runs a loop more than once or has none."""
    run = build_of(name).run()
    assert not run.findings, "\n".join(map(str, run.findings))


@pytest.mark.parametrize(("name", "edit"), sorted(CASES))
def test_every_edit_is_found(name: str, edit: str, build_of: Builds) -> None:
    """Every site edited on its own gives a finding of a fitting kind, or is listed with the reason why it is right."""
    build, planted = build_of(name), EDITS[edit]
    sites = build.sites(planted.pattern)
    assert sites
    expected = build.outcome()[1]
    missed = {}
    for index, site in enumerate(sites):
        run, results = build.outcome(build.edited(site, planted.change))
        unfitting = [str(finding) for finding in run.findings if finding.kind not in planted.kinds]
        assert not unfitting or planted.or_wrong or any(f.kind in planted.kinds for f in run.findings), unfitting
        if not run.findings and not (planted.or_wrong and results != expected):
            missed[index] = f"PTX line {site}: {build.line(site)}"
    assert missed.keys() == EXPLAINED.get((name, edit), {}).keys(), missed


@pytest.mark.parametrize(("name", "edit"), sorted(EXPLAINED))
def test_explained_edits_are_right_by_definition(name: str, edit: str, build_of: Builds) -> None:
    """Where an edit is listed as harmless, every access of the edited run is judged by the rules' bare definition."""
    build, planted = build_of(name), EDITS[edit]
    for index in EXPLAINED[name, edit]:
        ptx = build.edited(build.sites(planted.pattern)[index], planted.change)
        with judged() as found:
            _, results = build.outcome(ptx)
        assert found.accesses > 100
        assert not found.faults
        assert results == build.outcome()[1]


def test_definition_finds_what_is_not_explained(build_of: Builds) -> None:
    """The judgement above is no rubber stamp: it finds every other deleted barrier of those kernels."""
    build = build_of("matmul_3")
    for site in build.sites(EDITS["barrier deleted"].pattern)[1:]:
        with judged() as found:
            build.run(build.without(site))
        assert {kind for kind, _ in found.faults} & UNORDERED
