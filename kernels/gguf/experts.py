"""The experts of a mixture layer, whose weights are 3-D GGUF tensors that may differ in type."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mla_conformance.kernels.gguf import shards as cuts
from mla_conformance.kernels.gguf.formats import QuantFormat
from mla_conformance.kernels.gguf.matmul import matmul
from mla_conformance.kernels.gguf.shards import OnUneven

Projection = Literal["gate", "up", "down"]
PROJECTIONS = ("gate", "up", "down")


def expert_slice(data: Tensor, expert: int) -> Tensor:
    """One expert's matrix, a view.

    Args:
        data: [experts, rows, row_bytes].
        expert: Its index.

    Returns:
        [rows, row_bytes].

    Raises:
        TypeError: expert is no int.
        ValueError: data is not 3-D, or has no such expert.
    """
    if data.dim() != 3:
        raise ValueError(f"data has shape {list(data.shape)}; pass [experts, rows, row_bytes]")
    if isinstance(expert, bool) or not isinstance(expert, int):
        raise TypeError(f"expert is {expert!r}; pass an int")
    if not 0 <= expert < len(data):
        raise ValueError(f"expert is {expert}; data holds experts 0 to {len(data) - 1}")
    return data[expert]


class GGUFExperts(torch.nn.Module):
    """SwiGLU experts: down(silu(gate x) * up x), weighted and summed over a token's experts.

    The three tensors have a type each, and layers need not agree. Ranks cut the intermediate dimension: gate and up by
    rows, down by columns, there only between blocks. Load all three, then call the module. The bytes are buffers
    outside the state dict, as in ``GGUFLinear``.

    Args:
        experts: Experts of the layer.
        hidden: Width of a token.
        intermediate: Width inside an expert, in the whole model.
        tp_rank: This rank.
        tp_size: Ranks.
        disable_tp: Hold the whole experts on every rank.
        on_uneven: What to do where the cut of down falls inside a block: "error", or "dequantize" to hold down's part
            as float32, which is exact.
        device: Where loaded tensors are put, and dequantised if need be; by default where they come from.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not positive, a rank outside its group, or intermediate does not divide among the ranks.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        on_uneven: OnUneven = "error",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("experts", experts), ("hidden", hidden), ("intermediate", intermediate)):
            cuts.check_size(name, size)
        cuts.check_ranks(tp_rank, tp_size)
        cuts.check_choice("on_uneven", on_uneven, ("error", "dequantize"))
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.rank, self.degree = (0, 1) if disable_tp else (tp_rank, tp_size)
        self.on_uneven, self.device = on_uneven, device
        self._range = cuts.even_range("intermediate", intermediate, self.rank, self.degree)
        self._stored: dict[str, QuantFormat] = {}

    @property
    def returns_partial_sum(self) -> bool:
        """Whether ``forward`` gives this rank's part of a sum, which the caller adds over the ranks."""
        return self.degree > 1

    def load(self, projection: Projection, data: Tensor, quant: str | int | None = None) -> None:
        """Take the tensor of one projection, whole-model sized, and keep this rank's part of it.

        Args:
            projection: "gate", "up" or "down".
            data: uint8 [experts, rows, row_bytes], or a float tensor [experts, rows, columns]; gate and up have
                ``intermediate`` rows of ``hidden`` columns, down the reverse. Copied.
            quant: ggml's name or number of the type; may be left out for a float tensor.

        Raises:
            TypeError: A wrong Python type or dtype.
            ValueError: A projection that is unknown or already loaded, an unknown type, a wrong shape, or a cut of
                down inside a block.
        """
        cuts.check_choice("projection", projection, PROJECTIONS)
        if projection in self._stored:
            raise ValueError(f"projection {projection!r} was loaded before; load each once")
        stored, form = cuts.as_bytes(data, quant)
        rows, columns = self.intermediate, self.hidden
        if projection == "down":
            rows, columns = columns, rows
        if stored.dim() != 3 or tuple(stored.shape[:2]) != (self.experts, rows):
            raise ValueError(f"data has shape {list(data.shape)}; {projection} needs [{self.experts}, {rows}, any]")
        cuts.check_row_bytes(stored, form, "intermediate" if projection == "down" else "hidden", columns)
        if projection == "down":
            local, held = cuts.cut_columns(
                stored, form, "intermediate", columns, self.rank, self.degree, self.on_uneven, self.device
            )
        else:
            local, held = stored[:, self._range[0] : self._range[1]], form
        local = local.to(device=self.device or local.device, copy=True).contiguous()
        self.register_buffer(projection, local, persistent=False)
        self._stored[projection] = held

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run each token through its experts.

        An expert runs once for all its tokens, experts in ascending order, so the result does not depend on the order
        of a token's ids. The ids are read on the host on every device: a GPU is waited for, and the call cannot be
        captured in a CUDA graph.

        Args:
            x: [tokens, hidden]: float32, bfloat16 or float16.
            topk_ids: integer [tokens, k], 0 to experts - 1. A repeated id counts with the sum of its weights.
            topk_weights: floating point [tokens, k].

        Returns:
            [tokens, hidden] in x's dtype. gate, up and down round to x's dtype (see ``matmul``), as does silu(gate) *
            up, which is computed in float32; the weighted sum is float32 and rounded once. Under tensor parallelism it
            is this rank's partial sum (``returns_partial_sum``).

        Raises:
            TypeError: An argument is no tensor, topk_ids not integer, or topk_weights not floating point.
            ValueError: A projection is missing (named), a shape is wrong, or an id is no expert's.
        """
        missing = [name for name in PROJECTIONS if name not in self._stored]
        if missing:
            raise ValueError(f"projections {missing} are not loaded; load each of them first")
        used = self._check_call(x, topk_ids, topk_weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = topk_weights.float()
        for expert in used:
            chosen = topk_ids == expert
            tokens = chosen.any(dim=1).nonzero().squeeze(1)
            share = torch.where(chosen, weights, 0.0).sum(dim=1)[tokens]
            rows = x[tokens]
            inner = torch.nn.functional.silu(self._product(rows, "gate", expert).float())
            inner = (inner * self._product(rows, "up", expert).float()).to(x.dtype)
            out[tokens] += share.unsqueeze(1) * self._product(inner, "down", expert).float()
        return out.to(x.dtype)

    def _product(self, x: Tensor, projection: str, expert: int) -> Tensor:
        return matmul(x, expert_slice(self.get_buffer(projection), expert), self._stored[projection].name)

    def _check_call(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> list[int]:
        """Refuse what does not fit; the experts in use, ascending."""
        for name, value in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}; pass [tokens, {self.hidden}]")
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor.dim() != 2 or len(tensor) != len(x) or tensor.shape != topk_ids.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; pass [{len(x)}, k], as the other")
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_ids has dtype {topk_ids.dtype}; pass int32 or int64")
        if not topk_weights.is_floating_point():
            raise TypeError(f"topk_weights has dtype {topk_weights.dtype}; pass a floating-point dtype")
        used: list[int] = torch.unique(topk_ids).tolist()
        wrong = [expert for expert in used if not 0 <= expert < self.experts]
        if wrong:
            raise ValueError(f"topk_ids has {wrong}; this layer has experts 0 to {self.experts - 1}")
        return used
