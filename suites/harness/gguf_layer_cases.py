"""Cases of layers: the shards of a whole model as they arrive, and the activations of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_conformance.suites.gguf.models import MODELS, FileTensor, Model, gguf_tensors
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.buffers import Buffer
from mla_conformance.suites.harness.problems import GGUFKvBProblem, GGUFLinearProblem, GGUFNamesProblem


@dataclass(frozen=True)
class Arrival:
    """One tensor of the file as the loader gets it.

    Attributes:
        shard_id: index of the shard in the layer, or what a faulty file or map makes of it.
        quant: ggml's name of its type.
        data: uint8 [rows, row_bytes] of the whole model.
    """

    shard_id: object
    quant: str
    data: Tensor


@dataclass
class LinearCase:
    """One linear layer to load, and its activations.

    Attributes:
        shards: uint8 [rows, row_bytes] of each shard of the whole model, in the layer's own order.
        arrivals: what the loader gets, in order.
        x: activations of this rank, [tokens, local columns].
    """

    problem: GGUFLinearProblem
    shards: list[Tensor]
    arrivals: list[Arrival]
    x: Tensor
    buffers: list[Buffer] = field(default_factory=list)


@dataclass
class KvBCase:
    """The tensors of a GGUF file that make kv_b_proj.

    Attributes:
        tensors: uint8; ``fused`` [heads * (nope + v), row_bytes of kv_lora_rank], or ``split``: k_b [heads,
            kv_lora_rank, row_bytes of nope] and v_b [heads, v, row_bytes of kv_lora_rank].
    """

    problem: GGUFKvBProblem
    tensors: list[Tensor]
    buffers: list[Buffer] = field(default_factory=list)


@dataclass
class NamesCase:
    """A model, and the tensors of its GGUF file as (name, shape in numpy order, type)."""

    problem: GGUFNamesProblem
    model: Model
    tensors: list[FileTensor]
    buffers: list[Buffer] = field(default_factory=list)


def build_linear(problem: GGUFLinearProblem, device: torch.device | str = "cpu") -> LinearCase:
    """Draw the shards and the activations of ``problem`` on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    drawn = [blocks.draw(quant, rows, problem.columns, "moderate", generator) for quant, rows in problem.shards]
    buffers = [_guarded(f"shard {i}", data, device) for i, data in enumerate(drawn)]
    shards = [buffer.view for buffer in buffers]
    quants = [quant for quant, _ in problem.shards]
    arrivals = []
    for shard_id in problem.arrivals:
        members = [shards[i] for i in _members(shard_id, len(shards))]
        first = _members(shard_id, len(shards))[0]
        arrivals.append(Arrival(shard_id, quants[first], members[0] if len(members) == 1 else torch.cat(members)))
    x = torch.randn(problem.tokens, problem.columns, dtype=torch.float64, generator=generator)
    if problem.layer == "row":
        width = problem.local_columns
        x = x[:, problem.rank * width : (problem.rank + 1) * width]
    buffers.append(_guarded("x", x.to(getattr(torch, problem.dtype)), device))
    return LinearCase(problem, shards, arrivals, buffers[-1].view, buffers)


def build_kv_b(problem: GGUFKvBProblem, device: torch.device | str = "cpu") -> KvBCase:
    """Draw the tensors of ``problem`` on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    heads, nope, v, latent = (
        problem.heads,
        problem.qk_nope_head_dim,
        problem.v_head_dim,
        problem.kv_lora_rank,
    )

    def draw(name: str, quant: str, rows: int, columns: int) -> Buffer:
        return _guarded(name, blocks.draw(quant, rows, columns, "moderate", generator), device)

    if problem.form == "fused":
        buffers = [draw("kv_b", problem.quants[0], heads * (nope + v), latent)]
        return KvBCase(problem, [buffers[0].view], buffers)
    k_b = draw("k_b", problem.quants[0], heads * latent, nope)
    v_b = draw("v_b", problem.quants[1], heads * v, latent)
    return KvBCase(problem, [k_b.view.view(heads, latent, -1), v_b.view.view(heads, v, -1)], [k_b, v_b])


def build_names(problem: GGUFNamesProblem, device: torch.device | str = "cpu") -> NamesCase:
    """List the tensors of ``problem``'s file; there is nothing to put on ``device``."""
    model = MODELS[problem.model]
    if problem.layers:
        model = model._replace(config=model.config | {"num_hidden_layers": problem.layers})
    return NamesCase(problem, model, gguf_tensors(model, split_kv_b=problem.split_kv_b, mtp=problem.mtp))


def _guarded(name: str, tensor: Tensor, device: torch.device | str) -> Buffer:
    """``tensor`` on ``device``, contiguous, among bytes that nothing may write, as it may not be itself."""
    buffer = Buffer.allocate(name, tuple(tensor.shape), (tensor.shape[1], 1), tensor.dtype, fill=float(0x7F))
    buffer.view.copy_(tensor)
    placed = buffer.to(torch.device(device))
    placed.guard()
    return placed


def _members(shard_id: object, count: int) -> list[int]:
    """Which shards a tensor with this id holds: a tuple names several, None all, and an unknown id the last."""
    if shard_id is None:
        return list(range(count))
    ids = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    return [i if isinstance(i, int) and 0 <= i < count else count - 1 for i in ids]


Forward = Callable[[Tensor], Tensor]
"""A loaded layer: activations [tokens, local columns] to [tokens, local rows]."""
