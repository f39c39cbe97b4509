"""Promises of an operator inside ``torch.compile``: what it says while tracing, and what the compiled caller gets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mla_conformance.suites.contracts.arguments import (
    OTHER_BYTE,
    Arguments,
    a_tensor,
    prepared,
    results_of,
    same_bits,
    where,
)
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.op_call import OpCall

Traced = dict[str, dict[str, Tensor]]
"""What a caller got, by what it did and then by name."""


def check_fake(call: OpCall) -> None:
    """While tracing, it returns what it returns in eager: nothing, or the same shape, dtype, strides and device.

    Raises:
        Mismatch: otherwise, or it cannot be traced.
    """
    for variant, factory in call.factories().items():
        arguments, _ = prepared(call, factory)
        at = where(call, variant)
        with FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
            try:
                promised = _metadata(call.op(**fakes))
            except Exception as error:
                raise Mismatch(f"{at}: it cannot be traced; register a fake for it: {error}") from error
        given = _metadata(call.op(**arguments))
        if promised != given:
            raise Mismatch(f"{at}: tracing promises {promised or 'nothing'}, the call returns {given or 'nothing'}")


def check_with_opcheck(call: OpCall) -> None:
    """PyTorch's own ``torch.library.opcheck`` agrees.

    Raises:
        Mismatch: it does not; its words follow.
    """
    arguments, _ = prepared(call, call.arguments)
    try:
        torch.library.opcheck(call.op, (), arguments)
    except Exception as error:
        raise Mismatch(f"{call.name}: torch.library.opcheck: {error}") from error


def check_compiled(call: OpCall, backend: str) -> None:
    """A compiled caller gets eager's bits, for two sets of inputs.

    The caller makes the call three times: with buffers that the graph allocates; with rows of a larger graph input; and
    with a buffer that it reads before the call and after it (a compiler that overlooks the write gives the same both
    times: pytorch/pytorch#127835). Forgets what else this process compiled.

    Args:
        call: the operator and its arguments.
        backend: of ``torch.compile``, such as ``aot_eager`` or ``inductor``.

    Raises:
        Mismatch: otherwise, or it does not compile in one graph.
    """
    example, _ = prepared(call, call.arguments)
    constants = {name: value for name, value in example.items() if not isinstance(value, Tensor)}

    def caller(inputs: dict[str, Tensor], before: dict[str, Tensor], larger: dict[str, Tensor]) -> Traced:
        got: Traced = {}
        buffers = {name: _allocated(call, name, rows) for name, rows in before.items()}
        returned = call.op(**inputs, **constants, **buffers)
        got["allocates its buffers"] = {name: b.clone() for name, b in buffers.items()} | results_of(returned)
        if larger:
            buffers = {name: rows.clone() for name, rows in before.items()}
            got["reads its buffer before the call"] = {name: buffer.clone() for name, buffer in buffers.items()}
            call.op(**inputs, **constants, **buffers)
            got["reads its buffer after the call"] = {name: buffer.clone() for name, buffer in buffers.items()}
            buffers = {name: rows[1:-1] for name, rows in larger.items()}
            call.op(**inputs, **constants, **buffers)
            got["hands over rows of a larger tensor"] = {name: buffer.clone() for name, buffer in buffers.items()}
        return got

    # One graph for each caller: shapes are the same for both seeds.
    torch._dynamo.reset()
    compiled = torch.compile(caller, backend=backend, fullgraph=True, dynamic=False)
    for seed in (0, 1):
        inputs, before, larger = _split(call, seed)
        eager = caller(inputs, before, larger)
        compiled_inputs, compiled_before, compiled_larger = _split(call, seed)
        at = f"{call.name}, torch.compile with {backend}"
        try:
            got = compiled(compiled_inputs, compiled_before, compiled_larger)
        except Exception as error:
            raise Mismatch(f"{at}: it does not run: {error}") from error
        for what, expected in eager.items():
            for name, tensor in expected.items():
                if same_bits(got[what][name], tensor):
                    continue
                if what == "reads its buffer before the call":
                    raise Mismatch(f"{at}: {name!r}, read before the call, already shows something else")
                raise Mismatch(
                    f"{at}, a caller that {what}: phantom output: it reads another {name!r} than in eager. Declare "
                    "what is written in mutates_args, and write into the argument itself"
                )
        for name, rows in larger.items():
            if not same_bits(compiled_larger[name], rows):
                raise Mismatch(f"{at}: the graph input that {name!r} is a part of ends otherwise than in eager")


def _split(call: OpCall, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that are read; those that are written, as they are before; and those with a row more on each side."""
    arguments: Arguments
    arguments, _ = prepared(call, call.arguments, seed)
    written = {name: a_tensor(name, arguments[name]) for name in call.written}
    inputs = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and k not in written}
    larger = {}
    for name, rows in written.items():
        larger[name] = rows.new_empty((rows.shape[0] + 2, *rows.shape[1:]))
        larger[name].view(torch.uint8).fill_(OTHER_BYTE)
        larger[name][1:-1] = rows
    return inputs, written, larger


def _allocated(call: OpCall, name: str, rows: Tensor) -> Tensor:
    """A buffer that the graph allocates: full of NaN for an output, a copy of what is there for an update."""
    if name in call.updates:
        return rows.clone()
    return torch.full_like(rows, math.nan if rows.dtype.is_floating_point else 1)


def _metadata(returned: object) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in results_of(returned).values()]
