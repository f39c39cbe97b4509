"""What a layer's weight is made of, and which part of it a tensor-parallel rank holds.

A quantised matrix can be cut between any two rows, but along its columns only between two blocks: a block's elements
share their scales. Bytes cut elsewhere still look like a matrix and decode to noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import QuantFormat, find

OnUneven = Literal["error", "dequantize"]
PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class ShardSpec:
    """One shard of a fused weight, as the whole model has it.

    Args:
        name: What the shard is loaded as, beside its index: ``"q_a"``, ``"gate"``, ``"k"``.
        rows: Output rows in the whole model.
        heads: Heads that the rows belong to, for rows that may only be cut between heads; rows = heads * head_dim.
        head_dim: Rows of one head.
        replicate_heads: Whether ranks share a head where there are fewer heads than ranks. True for the key and value
            heads of grouped-query attention, as in vLLM's QKVParallelLinear.

    Raises:
        TypeError: name is no str or a size no int.
        ValueError: A size is not positive, or rows is not heads * head_dim.
    """

    name: str
    rows: int
    heads: int | None = None
    head_dim: int | None = None
    replicate_heads: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name is {self.name!r}; pass a str, a shard's index is its place in the declaration")
        check_size("rows", self.rows)
        if (self.heads is None) != (self.head_dim is None):
            raise ValueError(f"heads is {self.heads} and head_dim {self.head_dim}; pass both or neither")
        if self.heads is not None and self.head_dim is not None:
            check_size("heads", self.heads)
            check_size("head_dim", self.head_dim)
            if self.rows != self.heads * self.head_dim:
                raise ValueError(f"rows is {self.rows}; {self.heads} heads of {self.head_dim} rows need their product")
        elif self.replicate_heads:
            raise ValueError("replicate_heads is True without heads; pass heads and head_dim")


def qkv_shards(heads: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> tuple[ShardSpec, ...]:
    """Shards ``q``, ``k``, ``v`` of a fused query-key-value weight.

    Args:
        heads: Query heads of the whole model.
        kv_heads: Key and value heads of the whole model; ranks share them where they are fewer than the ranks.
        head_dim: Rows of a query or key head.
        v_head_dim: Rows of a value head, where it differs.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    return (
        ShardSpec("q", heads * head_dim, heads, head_dim),
        ShardSpec("k", kv_heads * head_dim, kv_heads, head_dim, replicate_heads=True),
        ShardSpec("v", kv_heads * v_dim, kv_heads, v_dim, replicate_heads=True),
    )


def row_range(spec: ShardSpec, rank: int, degree: int) -> tuple[int, int]:
    """First row and end of the rows that a rank holds of a column-parallel shard.

    Raises:
        ValueError: The rows, or the heads where the shard has any, do not divide among the ranks.
    """
    if spec.heads is None or spec.head_dim is None:
        return even_range(f"rows of shard {spec.name!r}", spec.rows, rank, degree)
    if spec.replicate_heads and spec.heads < degree:
        if degree % spec.heads:
            raise ValueError(
                f"heads of shard {spec.name!r} is {spec.heads}: tp_size {degree} ranks cannot share them evenly; "
                f"choose a tp_size that is a multiple or a divisor of {spec.heads}"
            )
        first = rank // (degree // spec.heads)
        return first * spec.head_dim, (first + 1) * spec.head_dim
    first, end = even_range(f"heads of shard {spec.name!r}", spec.heads, rank, degree)
    return first * spec.head_dim, end * spec.head_dim


def even_range(dimension: str, size: int, rank: int, degree: int) -> tuple[int, int]:
    """First element and end of a rank's equal part of a dimension.

    Raises:
        ValueError: ``size`` is no multiple of ``degree``.
    """
    if size % degree:
        raise ValueError(f"{dimension} is {size}, no multiple of tp_size {degree}; choose a tp_size that divides it")
    part = size // degree
    return rank * part, (rank + 1) * part


def cut_columns(
    data: Tensor,
    form: QuantFormat,
    dimension: str,
    columns: int,
    rank: int,
    degree: int,
    on_uneven: OnUneven,
    device: torch.device | str | None,
) -> tuple[Tensor, QuantFormat]:
    """Keep a rank's part of the columns.

    Args:
        data: uint8 [..., row_bytes], checked to hold ``columns`` elements of ``form`` a row.
        form: Its format.
        dimension: What the columns are called in an error.
        columns: Elements of a row.
        rank: The rank.
        degree: Ranks.
        on_uneven: What to do where the cut falls inside a block. "error" refuses; "dequantize" stores the part's
            values as float32, which is exact and takes 4 bytes an element.
        device: Where to dequantise; by default where ``data`` is.

    Returns:
        The part, a view where the bytes could be kept, and its format.

    Raises:
        ValueError: The columns do not divide, or the cut falls inside a block under "error".
    """
    first, end = even_range(dimension, columns, rank, degree)
    block, size = form.block_elements, form.block_bytes
    if (columns // degree) % block == 0:
        return data[..., first // block * size : end // block * size], form
    if on_uneven == "error":
        raise ValueError(
            f"{dimension} is {columns}: a tp_size of {degree} gives {columns // degree} a rank, which cuts "
            f"{form.name}'s blocks of {block}; choose a tp_size that divides {columns // block} blocks, or pass "
            "on_uneven='dequantize' to hold this weight as float32"
        )
    lowest = first // block
    covering = data[..., lowest * size : -(-end // block) * size]
    values = dequantize(covering.to(device or data.device), form.name)[
        ..., first - lowest * block : end - lowest * block
    ]
    return values.contiguous().view(torch.uint8), find("F32")


def as_bytes(data: Tensor, quant: str | int | None) -> tuple[Tensor, QuantFormat]:
    """The bytes of a weight, which comes as bytes with a type or as a float tensor, and its format.

    Raises:
        TypeError: ``data`` is no tensor, or its dtype is no weight's, or not the one that ``quant`` says.
        ValueError: ``quant`` is no known type, or ``data`` has no dimension.
    """
    if not isinstance(data, Tensor):
        raise TypeError(f"data is a {type(data).__name__}; pass a torch.Tensor")
    if data.dim() == 0:
        raise ValueError("data is a single number; pass [..., rows, columns]")
    if data.dtype == torch.uint8:
        if quant is None:
            raise TypeError("quant is None; uint8 data need their type's name, as 'Q4_K'")
        return data, find(quant)
    if data.dtype not in PLAIN:
        raise TypeError(f"data has dtype {data.dtype}; pass uint8 blocks, float32, float16 or bfloat16")
    form = find(PLAIN[data.dtype])
    if quant is not None and find(quant) != form:
        raise TypeError(
            f"data has dtype {data.dtype} but quant is {quant!r}; pass uint8 blocks, or quant {form.name!r}"
        )
    return data.contiguous().view(torch.uint8), form


def check_row_bytes(data: Tensor, form: QuantFormat, dimension: str, columns: int) -> None:
    """Check that a row of ``data`` holds ``columns`` elements.

    Raises:
        ValueError: It does not, or ``columns`` is no whole number of blocks.
    """
    if columns % form.block_elements:
        raise ValueError(
            f"{dimension} is {columns}, no multiple of {form.name}'s block of {form.block_elements} elements; "
            "the tensor cannot have this type"
        )
    expected = columns // form.block_elements * form.block_bytes
    if data.shape[-1] != expected:
        raise ValueError(
            f"data has {data.shape[-1]} bytes a row; {dimension} {columns} in {form.name} takes {expected}: "
            "check the tensor's type and shape"
        )


def check_size(name: str, size: int) -> None:
    """Refuse a size that is no positive int.

    Raises:
        TypeError: ``size`` is no int.
        ValueError: ``size`` is below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} is {size!r}; pass an int")
    if size < 1:
        raise ValueError(f"{name} is {size}; pass 1 or more")


def check_ranks(tp_rank: int, tp_size: int) -> None:
    """Refuse a rank outside its group.

    Raises:
        TypeError: One of them is no int.
        ValueError: ``tp_size`` is below 1, or ``tp_rank`` not in 0 ... tp_size - 1.
    """
    check_size("tp_size", tp_size)
    if isinstance(tp_rank, bool) or not isinstance(tp_rank, int):
        raise TypeError(f"tp_rank is {tp_rank!r}; pass an int")
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank is {tp_rank}; pass 0 to {tp_size - 1} for tp_size {tp_size}")


def check_choice(name: str, value: str, accepted: Sequence[str]) -> None:
    """Refuse a value that is not one of the accepted words.

    Raises:
        ValueError: ``value`` is not in ``accepted``.
    """
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; pass one of {', '.join(map(repr, accepted))}")
