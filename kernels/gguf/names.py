"""Translate between the tensor names of a GGUF file and the parameter names of a checkpoint, both ways.

A name that the tables do not have is an error that names it: a loader that drops what it does not know loads split
`attn_k_b` and `attn_v_b` files without a `kv_b_proj` (vllm-gguf-plugin 0.0.5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mla_conformance.kernels.gguf.architectures import ARCHITECTURES, Architecture, Row

_LAYER_OF_TENSOR = re.compile(r"(?<=^blk\.)(0|[1-9][0-9]*)(?=\.)")
_LAYER_OF_PARAMETER = re.compile(r"(?<=^model\.layers\.)(0|[1-9][0-9]*)(?=\.)")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)(0|[1-9][0-9]*)\.")


class GGUFNamesError(ValueError):
    """A file's tensors and a model's parameters do not fit together.

    Attributes:
        unmapped: Tensors (or parameters) that have no counterpart, each with the reason.
        missing: Parameters that nothing fills, each with the tensor that should.
        doubled: Tensors that fill what another one fills already.
        misshaped: Tensors of another shape than their parameter needs, with the expected and the found one.
    """

    def __init__(
        self,
        arch: str,
        *,
        unmapped: Sequence[str] = (),
        missing: Sequence[str] = (),
        doubled: Sequence[str] = (),
        misshaped: Sequence[str] = (),
    ) -> None:
        self.arch = arch
        self.unmapped, self.missing = tuple(unmapped), tuple(missing)
        self.doubled, self.misshaped = tuple(doubled), tuple(misshaped)
        kinds = {
            "unmapped": self.unmapped,
            "missing": self.missing,
            "doubled": self.doubled,
            "mis-shaped": self.misshaped,
        }
        lines = [f"{kind}: {entry}" for kind, entries in kinds.items() for entry in entries]
        counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in kinds.items() if entries)
        super().__init__("\n  ".join([f"GGUF names of architecture {arch!r} do not fit ({counts}):", *lines]))


class Target(NamedTuple):
    """Where a tensor belongs.

    Attributes:
        parameter: Name in the checkpoint; a stack of experts is named without the expert's number
            (`expert_parameter` adds it).
        part: "whole"; "k_b" or "v_b" (halves of `kv_b_proj`); "experts" (all experts, stacked on the first dimension);
            or "scale" (the float32 factor of an NVFP4 tensor, one a tensor or one an expert).
    """

    parameter: str
    part: str


def find_architecture(arch: str) -> Architecture:
    """Return the tables of a GGUF architecture ("glm-dsa", "deepseek2").

    Raises:
        ValueError: if there are none; the message lists those there are.

    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}; there are name tables for {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def arch_of_model_type(model_type: str) -> str:
    """Return the GGUF architecture that files of a Hugging Face `model_type` have.

    Raises:
        ValueError: if the model type is in no table.

    """
    for architecture in ARCHITECTURES.values():
        if model_type in architecture.model_types:
            return architecture.name
    known = sorted(name for architecture in ARCHITECTURES.values() for name in architecture.model_types)
    raise ValueError(f"model_type is {model_type!r}; there are name tables for {known}")


def target_of(arch: str, gguf_name: str) -> Target:
    """Return the parameter that a GGUF tensor fills, and what piece of it the tensor is.

    Raises:
        GGUFNamesError: if the tensor has no parameter; one that a loader may leave out is named with the reason.
        ValueError: if the architecture is unknown.

    """
    template, layer = split_layer(gguf_name)
    found = row_of_tensor(arch, template)
    if found is not None:
        return Target(with_layer(found.parameter, layer), found.part)
    scaled = row_of_scale(arch, template)
    if scaled is not None:
        return Target(with_layer(scaled.parameter, layer), "scale")
    reason = ignored_reason(arch, gguf_name) or f"architecture {arch} has no such tensor"
    raise GGUFNamesError(arch, unmapped=[f"{gguf_name} ({reason})"])


def gguf_names_of(arch: str, parameter: str, *, split_kv_b: bool = True) -> tuple[str, ...]:
    """Return the GGUF tensors that fill a parameter together: one, or two where `kv_b_proj` is split.

    Args:
        arch: GGUF architecture.
        parameter: Name in the checkpoint; of one expert, or of the whole stack (without the expert's number).
        split_kv_b: Whether the file holds `attn_k_b` and `attn_v_b` or the older `attn_kv_b`.

    Raises:
        GGUFNamesError: if no tensor of this architecture fills the parameter.
        ValueError: if the architecture is unknown.

    """
    template, layer = _split(_LAYER_OF_PARAMETER, stack_of(parameter))
    rows = _rows_by_parameter(find_architecture(arch).name).get(template, ())
    if not rows:
        raise GGUFNamesError(arch, unmapped=[f"{parameter} (architecture {arch} has no tensor for this parameter)"])
    if len(rows) > 1:
        rows = tuple(row for row in rows if (row.part != "whole") == split_kv_b)
    return tuple(with_layer(row.tensor, layer) for row in rows)


def ignored_reason(arch: str, gguf_name: str) -> str | None:
    """Return why a loader may leave this tensor out, or None if it may not."""
    template, _ = split_layer(gguf_name)
    if template.endswith(".input_scale") and row_of_scale(arch, template.removesuffix(".input_scale") + ".scale"):
        return "range of the activations; used only where these are quantised to NVFP4 too"
    return find_architecture(arch).ignorable.get(template)


def expert_parameter(stack: str, expert: int) -> str:
    """Return one expert's name in the checkpoint: `...experts.up_proj.weight`, 7 -> `...experts.7.up_proj.weight`.

    Raises:
        ValueError: if `stack` names no stack of experts.

    """
    head, separator, tail = stack.partition(".mlp.experts.")
    if not separator:
        raise ValueError(
            f"stack is {stack!r}; a stack of experts is called like model.layers.3.mlp.experts.up_proj.weight"
        )
    return f"{head}{separator}{expert}.{tail}"


def stack_of(parameter: str) -> str:
    """Return the name of the stack that an expert's parameter belongs to; every other name comes back unchanged."""
    return _EXPERT.sub("", parameter, count=1)


def split_layer(gguf_name: str) -> tuple[str, int | None]:
    """Take the layer number out of a tensor name: `blk.3.attn_q_a.weight` -> (`blk.{layer}.attn_q_a.weight`, 3)."""
    return _split(_LAYER_OF_TENSOR, gguf_name)


def with_layer(template: str, layer: int | None) -> str:
    """Put a layer number into a template of the tables."""
    return template if layer is None else template.replace("{layer}", str(layer))


def row_of_tensor(arch: str, template: str) -> Row | None:
    """Return the row of a tensor, given without its layer number, or None."""
    return _rows_by_tensor(find_architecture(arch).name).get(template)


def row_of_scale(arch: str, template: str) -> Row | None:
    """Return the row of the matrix that an NVFP4 `.scale` tensor belongs to, or None."""
    if not template.endswith(".scale"):
        return None
    row = row_of_tensor(arch, template.removesuffix(".scale") + ".weight")
    # llama.cpp makes such factors for matrices and expert stacks only, not for norms or the halves of kv_b.
    return row if row is not None and len(row.shape) > 1 and row.part in ("whole", "experts") else None


def _split(pattern: re.Pattern[str], name: str) -> tuple[str, int | None]:
    found = pattern.search(name)
    if found is None or "{layer}" in name:
        return name.replace("{layer}", "{}"), None
    return name[: found.start()] + "{layer}" + name[found.end() :], int(found.group())


@lru_cache
def _rows_by_tensor(arch: str) -> dict[str, Row]:
    return {row.tensor: row for row in ARCHITECTURES[arch].rows}


@lru_cache
def _rows_by_parameter(arch: str) -> dict[str, tuple[Row, ...]]:
    rows: dict[str, tuple[Row, ...]] = {}
    for row in ARCHITECTURES[arch].rows:
        rows[row.parameter] = (*rows.get(row.parameter, ()), row)
    return rows
