"""Check a file's tensors against a model before a byte is read: each tensor one place, each parameter filled once.

Nothing is dropped without a word. What a loader leaves out is in `LoadingPlan.ignored` with the reason; everything else
that does not fit is in one error that lists it by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mla_conformance.kernels.gguf.architectures import Architecture, Row
from mla_conformance.kernels.gguf.model_config import ModelConfig
from mla_conformance.kernels.gguf.names import (
    GGUFNamesError,
    expert_parameter,
    find_architecture,
    ignored_reason,
    row_of_scale,
    row_of_tensor,
    split_layer,
    with_layer,
)

Shape = tuple[int, ...]
FileTensor = tuple[str, Sequence[int], str]


class Source(NamedTuple):
    """A tensor that fills a parameter: which part of it (`names.Target`), as which type, and the row of the expert."""

    tensor: str
    part: str
    quant: str
    expert: int | None


@dataclass(frozen=True)
class LoadingPlan:
    """What fills what.

    Attributes:
        arch: GGUF architecture.
        sources: Tensors by the checkpoint's parameter name, every expert on its own.
        shared: Parameters that use another one's values (tied embeddings, the predictor's embedding and head).
        ignored: Tensors that are left out, with the reason.
    """

    arch: str
    sources: dict[str, tuple[Source, ...]]
    shared: dict[str, str]
    ignored: dict[str, str]


class _Place(NamedTuple):
    """One tensor that the model can have: its row of the table, the parameter and the shape."""

    row: Row
    parameter: str
    shape: Shape


@dataclass
class _Findings:
    unmapped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)


def expected_parameters(config: ModelConfig, arch: str, *, mtp: bool = False) -> dict[str, Shape]:
    """Return the parameters of a model with their shapes, called as in its checkpoint, every expert on its own.

    Args:
        config: Sizes of the model.
        arch: GGUF architecture; it decides whether an indexer and the multi-token predictor are known.
        mtp: Whether to include the multi-token predictor's layers.

    Raises:
        ValueError: if `mtp` is asked for and the config or the architecture has no such layers, or the architecture is
            unknown or another than the config's.

    """
    expected: dict[str, Shape] = {}
    for place in _places(find_architecture(arch), config, mtp).values():
        if place.row.part == "experts":
            expected |= {expert_parameter(place.parameter, e): place.shape[1:] for e in range(place.shape[0])}
        elif place.row.part == "whole":
            expected[place.parameter] = place.shape
    return expected


def plan_loading(arch: str, config: ModelConfig, tensors: Iterable[FileTensor], *, mtp: bool = False) -> LoadingPlan:
    """Decide which tensor fills which parameter.

    A transposed square matrix has the right shape, so only data can tell; `attn_k_b` is square where
    `qk_nope_head_dim` equals `kv_lora_rank`.

    Args:
        arch: The file's `general.architecture`.
        config: Sizes of the model that is to be filled.
        tensors: (name, shape in numpy order, type) of every tensor, of all splits together, in any order.
        mtp: Whether to fill the multi-token predictor; if not, its tensors are ignored with that reason.

    Raises:
        GGUFNamesError: if a tensor has no place, two fill the same, one has the wrong shape or a parameter stays empty;
            it lists all of them.
        ValueError: as for `expected_parameters`.

    """
    architecture = find_architecture(arch)
    places = _places(architecture, config, mtp)
    findings = _Findings()
    quants: dict[str, str] = {}
    scales: dict[str, tuple[Shape, str]] = {}
    ignored: dict[str, str] = {}
    for name, dimensions, quant in tensors:
        shape = tuple(int(size) for size in dimensions)
        reason = _why_ignored(architecture, config, name, mtp)
        if name in quants or name in scales or name in ignored:
            findings.doubled.append(f"{name} is in the file more than once")
        elif name in places:
            quants[name] = quant
            if shape != places[name].shape:
                findings.misshaped.append(
                    f"{name} has shape {shape}, {places[name].parameter} needs {places[name].shape}"
                )
        elif _scaled_tensor(arch, name) in places:
            scales[name] = shape, quant
        elif reason is not None:
            ignored[name] = reason
        else:
            findings.unmapped.append(f"{name} ({_why_unmapped(architecture, config, name)})")
    for name, (shape, quant) in scales.items():
        _check_scale(name, shape, quant, _scaled_tensor(arch, name), places, quants, findings)
    shared = _check_filled(places, config, quants, findings)
    if findings.unmapped or findings.missing or findings.doubled or findings.misshaped:
        raise GGUFNamesError(arch, **vars(findings))
    return LoadingPlan(arch, _sources(arch, places, quants, scales), shared, ignored)


def _places(architecture: Architecture, config: ModelConfig, mtp: bool) -> dict[str, _Place]:
    """Return every tensor that a file may hold for this model by name; of `kv_b_proj` both layouts."""
    if config.model_type not in architecture.model_types:
        raise ValueError(
            f"config.model_type is {config.model_type!r}; files of architecture {architecture.name} hold "
            f"{list(architecture.model_types)}"
        )
    if mtp and not (architecture.has_mtp and config.num_nextn_predict_layers):
        raise ValueError(
            f"mtp is True; num_nextn_predict_layers is {config.num_nextn_predict_layers} and architecture "
            f"{architecture.name} has {'' if architecture.has_mtp else 'no '}tensors for such layers: load without it"
        )
    sizes = config.sizes()
    places = {}
    for row in architecture.rows:
        for layer in _layers_of(row, config, mtp):
            # The head is expected with tied embeddings too; the embedding then stands in for it.
            if row.instead or config.has(row.needs, layer):
                shape = tuple(sizes[name] for name in row.shape)
                places[with_layer(row.tensor, layer)] = _Place(row, with_layer(row.parameter, layer), shape)
    return places


def _layers_of(row: Row, config: ModelConfig, mtp: bool) -> list[int | None]:
    if row.layers == "once":
        return [None]
    predictor = config.layers("mtp") if mtp else range(0)
    own = range(0) if row.layers == "mtp" else config.layers(row.layers)
    return [*own, *(range(0) if row.layers == "dense" else predictor)]


def _scaled_tensor(arch: str, name: str) -> str:
    """Return the tensor that an NVFP4 scale belongs to, or an empty name."""
    template, layer = split_layer(name)
    row = row_of_scale(arch, template)
    return "" if row is None else with_layer(row.tensor, layer)


def _why_ignored(architecture: Architecture, config: ModelConfig, name: str, mtp: bool) -> str | None:
    template, layer = split_layer(name)
    row = row_of_tensor(architecture.name, template) or row_of_scale(architecture.name, template)
    if row and row.layers != "dense" and layer in config.layers("mtp") and architecture.has_mtp and not mtp:
        return "layer of the multi-token predictor, which was not asked for (mtp=False)"
    if row and row.needs == "indexer" and config.index_n_heads and layer in config.shared_indexer_layers:
        return "the layer reuses an earlier layer's top-k (indexer_types: shared) and owns no indexer"
    return ignored_reason(architecture.name, name)


def _why_unmapped(architecture: Architecture, config: ModelConfig, name: str) -> str:
    template, layer = split_layer(name)
    row = row_of_tensor(architecture.name, template)
    if row is None:
        return f"architecture {architecture.name} has no such tensor"
    if layer is not None and layer not in config.layers("every"):
        return f"the model has layers 0 to {config.num_hidden_layers - 1}"
    if not config.has(row.needs, layer):
        return f"by its config the model has no such tensor: it needs {row.needs}"
    return f"layer {layer} is none of the {row.layers} layers"


def _check_scale(
    name: str,
    shape: Shape,
    quant: str,
    scaled: str,
    places: dict[str, _Place],
    quants: dict[str, str],
    findings: _Findings,
) -> None:
    place = places[scaled]
    expected = (place.shape[0],) if place.row.part == "experts" else (1,)
    if quants.get(scaled) != "NVFP4":
        findings.unmapped.append(f"{name} (a scale of {scaled}, which is {quants.get(scaled, 'not in the file')})")
    elif quant != "F32":
        findings.unmapped.append(f"{name} (a scale must be F32, this one is {quant})")
    elif shape != expected:
        findings.misshaped.append(f"{name} has shape {shape}, the scale of {scaled} needs {expected}")


def _check_filled(
    places: dict[str, _Place], config: ModelConfig, quants: dict[str, str], findings: _Findings
) -> dict[str, str]:
    """Note parameters that are filled by nothing or twice; return those that use another one's values."""
    tensors: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in places.items():
        tensors[place.parameter].append(name)
    shared = {}
    for parameter, names in tensors.items():
        first = places[names[0]].row
        whole = [name for name in names if places[name].row.part not in ("k_b", "v_b")]
        parts = [name for name in names if name not in whole]
        found_whole = [name for name in whole if name in quants]
        found_parts = [name for name in parts if name in quants]
        tied = bool(first.needs) and bool(first.instead) and not config.has(first.needs, None)
        if tied and found_whole:
            findings.doubled.append(f"{names[0]} fills {parameter}, which the config ties to {first.instead}")
        elif found_whole and found_parts:
            findings.doubled.append(f"{', '.join(found_whole + found_parts)} all fill {parameter}")
        elif not found_whole and first.instead and (tied or not first.needs):
            shared[parameter] = first.instead
        elif not found_whole and not found_parts:
            wanted = " and ".join(parts) + f" (or {whole[0]})" if parts else whole[0]
            findings.missing.append(f"{wanted} for {parameter}")
        elif not found_whole:
            findings.missing += [f"{name} for {parameter}" for name in parts if name not in quants]
    return shared


def _sources(
    arch: str, places: dict[str, _Place], quants: dict[str, str], scales: dict[str, tuple[Shape, str]]
) -> dict[str, tuple[Source, ...]]:
    sources: defaultdict[str, tuple[Source, ...]] = defaultdict(tuple)
    belongs = {name: (name, places[name].row.part, quant) for name, quant in quants.items()}
    belongs |= {name: (_scaled_tensor(arch, name), "scale", quant) for name, (_, quant) in scales.items()}
    for name, (weight, part, quant) in belongs.items():
        place = places[weight]
        if place.row.part == "experts":
            for expert in range(place.shape[0]):
                sources[expert_parameter(place.parameter, expert)] += (Source(name, part, quant, expert),)
        else:
            sources[place.parameter] += (Source(name, part, quant, None),)
    return dict(sources)
