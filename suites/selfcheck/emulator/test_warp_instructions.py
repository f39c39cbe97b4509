"""Exchange inside a warp against PTX ISA 9.1, sections 9.7.9.6 and 9.7.13: shfl, vote, match, redux, elect, masks.

Every test runs several warps with different data, so that an exchange across a warp's border is seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from .exact import F32, decode, mask, signed
from .one_instruction import execute, floats, integers

FULL = 0xFFFFFFFF
LANES = range(32)
WARPS = 4
Warp = list[int]


def words(seed: str, choices: list[int] | None = None) -> Warp:
    """One 32-bit word a lane of every warp."""
    draw = random.Random(seed)
    return [draw.choice(choices) if choices else draw.getrandbits(32) for _ in range(32 * WARPS)]


def by_warp(values: Warp) -> list[Warp]:
    return [values[start : start + 32] for start in range(0, len(values), 32)]


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and whether it is in range: the pseudo code of section 9.7.9.6."""
    step, clamp, segment = b & 31, c & 31, c >> 8 & 31
    most = (lane & segment) | (clamp & ~segment & 31)
    least = lane & segment
    source = {"up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": least | (step & ~segment & 31)}[mode]
    inside = source >= most if mode == "up" else source <= most
    return (source if inside else lane), inside


# c: the clamp in bits 0 to 4 and the segment mask in bits 8 to 12; widths of 32, 16, 8, 4, 2, 1 and odd clamps.
CONTROLS = {
    "up": [0, 0x1000, 0x1800, 0x1C00, 0x1E00, 0x1F00, 3, 0x1805],
    "down": [31, 0x101F, 0x181F, 0x1C1F, 0x1E1F, 0x1F1F, 17, 0x1813],
}
CONTROLS["bfly"] = CONTROLS["idx"] = CONTROLS["down"]
SHUFFLES = {f"shfl.sync.{mode}.b32": mode for mode in CONTROLS}
FORMS: dict[str, object] = dict(SHUFFLES)


@pytest.mark.parametrize("opcode", SHUFFLES)
def test_shuffle_reads_the_lane_of_the_manual(opcode: str) -> None:
    """Every step and clamp, given as immediates and as registers, reads the right lane of the lane's own warp."""
    mode = SHUFFLES[opcode]
    values = words(opcode)
    for control in CONTROLS[mode]:
        steps = (0, 1, 2, 5, 16, 31, 35)
        lines = [f"{opcode} %d{i}|%p{i}, %a, {step}, {control}, -1;" for i, step in enumerate(steps)]
        outputs = {f"d{i}": "b32" for i in range(len(steps))} | {f"p{i}": "pred" for i in range(len(steps))}
        got = execute(lines, {"a": ("b32", values)}, outputs)
        for thread, result in enumerate(got):
            lane, own = thread % 32, by_warp(values)[thread // 32]
            for i, step in enumerate(steps):
                source, inside = shuffled(mode, lane, step, control)
                assert (result[i], result[len(steps) + i]) == (own[source], inside), (opcode, lane, step, control)


@pytest.mark.parametrize("opcode", SHUFFLES)
def test_shuffle_takes_its_step_from_each_lane(opcode: str) -> None:
    """A step that differs by lane, and no destination predicate."""
    mode = SHUFFLES[opcode]
    values, steps = words(opcode), words("steps")
    control = CONTROLS[mode][1]
    got = execute(
        f"{opcode} %d, %a, %b, %c, %m;",
        {
            "a": ("b32", values),
            "b": ("b32", steps),
            "c": ("b32", [control] * len(values)),
            "m": ("b32", [FULL] * len(values)),
        },
        {"d": "b32"},
    )
    for thread, (d,) in enumerate(got):
        source, _ = shuffled(mode, thread % 32, steps[thread], control)
        assert d == by_warp(values)[thread // 32][source]


DIVERGED = [
    "and.b32 %t, %lane, 3;",
    "setp.eq.b32 %q, %t, 1;",
    "{start}",
    "@!%q bra SKIP;",
    "{body}",
    "SKIP:",
]
QUARTER = 0x22222222


def diverged(body: str, inputs: dict[str, tuple[str, Warp]], outputs: dict[str, str]) -> list[tuple[int, ...]]:
    """Run the body in the lanes 1, 5, 9 and so on of each warp only; the others give 77."""
    start = " ".join(f"mov.b32 %{name}, 77;" for name in outputs)
    lines = ["mov.u32 %lane, %laneid;", *(line.format(body=body, start=start) for line in DIVERGED)]
    return execute(lines, inputs, outputs, registers=".reg .b32 %lane, %t, %u; .reg .pred %q, %v;")


@pytest.mark.parametrize("opcode", SHUFFLES)
def test_shuffle_in_a_diverged_warp_exchanges_among_the_mask(opcode: str) -> None:
    """Four lanes apart, the lanes of the branch read each other and the others keep their destination."""
    values = words(opcode)
    mode = SHUFFLES[opcode]
    control = 0 if mode == "up" else 31
    step = 5 if mode == "idx" else 4
    got = diverged(f"{opcode} %d, %a, {step}, {control}, {QUARTER};", {"a": ("b32", values)}, {"d": "b32"})
    for thread, (d,) in enumerate(got):
        lane = thread % 32
        source, _ = shuffled(mode, lane, step, control)
        assert d == (by_warp(values)[thread // 32][source] if lane % 4 == 1 else 77)


VOTES: dict[str, Callable[[list[bool]], bool]] = {
    "all": all,
    "any": any,
    "uni": lambda flags: all(flags) or not any(flags),
}
FORMS |= {f"vote.sync.{name}.pred": name for name in VOTES} | {"vote.sync.ballot.b32": "ballot"}


def flags_of(kind: str) -> Warp:
    """Predicates of four warps: mixed, all true, all false, one true."""
    draw = random.Random(kind)
    return [draw.randrange(2) for _ in LANES] + [1] * 32 + [0] * 32 + [int(lane == 9) for lane in LANES]


@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("source", ["%p", "!%p"])
def test_vote_reduces_the_predicates_of_the_warp(name: str, source: str) -> None:
    """All, any and uniform over each warp, with a negated source too."""
    flags = flags_of(name)
    got = execute(f"vote.sync.{name}.pred %d, {source}, -1;", {"p": ("pred", flags)}, {"d": "pred"})
    for thread, (d,) in enumerate(got):
        own = [bool(f) != source.startswith("!") for f in by_warp(flags)[thread // 32]]
        assert d == VOTES[name](own)


@pytest.mark.parametrize("source", ["%p", "!%p"])
def test_ballot_collects_the_predicates(source: str) -> None:
    """Bit i is the predicate of lane i."""
    flags = flags_of("ballot")
    got = execute(f"vote.sync.ballot.b32 %d, {source}, -1;", {"p": ("pred", flags)}, {"d": "b32"})
    for thread, (d,) in enumerate(got):
        own = [bool(f) != source.startswith("!") for f in by_warp(flags)[thread // 32]]
        assert d == sum(flag << lane for lane, flag in enumerate(own))


def test_votes_in_a_diverged_warp_count_only_the_mask() -> None:
    """Lanes outside the branch do not take part."""
    flags = [int(thread % 8 == 1) for thread in range(32 * WARPS)]
    got = diverged(f"vote.sync.ballot.b32 %d, %p, {QUARTER};", {"p": ("pred", flags)}, {"d": "b32"})
    assert [d for (d,) in got] == [0x02020202 if thread % 4 == 1 else 77 for thread in range(32 * WARPS)]
    body = f"vote.sync.all.pred %v, %p, {QUARTER}; selp.b32 %d, 1, 2, %v;"
    everyone = [int(thread % 4 == 1) for thread in range(32 * WARPS)]
    got = diverged(body, {"p": ("pred", everyone)}, {"d": "b32"})
    assert [d for (d,) in got] == [1 if thread % 4 == 1 else 77 for thread in range(32 * WARPS)]


def reduced(operation: Callable[..., int], kind: str) -> Callable[[Warp], int]:
    def rule(values: Warp) -> int:
        result = signed(values[0], 32) if kind == "s" else values[0]
        for value in values[1:]:
            result = operation(result, signed(value, 32) if kind == "s" else value)
        return result & mask(32)

    return rule


REDUCTIONS: dict[str, Callable[[Warp], int]] = {
    f"redux.sync.{name}.{kind}32": reduced(operation, kind)
    for kind in "su"
    for name, operation in (("add", lambda x, y: x + y), ("min", min), ("max", max))
} | {
    "redux.sync.and.b32": reduced(lambda x, y: x & y, "u"),
    "redux.sync.or.b32": reduced(lambda x, y: x | y, "u"),
    "redux.sync.xor.b32": reduced(lambda x, y: x ^ y, "u"),
}


def reduced_floats(largest: bool, absolute: bool, nan: bool) -> Callable[[Warp], int]:
    """Section 9.7.13.12: +0 is above -0; NaNs are left out, or win with .NaN."""

    def rule(values: Warp) -> int:
        values = [v & ~F32.sign_bit for v in values] if absolute else values
        numbers = [v for v in values if not decode(F32, v).is_nan]
        if not numbers or (nan and len(numbers) < len(values)):
            return 0x7FFFFFFF
        return (max if largest else min)(numbers, key=lambda v: -(v & ~F32.sign_bit) - 1 if v >> 31 else v)

    return rule


FLOAT_REDUCTIONS = {
    f"redux.sync.{name}{absolute}{nan}.f32": reduced_floats(name == "max", bool(absolute), bool(nan))
    for name in ("min", "max")
    for absolute in ("", ".abs")
    for nan in ("", ".NaN")
}
FORMS |= REDUCTIONS | FLOAT_REDUCTIONS


@pytest.mark.parametrize("opcode", REDUCTIONS)
def test_redux_reduces_each_warp(opcode: str) -> None:
    """All lanes get the reduction of their warp; in a diverged warp that of the branch's lanes."""
    draw = random.Random(opcode)
    values = [draw.choice(integers(32))[0] for _ in range(32 * WARPS)]
    values[32:64] = words(opcode)[:32]
    got = execute(f"{opcode} %d, %a, -1;", {"a": ("b32", values)}, {"d": "b32"})
    assert [d for (d,) in got] == [REDUCTIONS[opcode](warp) for warp in by_warp(values) for _ in LANES]
    got = diverged(f"{opcode} %d, %a, {QUARTER};", {"a": ("b32", values)}, {"d": "b32"})
    for thread, (d,) in enumerate(got):
        own = [v for lane, v in enumerate(by_warp(values)[thread // 32]) if lane % 4 == 1]
        assert d == (REDUCTIONS[opcode](own) if thread % 4 == 1 else 77)


@pytest.mark.parametrize("opcode", FLOAT_REDUCTIONS)
def test_redux_of_floats_orders_zeros_and_handles_nan(opcode: str) -> None:
    """Warps with numbers only, with some NaNs, with NaNs only, and with zeros of both signs."""
    draw = random.Random(opcode)
    numbers = [bits for (bits,) in floats(F32) if not decode(F32, bits).is_nan]
    some = [draw.choice([*numbers, 0x7FC00000, 0xFFFFFFFF]) for _ in LANES]
    some[3] = 0x7F800001
    values = [draw.choice(numbers) for _ in LANES] + some + [0x7FC00000 + lane for lane in LANES]
    values += [draw.choice([0, F32.sign_bit]) for _ in LANES]
    got = execute(f"{opcode} %d, %a, -1;", {"a": ("b32", values)}, {"d": "b32"})
    assert [d for (d,) in got] == [FLOAT_REDUCTIONS[opcode](warp) for warp in by_warp(values) for _ in LANES]


MATCHES = {f"match.{which}.sync.b{width}": (which, width) for which in ("any", "all") for width in (32, 64)}
FORMS |= MATCHES


@pytest.mark.parametrize("opcode", MATCHES)
def test_match_finds_the_lanes_of_equal_value(opcode: str) -> None:
    """'any' gives the lanes that hold the own value, 'all' the full mask and true where all are equal."""
    which, width = MATCHES[opcode]
    draw = random.Random(opcode)
    values = [draw.choice([3, 5, 9 << (width - 8)]) for _ in range(64)] + [7] * 32 + [7] * 31 + [8]
    destination = "%d|%p" if which == "all" else "%d"
    lines = ["setp.ne.b32 %p, 0, 0;", f"{opcode} {destination}, %a, -1;"]
    got = execute(lines, {"a": (f"b{width}", values)}, {"d": "b32", "p": "pred"})
    for thread, (d, p) in enumerate(got):
        own = by_warp(values)[thread // 32]
        equal = sum((value == own[thread % 32]) << lane for lane, value in enumerate(own))
        if which == "any":
            assert d == equal
        else:
            assert (d, p) == ((FULL, 1) if equal == FULL else (0, 0))


FORMS |= dict.fromkeys(["activemask.b32", "elect.sync", "bar.warp.sync", "bar.sync", "bra", "bra.uni", "ret"])


def test_active_mask_is_the_lanes_that_execute() -> None:
    """Full in a converged warp, the branch's lanes in a diverged one."""
    anything = {"a": ("b32", words("a"))}
    assert set(execute("activemask.b32 %d;", anything, {"d": "b32"})) == {(FULL,)}
    got = diverged("activemask.b32 %d;", anything, {"d": "b32"})
    assert [d for (d,) in got] == [QUARTER if thread % 4 == 1 else 77 for thread in range(32 * WARPS)]


def test_elect_chooses_one_lane_of_the_mask() -> None:
    """Exactly one lane of each warp gets true, all learn which, and it is in the mask."""
    anything = {"a": ("b32", words("a"))}
    for mask_text, lanes in (("-1", FULL), (str(QUARTER), QUARTER)):
        body = f"elect.sync %d|%v, {mask_text}; selp.b32 %e, 1, 0, %v;"
        if lanes == FULL:
            got = execute(body, anything, {"d": "b32", "e": "b32"}, registers=".reg .pred %v;")
        else:
            got = diverged(body, anything, {"d": "b32", "e": "b32"})
        for start in range(0, len(got), 32):
            inside = [(lane, *got[start + lane]) for lane in LANES if lanes >> lane & 1]
            leaders = {lane for lane, _, leads in inside if leads == 1}
            assert len(leaders) == 1
            assert {leader for _, leader, _ in inside} == leaders


SPECIAL_REGISTERS: dict[str, Callable[[int], int]] = {
    "%laneid": lambda lane: lane,
    "%lanemask_eq": lambda lane: 1 << lane,
    "%lanemask_lt": lambda lane: (1 << lane) - 1,
    "%lanemask_le": lambda lane: (2 << lane) - 1,
    "%lanemask_gt": lambda lane: FULL ^ ((2 << lane) - 1),
    "%lanemask_ge": lambda lane: FULL ^ ((1 << lane) - 1),
}
FORMS |= {f"mov.u32 {name}": name for name in SPECIAL_REGISTERS}


@pytest.mark.parametrize("name", SPECIAL_REGISTERS)
def test_lane_register_depends_on_the_lane_alone(name: str) -> None:
    """Lane number and the five lane masks (section 10)."""
    got = execute(f"mov.u32 %d, {name};", {"a": ("b32", words("a"))}, {"d": "b32"})
    assert [d for (d,) in got] == [SPECIAL_REGISTERS[name](thread % 32) for thread in range(32 * WARPS)]


def test_thread_and_block_registers_count_in_one_dimension() -> None:
    """%tid, %ntid, %ctaid and %nctaid of a one-dimensional launch; the other dimensions are 0 and 1."""
    names = {
        "tid.x": None,
        "ctaid.x": None,
        "ntid.x": 128,
        "nctaid.x": 3,
        "tid.y": 0,
        "ctaid.z": 0,
        "ntid.y": 1,
        "nctaid.z": 1,
    }
    outputs = {f"d{i}": "b32" for i in range(len(names))}
    lines = [f"mov.u32 %d{i}, %{name};" for i, name in enumerate(names)]
    got = execute(lines, {"a": ("b32", [0] * 384)}, outputs)
    for index, result in enumerate(got):
        assert result[:2] == (index % 128, index // 128)
        assert list(result[2:]) == list(names.values())[2:]


def test_loop_with_a_different_count_in_each_lane_converges() -> None:
    """A data-dependent loop runs each lane's own number of times, and the warp meets again after it."""
    counts = [(thread * 7) % 11 for thread in range(32 * WARPS)]
    lines = [
        "mov.b32 %d, 0;",
        "mov.b32 %n, %a;",
        "LOOP:",
        "setp.eq.b32 %q, %n, 0;",
        "@%q bra DONE;",
        "add.s32 %d, %d, %n;",
        "sub.s32 %n, %n, 1;",
        "bra.uni LOOP;",
        "DONE:",
        "bar.warp.sync -1;",
        "bar.sync 0;",
        "shfl.sync.bfly.b32 %e, %d, 1, 31, -1;",
    ]
    got = execute(lines, {"a": ("b32", counts)}, {"d": "b32", "e": "b32"}, registers=".reg .b32 %n; .reg .pred %q;")
    sums = [count * (count + 1) // 2 for count in counts]
    assert got == [(sums[thread], sums[thread ^ 1]) for thread in range(32 * WARPS)]


def test_wrong_source_lane_fails() -> None:
    """The exchange tests can fail: reading one lane further gives different data in every warp."""
    values = words("wrong")
    got = execute("shfl.sync.down.b32 %d, %a, 1, 31, -1;", {"a": ("b32", values)}, {"d": "b32"})
    assert [d for (d,) in got] != [
        by_warp(values)[t // 32][shuffled("down", t % 32, 2, 31)[0]] for t in range(32 * WARPS)
    ]
