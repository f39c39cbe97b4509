"""Operators that lose their result, or harm something on the way, each in one way; and two that are right.

All compute ``2 * q``, with the row's own sum added, in plain PyTorch. Importing this module registers them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mla_conformance.suites.harness.op_call import OpCall

_seen: dict[str, Tensor] = {}
"""What the operators that keep something keep."""


def answer(q: Tensor) -> Tensor:
    """What each of them means to write: [rows, width], in q's dtype."""
    return 2 * q + q.sum(-1, keepdim=True)


@torch.library.custom_op("mla_conformance_phantom::right", mutates_args=("out",))
def right(q: Tensor, out: Tensor) -> None:
    """Write the caller's buffer, as declared."""
    out.copy_(answer(q))


@torch.library.custom_op("mla_conformance_phantom::right_result", mutates_args=())
def right_result(q: Tensor) -> Tensor:
    """Return memory of its own, as promised."""
    return answer(q)


@torch.library.custom_op("mla_conformance_phantom::undeclared", mutates_args=())
def undeclared(q: Tensor, out: Tensor) -> None:
    """Write the caller's buffer, and tell nobody: right in eager."""
    out.copy_(answer(q))


@torch.library.custom_op("mla_conformance_phantom::rebinds", mutates_args=("out",))
def rebinds(q: Tensor, out: Tensor) -> None:
    """Write a copy of the caller's buffer."""
    out = out.clone()
    out.copy_(answer(q))


@torch.library.custom_op("mla_conformance_phantom::returns", mutates_args=("out",))
def returns(q: Tensor, out: Tensor) -> Tensor:
    """Return the result instead of writing it."""
    return answer(q)


@torch.library.custom_op("mla_conformance_phantom::flattens", mutates_args=("out",))
def flattens(q: Tensor, out: Tensor) -> None:
    """Write ``out.reshape(-1)``: a view of a contiguous buffer, a copy of one with gaps."""
    out.reshape(-1).copy_(answer(q).reshape(-1))


@torch.library.custom_op("mla_conformance_phantom::writes_the_last_buffer_too", mutates_args=("out",))
def writes_the_last_buffer_too(q: Tensor, out: Tensor) -> None:
    """Write the caller's buffer and that of the call before."""
    out.copy_(answer(q))
    last = _seen.get("out")
    if last is not None and last.shape == out.shape:
        last.copy_(out)
    _seen["out"] = out


@torch.library.custom_op("mla_conformance_phantom::returns_its_workspace", mutates_args=("out",))
def returns_its_workspace(q: Tensor, out: Tensor) -> Tensor:
    """Return row sums in memory that the next call uses again."""
    out.copy_(answer(q))
    workspace = _seen.setdefault("workspace", torch.empty(q.shape[0], dtype=q.dtype))
    return workspace.copy_(q.sum(-1))


@torch.library.custom_op("mla_conformance_phantom::answers_late", mutates_args=("out",))
def answers_late(q: Tensor, out: Tensor) -> None:
    """Write the result of the call before, as a cache with the wrong key does."""
    last = _seen.get("late")
    out.copy_(answer(q) if last is None or last.shape != out.shape else last)
    _seen["late"] = answer(q)


@torch.library.custom_op("mla_conformance_phantom::scratches_its_input", mutates_args=("out",))
def scratches_its_input(q: Tensor, out: Tensor) -> None:
    """Use the queries as scratch memory."""
    out.copy_(answer(q))
    q.mul_(2)


@torch.library.custom_op("mla_conformance_phantom::leaves_the_last_row", mutates_args=("out",))
def leaves_the_last_row(q: Tensor, out: Tensor) -> None:
    """Write every row but the last."""
    out[:-1].copy_(answer(q)[:-1])


@torch.library.custom_op("mla_conformance_phantom::writes_past_the_end", mutates_args=("out",))
def writes_past_the_end(q: Tensor, out: Tensor) -> None:
    """Write a row more than there is, where the allocation has one."""
    out.copy_(answer(q))
    end = out.storage_offset() + out.shape[0] * out.stride(0)
    if end < out.untyped_storage().nbytes() // out.element_size():
        out.as_strided((1,), (1,), end).fill_(0)


@torch.library.custom_op("mla_conformance_phantom::resizes", mutates_args=("out",))
def resizes(q: Tensor, out: Tensor) -> None:
    """Give the buffer dense strides before writing it, as vLLM 0.16.0's ``_v_up_proj`` did."""
    result = answer(q)
    out.resize_(out.shape)
    out.as_strided_(out.shape, (out.shape[1], 1))
    out.copy_(result)


@torch.library.custom_op("mla_conformance_phantom::depends_on_the_buffer", mutates_args=("out",))
def depends_on_the_buffer(q: Tensor, out: Tensor) -> None:
    """Add to what the buffer holds, as if the caller had cleared it."""
    out.nan_to_num_().add_(answer(q))


@torch.library.custom_op("mla_conformance_phantom::fakes_another_shape", mutates_args=("out",))
def fakes_another_shape(q: Tensor, out: Tensor) -> Tensor:
    """Return row sums, and promise something else while tracing."""
    out.copy_(answer(q))
    return q.sum(-1)


@torch.library.custom_op("mla_conformance_phantom::fakes_another_dtype", mutates_args=())
def fakes_another_dtype(q: Tensor) -> Tensor:
    """Return float16, and promise float32 while tracing."""
    return answer(q)


@torch.library.custom_op("mla_conformance_phantom::fakes_other_strides", mutates_args=())
def fakes_other_strides(q: Tensor) -> Tensor:
    """Return rows one after another, and promise columns while tracing."""
    return answer(q)


@torch.library.custom_op("mla_conformance_phantom::has_no_fake", mutates_args=("out",))
def has_no_fake(q: Tensor, out: Tensor) -> Tensor:
    """Return row sums, and say nothing of them while tracing."""
    out.copy_(answer(q))
    return q.sum(-1)


@torch.library.custom_op("mla_conformance_phantom::reads_on_the_host", mutates_args=("out",))
def reads_on_the_host(q: Tensor, out: Tensor) -> None:
    """Let a number of the input choose what is done: a graph cannot capture that."""
    out.copy_(answer(q) if float(q[0, 0]) > -1e9 else q)


# Registered as vLLM registers its operators: nothing looks at what they return.
_library = torch.library.Library("mla_conformance_phantom", "FRAGMENT")
_library.define("returns_a_view(Tensor q) -> Tensor")
_library.define("returns_one_memory_twice(Tensor q) -> (Tensor, Tensor)")


def _returns_a_view(q: Tensor) -> Tensor:
    """Return the upper half of the queries themselves."""
    return q[:, : q.shape[1] // 2]


def _returns_one_memory_twice(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of one allocation."""
    result = answer(q)
    return result[:, : q.shape[1] // 2], result[:, q.shape[1] // 2 :]


for _name, _implementation in (
    ("returns_a_view", _returns_a_view),
    ("returns_one_memory_twice", _returns_one_memory_twice),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")

for _op in (
    right,
    undeclared,
    rebinds,
    flattens,
    writes_the_last_buffer_too,
    answers_late,
    scratches_its_input,
    leaves_the_last_row,
    writes_past_the_end,
    resizes,
    depends_on_the_buffer,
    reads_on_the_host,
):
    _op.register_fake(lambda q, out: None)
right_result.register_fake(lambda q: torch.empty_like(q))
returns.register_fake(lambda q, out: torch.empty_like(q))
returns_its_workspace.register_fake(lambda q, out: q.new_empty(q.shape[0]))
fakes_another_shape.register_fake(lambda q, out: q.new_empty(q.shape))
fakes_another_dtype.register_fake(lambda q: q.new_empty(q.shape, dtype=torch.float32))
fakes_other_strides.register_fake(lambda q: q.new_empty(q.shape[::-1]).T)


def rows(seed: int, count: int = 5) -> dict[str, object]:
    """The argument of an operator that returns: float16 [count, 8]."""
    return {"q": torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)).half()}


def rows_and_buffer(seed: int, count: int = 5) -> dict[str, object]:
    """The arguments of an operator that writes."""
    arguments = rows(seed, count)
    return arguments | {"out": torch.empty_like(arguments["q"])}  # type: ignore[call-overload]


def call(name: str) -> OpCall:
    """How one of them is called, with one row and with none as variants."""
    op = getattr(torch.ops.mla_conformance_phantom, name).default
    writes = any(argument.name == "out" for argument in op._schema.arguments)
    factory = rows_and_buffer if writes else rows
    variants = {"one row": functools.partial(factory, count=1), "no rows": functools.partial(factory, count=0)}
    return OpCall(op, factory, ("out",) if writes else (), variants={} if name == "reads_on_the_host" else variants)


RIGHT = call("right")
UNDECLARED = call("undeclared")
"""For ``--op mla_conformance.suites.selfcheck.phantoms:UNDECLARED``."""
