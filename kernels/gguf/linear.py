"""A linear layer that owns the quantised shards of its weight, in the order in which they are declared.

A fused weight (q_a and kv_a, gate and up, q and k and v) arrives from a GGUF file as one tensor a shard, sorted by
name, so in any order. Concatenating in that order gives an output of the right shape with swapped halves
(vllm-project/vllm#41057), which is why a shard here is owned by its declared index and never by its arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels.gguf import shards as cuts
from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import QuantFormat
from mla_conformance.kernels.gguf.matmul import matmul
from mla_conformance.kernels.gguf.shards import OnUneven, ShardSpec

Parallel = Literal["column", "row", "replicated"]


class ShardState(NamedTuple):
    """What a layer holds of one shard.

    Attributes:
        name: The shard's declared name.
        quant: The type it was loaded as; None until it is loaded.
        stored: The type it is held as; F32 where a cut inside a block had it dequantised.
        rows: Rows on this rank.
        columns: Columns on this rank.
        bytes: Bytes held; 0 until it is loaded.
    """

    name: str
    quant: str | None
    stored: str | None
    rows: int
    columns: int
    bytes: int


class _Run(NamedTuple):
    """Adjacent shards of one type, held as one matrix: output columns ``start`` to ``end``."""

    buffer: str
    quant: str
    start: int
    end: int


class GGUFLinear(torch.nn.Module):
    """y = x W^T + b with W in GGUF blocks; merged and QKV layers are column-parallel with several shards.

    Load every shard (``load_shard``, any order), then call ``finish_loading``, then the layer. A shard that is refused
    leaves what was loaded before untouched. The bytes are buffers that follow ``.to(device)`` and are not part of the
    state dict, where they would be without their types. A scale beside the tensor (NVFP4's ``.scale``) is not applied.

    Args:
        columns: In-features of the whole model.
        shards: The shards of the weight in the layer's order.
        parallel: "column" cuts each shard's rows over the ranks, "row" its columns, "replicated" nothing.
        tp_rank: This rank.
        tp_size: Ranks.
        disable_tp: Hold the whole layer on every rank, whatever ``parallel`` says.
        bias: Whether the layer has a bias, loaded with ``load_bias``.
        on_uneven: What to do where the cut of a row-parallel layer falls inside a block: "error", or "dequantize" to
            hold that shard's part as float32, which is exact.
        device: Where loaded shards are put, and dequantised if need be; by default where they come from.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not positive, a name declared twice, a rank outside its group, or a dimension does not
            divide among the ranks.
    """

    bias: Tensor

    def __init__(
        self,
        columns: int,
        shards: Sequence[ShardSpec],
        *,
        parallel: Parallel = "replicated",
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        bias: bool = False,
        on_uneven: OnUneven = "error",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        cuts.check_size("columns", columns)
        cuts.check_choice("parallel", parallel, ("column", "row", "replicated"))
        cuts.check_choice("on_uneven", on_uneven, ("error", "dequantize"))
        cuts.check_ranks(tp_rank, tp_size)
        self.shards = tuple(shards)
        if not all(isinstance(spec, ShardSpec) for spec in self.shards):
            raise TypeError(f"shards is {shards!r}; pass ShardSpecs")
        names = [spec.name for spec in self.shards]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"shards is {names}; declare at least one, each name once")
        whole = disable_tp or parallel == "replicated"
        self.rank, self.degree = (0, 1) if whole else (tp_rank, tp_size)
        self.parallel, self.on_uneven, self.device = parallel, on_uneven, device
        self.columns, self.has_bias = columns, bias
        row_part = (self.rank, self.degree) if parallel == "column" else (0, 1)
        column_part = (self.rank, self.degree) if parallel == "row" else (0, 1)
        first, end = cuts.even_range("columns", columns, *column_part)
        self.local_columns = end - first
        self._ranges = [cuts.row_range(spec, *row_part) for spec in self.shards]
        self.local_rows = sum(end - first for first, end in self._ranges)
        self._states: dict[int, ShardState] = {}
        self._pieces: dict[int, Tensor] = {}
        self._bias_pieces: dict[int, Tensor] = {}
        self._runs: list[_Run] | None = None

    @property
    def returns_partial_sum(self) -> bool:
        """Whether ``forward`` gives this rank's part of a sum, which the caller adds over the ranks."""
        return self.parallel == "row" and self.degree > 1

    def load_shard(self, data: Tensor, quant: str | int | None = None, shard: int | str | None = None) -> None:
        """Take one shard, whole-model sized, and keep this rank's part of it.

        Args:
            data: uint8 [rows, row_bytes], or a float32, float16 or bfloat16 tensor [rows, columns]. Copied.
            quant: ggml's name or number of the type; may be left out for a float tensor.
            shard: The declared index or name; None where ``data`` holds all shards in the declared order.

        Raises:
            TypeError: A wrong Python type or dtype, or a shard id that is neither int nor str (a tuple of ids).
            ValueError: An unknown or already loaded shard, an unknown type, or a wrong number of rows or columns.
        """
        stored, form = cuts.as_bytes(data, quant)
        whole = self._split(stored, shard, self._states)
        if stored.dim() != 2:
            raise ValueError(f"data has shape {list(data.shape)}; pass [rows, row_bytes]")
        cuts.check_row_bytes(stored, form, "columns", self.columns)
        pieces, states = {}, {}
        for index, part in whole.items():
            local, held = self._cut(part, form, index)
            pieces[index] = local.to(device=self.device or local.device, copy=True).contiguous()
            rows, name = len(local), self.shards[index].name
            states[index] = ShardState(name, form.name, held.name, rows, self.local_columns, pieces[index].numel())
        self._pieces.update(pieces)
        self._states.update(states)

    def load_bias(self, data: Tensor, shard: int | str | None = None) -> None:
        """Take one shard's bias, a float tensor [rows], whole-model sized; same ids and errors as ``load_shard``.

        A row-parallel layer adds it on rank 0 alone, so that the sum over the ranks has it once.
        """
        if not self.has_bias:
            raise ValueError("bias is False for this layer; declare it with bias=True to load one")
        if not isinstance(data, Tensor) or data.dtype not in cuts.PLAIN:
            raise TypeError("data is no bias; pass a float32, float16 or bfloat16 tensor [rows]")
        if data.dim() != 1:
            raise ValueError(f"data has shape {list(data.shape)}; pass a bias [rows]")
        for index, part in self._split(data, shard, self._bias_pieces).items():
            first, end = self._ranges[index]
            local = part[first:end]
            self._bias_pieces[index] = local.to(device=self.device or local.device, dtype=torch.float32, copy=True)

    def finish_loading(self) -> None:
        """Lay the shards out for ``forward``: adjacent shards of one type as one matrix.

        Raises:
            ValueError: A shard, or its bias, was not loaded; all of them are named.
        """
        self._refuse_missing()
        if self._runs is not None:
            return
        runs: list[_Run] = []
        groups: list[list[Tensor]] = []
        start = 0
        for index in self._order():
            quant, end = str(self._states[index].stored), start + self._states[index].rows
            if runs and runs[-1].quant == quant:
                runs[-1] = runs[-1]._replace(end=end)
                groups[-1].append(self._pieces[index])
            else:
                runs.append(_Run(f"weight_{len(runs)}", quant, start, end))
                groups.append([self._pieces[index]])
            start = end
        for run, group in zip(runs, groups, strict=True):
            self.register_buffer(run.buffer, group[0] if len(group) == 1 else torch.cat(group), persistent=False)
        if self.has_bias:
            self.register_buffer("bias", torch.cat([self._bias_pieces[i] for i in self._order()]), persistent=False)
        self._pieces.clear()
        self._runs = runs

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, one matrix product a run of equal types.

        Args:
            x: [..., columns of this rank]: float32, bfloat16 or float16.

        Returns:
            [..., rows of this rank] in x's dtype: W rounded once to x's dtype, products summed in float32, the sum
            rounded once, then the bias added in float32 and rounded. A row-parallel layer gives this rank's partial
            sum (``returns_partial_sum``), with the bias on rank 0 alone.

        Raises:
            ValueError: Shards are missing (named) or ``finish_loading`` was not called, or x has another width.
            TypeError: x is no tensor of these dtypes.
        """
        runs = self._finished()
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}; pass a torch.Tensor")
        if x.dim() < 1 or x.shape[-1] != self.local_columns:
            raise ValueError(f"x has shape {list(x.shape)}; pass [..., {self.local_columns}], this rank's columns")
        flat = x.reshape(-1, self.local_columns)
        out = flat.new_empty(len(flat), self.local_rows)
        for run in runs:
            matmul(flat, self.get_buffer(run.buffer), run.quant, out=out[:, run.start : run.end])
        if self.has_bias and not (self.returns_partial_sum and self.rank):
            out.add_(self.bias)
        return out.reshape(*x.shape[:-1], self.local_rows)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """This rank's weight [rows, columns], rounded once to ``dtype``; same errors as ``forward``."""
        runs = self._finished()
        device = self.get_buffer(runs[0].buffer).device
        out = torch.empty(self.local_rows, self.local_columns, dtype=dtype, device=device)
        for run in runs:
            dequantize(self.get_buffer(run.buffer), run.quant, dtype=dtype, out=out[run.start : run.end])
        return out

    def describe(self) -> list[ShardState]:
        """What is held of each declared shard, in the declared order."""
        sizes = [end - first for first, end in self._ranges]
        absent = [
            ShardState(s.name, None, None, n, self.local_columns, 0) for s, n in zip(self.shards, sizes, strict=True)
        ]
        return [self._states.get(index, state) for index, state in enumerate(absent)]

    def _order(self) -> list[int]:
        """Indices of the shards in the order of the output's columns."""
        return list(range(len(self.shards)))

    def _cut(self, data: Tensor, form: QuantFormat, index: int) -> tuple[Tensor, QuantFormat]:
        """This rank's part of a shard's bytes, and the format that it is held in."""
        if self.parallel == "row":
            return cuts.cut_columns(
                data, form, "columns", self.columns, self.rank, self.degree, self.on_uneven, self.device
            )
        first, end = self._ranges[index]
        return data[first:end], form

    def _split(self, data: Tensor, shard: int | str | None, loaded: Mapping[int, object]) -> dict[int, Tensor]:
        """Whole-model rows by shard index, after the id and the number of rows are found right."""
        indices = self._indices(shard)
        for index in indices:
            if index in loaded:
                raise ValueError(f"shard {self.shards[index].name!r} was loaded before; load each shard once")
        sizes = [self.shards[index].rows for index in indices]
        if data.dim() < 1 or len(data) != sum(sizes):
            what = "all shards together" if shard is None else f"shard {self.shards[indices[0]].name!r}"
            raise ValueError(f"data has shape {list(data.shape)}; {what} needs {sum(sizes)} rows")
        ends = list(itertools.accumulate(sizes))
        return {i: data[end - size : end] for i, size, end in zip(indices, sizes, ends, strict=True)}

    def _indices(self, shard: int | str | None) -> list[int]:
        """Indices that a shard id names."""
        names = [spec.name for spec in self.shards]
        if shard is None:
            return list(range(len(names)))
        if isinstance(shard, bool) or not isinstance(shard, int | str):
            raise TypeError(f"shard is {shard!r}; pass one index or name, or None for a tensor with all shards")
        if isinstance(shard, str):
            if shard not in names:
                raise ValueError(f"shard is {shard!r}; this layer has {names}")
            return [names.index(shard)]
        if not 0 <= shard < len(names):
            raise ValueError(f"shard is {shard}; this layer has 0 to {len(names) - 1}: {names}")
        return [shard]

    def _refuse_missing(self) -> None:
        missing = [spec.name for index, spec in enumerate(self.shards) if index not in self._states]
        if self.has_bias:
            missing += [f"{spec.name} (bias)" for i, spec in enumerate(self.shards) if i not in self._bias_pieces]
        if missing:
            raise ValueError(f"shards {missing} are not loaded; load each of them, then call finish_loading")

    def _finished(self) -> list[_Run]:
        if self._runs is None:
            self._refuse_missing()
            raise ValueError("finish_loading was not called; call it when all shards are loaded")
        return self._runs
