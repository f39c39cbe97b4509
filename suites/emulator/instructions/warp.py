"""Warp-wide instructions: shuffles, votes, reductions, election (PTX ISA, 9.7.9.6 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import floats, integers
from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask


def _members(builder: Builder, text: str) -> Callable[[], Array | None]:
    """The lanes of a membermask, when the instruction runs; None for all of every warp."""
    value = builder.source(text, "u32")
    lane = builder.machine.lane_in_warp.astype("u4")
    if value.ndim == 0 and int(value) == 0xFFFFFFFF:
        return lambda: None

    def members() -> Array | None:
        found = ((value >> lane) & 1).astype(bool)
        return None if found.all() else found

    return members


@instruction("shfl")
def shuffle(builder: Builder, ins: Instruction) -> Step:
    """``shfl.sync.mode.b32 d{|p}, a, b, c, membermask``."""
    if ins.parts[1] != "sync" or ins.parts[2] not in ("idx", "bfly", "up", "down"):
        raise builder.unsupported()
    targets = ins.operands[0].split("|")
    target = builder.destination(targets[0], "b32")
    inside = builder.destination(targets[1], "pred") if len(targets) > 1 else None
    value = builder.lanes(ins.operands[1], "b32")
    amount, clamp = (builder.source(text, "u32") for text in ins.operands[2:4])
    members = _members(builder, ins.operands[4])
    machine = builder.machine
    lane, mode = machine.lane_in_warp, ins.parts[2]
    first = np.arange(machine.lanes) - lane
    constant = amount.ndim == 0 and clamp.ndim == 0
    fixed = shuffled_lanes(mode, lane, amount, clamp) if constant else None

    def step(mask: Mask) -> None:
        source, valid = fixed if fixed is not None else shuffled_lanes(mode, lane, amount, clamp)
        source = first + source
        if mask is not True:
            machine.whole_warps(ins, mask, members())
            lost = mask & valid & ~mask[source]
            if lost.any():
                detail = f"{machine.thread(int(np.flatnonzero(lost)[0]))} reads from a lane that does not execute it"
                machine.findings.add(Kind.DIVERGED, ins, int(lost.sum()), detail)
        taken = value.take(source)
        np.copyto(target, taken, where=mask)
        if inside is not None:
            np.copyto(inside, valid, where=mask)

    return step


def shuffled_lanes(mode: str, lane: Array, amount: Array, clamp: Array) -> tuple[Array, Array]:
    """The source lane within the warp, and whether it is in range; else a lane reads itself."""
    b = amount.astype("i8") & 31
    bound, segment = clamp.astype("i8") & 31, (clamp.astype("i8") >> 8) & 31
    low, high = lane & segment, (lane & segment) | (bound & ~segment)
    if mode == "up":
        source = lane - b
        valid = source >= high
    elif mode == "down":
        source = lane + b
        valid = source <= high
    elif mode == "bfly":
        source = lane ^ b
        valid = source <= high
    else:
        source = low | (b & ~segment)
        valid = source <= high
    return np.where(valid, source, lane), np.broadcast_to(valid, lane.shape)


@instruction("vote")
def vote(builder: Builder, ins: Instruction) -> Step:
    """``vote.sync.all|any|uni.pred`` and ``.ballot.b32``; lanes that do not execute it do not count."""
    if ins.parts[1] != "sync":
        raise builder.unsupported()
    mode = ins.parts[2]
    target = builder.destination(ins.operands[0], ins.parts[3])
    text = ins.operands[1]
    predicate, negated = builder.lanes(text.lstrip("!"), "pred"), text.startswith("!")
    members = _members(builder, ins.operands[2])
    machine = builder.machine

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(ins, mask, members())
        taking = np.ones(machine.lanes, bool) if mask is True else mask
        yes = ((~predicate if negated else predicate) & taking).reshape(-1, WARP)
        no = ((predicate if negated else ~predicate) & taking).reshape(-1, WARP)
        if mode == "ballot":
            found: Any = (yes.astype("u4") << np.arange(WARP, dtype="u4")).sum(1, dtype="u4")
        elif mode == "any":
            found = yes.any(1)
        elif mode == "all":
            found = ~no.any(1)
        else:
            found = ~(yes.any(1) & no.any(1))
        np.copyto(target, np.repeat(found, WARP), where=mask)

    if mode not in ("ballot", "any", "all", "uni"):
        raise builder.unsupported()
    return step


@instruction("redux")
def reduce(builder: Builder, ins: Instruction) -> Step:
    """``redux.sync.op``: integers; min and max of f32 (sm_100) too, with ``.abs`` and ``.NaN``."""
    if ins.parts[-1] == "f32":
        return _reduce_f32(builder, ins)
    function = integers.REDUCTIONS.get(ins.parts[2])
    type_ = ins.parts[-1]
    if function is None or type_ not in ("s32", "u32", "b32"):
        raise builder.unsupported()
    target, value = builder.destination(ins.operands[0], type_), builder.lanes(ins.operands[1], type_)
    members = _members(builder, ins.operands[2])
    machine = builder.machine
    extreme = np.iinfo(value.dtype)
    neutral = {"min": extreme.max, "max": extreme.min, "and": ~value.dtype.type(0)}.get(ins.parts[2], 0)

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(ins, mask, members())
        taking = np.asarray(mask)
        found = function.reduce(np.where(taking, value, neutral).reshape(-1, WARP), axis=1, dtype=value.dtype)
        np.copyto(target, np.repeat(found, WARP), where=mask)

    return step


def _reduce_f32(builder: Builder, ins: Instruction) -> Step:
    """``redux.sync.min|max{.abs}{.NaN}.f32``; without ``.NaN`` a NaN counts only where all are."""
    function = {"min": floats.minimum, "max": floats.maximum}.get(ins.parts[2])
    if function is None or any(part not in ("abs", "NaN") for part in ins.parts[3:-1]):
        raise builder.unsupported()
    target, value = builder.destination(ins.operands[0], "f32"), builder.lanes(ins.operands[1], "f32")
    members, machine = _members(builder, ins.operands[2]), builder.machine
    absolute, nan = "abs" in ins.parts, "NaN" in ins.parts
    neutral = np.float32(np.inf if ins.parts[2] == "min" else -np.inf)

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(ins, mask, members())
        taking = np.asarray(mask)
        found = np.where(taking, np.abs(value) if absolute else value, neutral).reshape(-1, WARP)
        while found.shape[1] > 1:
            found = function(found[:, ::2], found[:, 1::2], "f32", nan=nan)
        np.copyto(target, np.repeat(found, WARP), where=mask)

    return step


@instruction("match")
def match(builder: Builder, ins: Instruction) -> Step:
    """``match.any.sync``: which lanes hold the same value; ``match.all.sync d|p``: all lanes, or 0 if they differ."""
    if ins.parts[1] not in ("any", "all") or ins.parts[2] != "sync":
        raise builder.unsupported()
    names = ins.operands[0].split("|")
    target, value = builder.destination(names[0], "b32"), builder.lanes(ins.operands[1], ins.parts[-1])
    same = builder.destination(names[1], "pred") if len(names) > 1 else np.zeros(builder.machine.lanes, bool)
    every = ins.parts[1] == "all"

    def step(mask: Mask) -> None:
        lanes = value.reshape(-1, WARP)
        taking = np.ones(lanes.shape, bool) if mask is True else mask.reshape(-1, WARP)
        equal = (lanes[:, :, None] == lanes[:, None, :]) & taking[:, None, :]
        agree = (equal.sum(2) == taking.sum(1, keepdims=True)).ravel()
        found = (equal.astype("u4") << np.arange(WARP, dtype="u4")).sum(2, dtype="u4").ravel()
        np.copyto(target, np.where(agree, found, 0) if every else found, where=mask)
        np.copyto(same, agree, where=mask)

    return step


@instruction("activemask")
def active_mask(builder: Builder, ins: Instruction) -> Step:
    """The lanes of the warp that execute it together."""
    target = builder.destination(ins.operands[0], "b32")
    machine = builder.machine

    def step(mask: Mask) -> None:
        taking = np.ones(machine.lanes, bool) if mask is True else mask
        found = (taking.reshape(-1, WARP).astype("u4") << np.arange(WARP, dtype="u4")).sum(1, dtype="u4")
        np.copyto(target, np.repeat(found, WARP), where=mask)

    return step


@instruction("elect")
def elect(builder: Builder, ins: Instruction) -> Step:
    """``elect.sync d|p, membermask``: the lowest executing lane of each warp."""
    number, chosen = ins.operands[0].split("|")
    leader_out, elected = builder.destination(number, "b32"), builder.destination(chosen, "pred")
    machine = builder.machine

    def step(mask: Mask) -> None:
        taking = np.ones(machine.lanes, bool) if mask is True else mask
        leader = np.repeat(taking.reshape(-1, WARP).argmax(1), WARP)
        np.copyto(leader_out, leader.astype("u4"), where=mask)
        np.copyto(elected, machine.lane_in_warp == leader, where=mask)

    return step
