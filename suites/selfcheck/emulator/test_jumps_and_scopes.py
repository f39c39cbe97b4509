"""Jump tables, labels of scopes, and the parameters of calls, as Triton's warp-specialised and asserting code has them.

Rules: PTX ISA 9.1, sections 9.7.12 (brx.idx, call) and 4.1 (a label belongs to the scope that it stands in).
"""

from __future__ import annotations

import pytest
import torch

from mla_conformance.suites.emulator import EmulationStopped, Kind, UnsupportedInstruction, run_ptx

from .one_instruction import execute

TABLE = """
    $table: .branchtargets $one, $two, $three;
    brx.idx %a, $table;
    $one:
    mov.b32 %d, 11;
    bra.uni $end;
    $two:
    mov.b32 %d, 22;
    bra.uni $end;
    $three:
    mov.b32 %d, 33;
    $end:
"""


def test_each_lane_jumps_to_its_own_entry_of_the_table() -> None:
    """Lanes of one warp go three ways and come together again."""
    choices = [(7 * lane) % 3 for lane in range(128)]
    got = execute(TABLE, {"a": ("b32", choices)}, {"d": "b32"})
    assert [row[0] for row in got] == [(11, 22, 33)[choice] for choice in choices]


def test_an_index_outside_the_table_stops_the_run() -> None:
    """The manual leaves it undefined, so there is nothing to go on with."""
    with pytest.raises(EmulationStopped, match="entry 3 of 3"):
        execute(TABLE, {"a": ("b32", [0, 3] * 64)}, {"d": "b32"})


def test_a_branch_in_a_scope_means_the_label_of_that_scope() -> None:
    """Inline assembly repeats its labels: forward and backward branches, twice, and one to the outside."""
    scope = """
    {{
        .reg .pred done;
        again:
        setp.ge.s32 done, %d, {};
        @done bra.uni out;
        add.s32 %d, %d, 1;
        bra.uni again;
        out:
    }}
    """
    leave = "{ .reg .pred big; setp.gt.s32 big, %d, 6; @big bra $end; add.s32 %d, %d, 100; }\n$end:"
    lines = "mov.b32 %d, %a;" + scope.format(3) + scope.format("%b") + leave
    starts, ends = [lane % 5 for lane in range(128)], [lane % 11 for lane in range(128)]
    got = execute(lines, {"a": ("b32", starts), "b": ("b32", ends)}, {"d": "b32"})
    expected = [max(a, 3, b) for a, b in zip(starts, ends, strict=True)]
    assert [row[0] for row in got] == [x if x > 6 else x + 100 for x in expected]


CALL = """
.version 9.1
.target sm_120a
.address_size 64
.extern .func __assertfail
(
    .param .b64 a0, .param .b64 a1, .param .b32 a2, .param .b64 a3, .param .b64 a4
)
.noreturn;
.global .align 1 .b8 message[4] = {98, 97, 100, 0};
.global .align 1 .b8 file[8] = {47, 97, 47, 107, 46, 112, 121, 0};
.visible .entry k(.param .u64 p0)
.reqntid 32
{
    .reg .b64 %rd<4>;
    mov.b64 %rd0, message;
    mov.b64 %rd1, file;
    {
        .param .b64 param0;
        .param .b64 param1;
        .param .b32 param2;
        .param .b64 param3;
        .param .b64 param4;
        st.param.b64 [param0], %rd0;
        st.param.b64 [param1], %rd1;
        st.param.b32 [param2], 321;
        st.param.b64 [param3], %rd0;
        st.param.b64 [param4], 1;
        call.uni FUNCTION, (param0, param1, param2, param3, param4);
    }
    ret;
}
"""


def test_a_failed_assertion_is_reported_with_message_file_and_line() -> None:
    """The parameters of the call reach it, and the strings are read from constant memory."""
    run = run_ptx(CALL.replace("FUNCTION", "__assertfail"), (1,), [torch.zeros(1)])
    assert [finding.kind for finding in run.findings] == [Kind.TRAP]
    assert "'bad' (k.py:321, bad)" in run.findings[0].detail
    assert run.findings[0].count == 32


def test_other_functions_are_refused() -> None:
    """A call of a function that the emulator does not know names it; so does a function of the module itself."""
    with pytest.raises(UnsupportedInstruction, match="malloc"):
        run_ptx(CALL.replace("FUNCTION", "malloc"), (1,), [torch.zeros(1)])
    with pytest.raises(UnsupportedInstruction, match="functions besides the entry"):
        run_ptx(CALL.replace(".visible .entry", ".func helper()\n{ ret; }\n.visible .entry"), (1,), [torch.zeros(1)])
