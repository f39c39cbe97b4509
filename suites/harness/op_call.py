"""An operator of ``torch.library`` and how to call it: what the contract tests are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._ops import OpOverload

Factory = Callable[[int], dict[str, object]]
"""Fresh arguments by name. The seed changes what tensors hold (so that results differ), never shapes or dtypes."""

LAYOUTS = ("contiguous", "row-strided", "offset", "padded")
"""A caller's buffers: whole; with a gap after each row; from element 3 of its allocation; spare rows at the end."""


@dataclass(frozen=True)
class OpCall:
    """An operator and how to call it.

    Args:
        op: the overload, such as ``torch.ops.mla_conformance.mla_decode_out.default``.
        arguments: makes fresh arguments from a seed. No two may share memory.
        outputs: arguments that every call writes fully, whatever they held before; the first dimension is rows. Of the
            factory's tensors for them only shape, dtype and device count: each check brings buffers of its own.
        updates: arguments that a call changes in part, such as a cache.
        variants: further arguments by a name in words: other dtypes and odd shapes, one row or none.
        layouts: which of ``LAYOUTS`` the operator accepts for its outputs and updates.

    Raises:
        ValueError: an output or update is not a tensor argument of the operator, an argument is a list of tensors, or
            the operator neither writes nor returns anything.
        TypeError: ``op`` is not an overload.
    """

    op: OpOverload
    arguments: Factory
    outputs: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    variants: Mapping[str, Factory] = field(default_factory=dict)
    layouts: tuple[str, ...] = LAYOUTS

    def __post_init__(self) -> None:
        if not isinstance(self.op, OpOverload):
            raise TypeError(f"op is a {type(self.op).__name__}; pass an overload, torch.ops.NAMESPACE.NAME.default")
        types = {argument.name: str(argument.type) for argument in self.op._schema.arguments}
        lists = [name for name, kind in types.items() if "List" in kind and "Tensor" in kind]
        if lists:
            raise ValueError(f"{self.op} takes lists of tensors ({', '.join(lists)}), which are not looked into")
        unknown = [name for name in self.written if "Tensor" not in types.get(name, "")]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no tensor argument of {self.op}, which has {', '.join(types)}")
        if not self.written and not self.returns:
            raise ValueError(f"{self.op} returns nothing; name what it writes in outputs or updates")

    @property
    def name(self) -> str:
        """Namespace and name, as tests are called."""
        return str(self.op._schema.name).replace("::", ".")

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that a call writes."""
        return (*self.outputs, *self.updates)

    @property
    def returns(self) -> bool:
        """Whether the schema has a tensor among its results."""
        return any("Tensor" in str(result.type) for result in self.op._schema.returns)

    @property
    def declared(self) -> set[str]:
        """Names of the arguments that the schema says are written."""
        arguments = self.op._schema.arguments
        return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}

    def offers(self, operation: str) -> bool:
        """Whether requirements of ``operation`` are about it: any operator, one that writes, one that returns."""
        return {"custom_op": True, "custom_op_writes": bool(self.written), "custom_op_returns": self.returns}[operation]

    def factories(self) -> dict[str, Factory]:
        """The factory of plain arguments, named "", and those of the variants."""
        return {"": self.arguments, **self.variants}

    def on(self, device: str) -> OpCall:
        """The same call with tensors on ``device``."""

        def moved(factory: Factory) -> Factory:
            return lambda seed: {
                name: value.to(device) if isinstance(value, Tensor) else value for name, value in factory(seed).items()
            }

        if torch.device(device).type == "cpu":
            return self
        return replace(
            self,
            arguments=moved(self.arguments),
            variants={name: moved(factory) for name, factory in self.variants.items()},
        )
