"""Promises of an operator that is called as it is.

A *phantom output* is a result that lands in memory which the caller never reads. The call succeeds, and the caller goes
on with whatever its buffer held before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.suites.contracts.arguments import (
    NAN_BYTE,
    OTHER_BYTE,
    a_tensor,
    element_bytes,
    prepared,
    results_of,
    share_memory,
    storage_bytes,
    tensors_of,
    where,
)
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.op_call import OpCall


def check_declared_mutation(call: OpCall) -> None:
    """What changes is declared as written; every output and update is declared, and changes.

    Every byte of each argument's allocation is compared.

    Raises:
        Mismatch: otherwise.
    """
    arguments, _ = prepared(call, call.arguments)
    tensors = tensors_of(arguments)
    before = {name: storage_bytes(tensor).clone() for name, tensor in tensors.items()}
    returned = call.op(**arguments)
    changed = {name for name, tensor in tensors.items() if not torch.equal(storage_bytes(tensor), before[name])}
    for name in call.written:
        if name not in changed:
            raise Mismatch(
                f"{call.name}: phantom output: the call left the caller's {name!r} as it was{_hint(returned)}"
            )
        if name not in call.declared:
            raise Mismatch(
                f"{call.name}: phantom output: it writes {name!r}, but its schema does not say so. In eager the caller "
                f"sees the result; torch.compile may drop the call or read {name!r} before it. Add {name!r} to "
                "mutates_args"
            )
    undeclared = sorted(changed - call.declared)
    if undeclared:
        raise Mismatch(
            f"{call.name}: it writes {', '.join(map(repr, undeclared))}, which its schema calls read-only: a caller "
            "that uses the tensor again reads something else. Write to memory of its own, or add it to mutates_args"
        )


def check_caller_receives(call: OpCall) -> None:
    """The buffer that the caller holds receives the whole result, in every layout, and nothing around it is written.

    Each call is made with outputs full of NaN and again with outputs full of another byte: an element that shows what
    it was filled with both times was not written. Every layout must get the same bits. Variants are called in the first
    two layouts.

    Raises:
        Mismatch: otherwise.
    """
    for variant, factory in call.factories().items():
        first: dict[str, Tensor] = {}
        for layout in call.layouts[:2] if variant else call.layouts:
            at = where(call, f"{layout} buffer", variant)
            seen: list[dict[str, Tensor]] = []
            returned: object = None
            for fill in (NAN_BYTE, OTHER_BYTE):
                arguments, buffers = prepared(call, factory, layout=layout, fill=fill)
                places = {buffer.name: _place(buffer.view) for buffer in buffers}
                returned = call.op(**arguments)
                for buffer in buffers:
                    if _place(buffer.view) != places[buffer.name]:
                        raise Mismatch(
                            f"{at}: phantom output: it gave {buffer.name!r} other memory or another shape, and views "
                            "of the old memory never see the result"
                        )
                written = [f"{b.name} ({n} elements)" for b in buffers if (n := b.trespasses())]
                if written:
                    raise Mismatch(f"{at}: it writes outside the caller's view: {', '.join(written)}")
                seen.append({buffer.name: element_bytes(buffer.view) for buffer in buffers})
            for name in call.outputs:
                kept = ((seen[0][name] == NAN_BYTE) & (seen[1][name] == OTHER_BYTE)).all(-1)
                if kept.any():
                    what = f"{int(kept.sum())} of {kept.numel()} elements of {name!r} still hold what was there before"
                    problem = "phantom output: " if kept.all() else ""
                    raise Mismatch(f"{at}: {problem}{what} the call{_hint(returned)}")
                if not torch.equal(seen[0][name], seen[1][name]):
                    raise Mismatch(f"{at}: {name!r} depends on what its buffer held before the call")
            for name in call.written:
                if not torch.equal(first.setdefault(name, seen[0][name]), seen[0][name]):
                    raise Mismatch(f"{at}: {name!r} differs from the {call.layouts[0]} buffer's")


def check_second_call(call: OpCall) -> None:
    """A later call with other inputs and buffers leaves an earlier result alone, and is not answered from it.

    Raises:
        Mismatch: otherwise, or two calls return the same memory.
    """
    kept = _call(call, 0)
    snapshot = {name: element_bytes(tensor).clone() for name, tensor in kept.items()}
    later: list[dict[str, Tensor]] = []
    for seed in (1, 0, 1):
        result = _call(call, seed)
        shared = [n for n, tensor in result.items() if any(share_memory(tensor, old) for old in kept.values())]
        if shared:
            raise Mismatch(
                f"{call.name}: {', '.join(shared)} of a later call is memory that an earlier call handed out"
            )
        changed = [name for name, tensor in kept.items() if not torch.equal(element_bytes(tensor), snapshot[name])]
        if changed:
            raise Mismatch(
                f"{call.name}: a later call, with buffers of its own, changed {', '.join(changed)} of the first"
            )
        later.append({name: element_bytes(tensor).clone() for name, tensor in result.items()})
    for name in snapshot:
        if not torch.equal(later[1][name], snapshot[name]) or not torch.equal(later[0][name], later[2][name]):
            raise Mismatch(f"{call.name}: {name} depends on the calls made before: the same inputs gave other bits")


def check_returned(call: OpCall) -> None:
    """What it returns is memory of its own: no view of an argument, unless declared, and no two results are one.

    Raises:
        Mismatch: otherwise.
    """
    declared = {f"result {i}" for i, result in enumerate(call.op._schema.returns) if result.alias_info is not None}
    for variant, factory in call.factories().items():
        arguments, _ = prepared(call, factory)
        results = results_of(call.op(**arguments))
        for name, result in results.items():
            for argument, tensor in tensors_of(arguments).items():
                if name not in declared and share_memory(result, tensor):
                    raise Mismatch(
                        f"{where(call, variant)}: {name} is a view of {argument!r}, and the schema does not say so: "
                        f"whoever writes one changes the other. Return a copy, or declare the alias"
                    )
            twins = [other for other, tensor in results.items() if other != name and share_memory(result, tensor)]
            if twins:
                raise Mismatch(f"{where(call, variant)}: {name} and {', '.join(twins)} are one memory")


def _call(call: OpCall, seed: int) -> dict[str, Tensor]:
    """Call it once; what it returned, and the buffers that it was to write."""
    arguments, _ = prepared(call, call.arguments, seed)
    results = results_of(call.op(**arguments))
    return results | {repr(name): a_tensor(name, arguments[name]) for name in call.written}


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _hint(returned: object) -> str:
    return "; it returns a tensor instead, which nobody promised to read" if results_of(returned) else ""
