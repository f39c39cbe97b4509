"""GGUFLinear against gguf-py: dequantise, slice, concatenate, multiply in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.kernels.gguf import linear
from mla_conformance.kernels.gguf.linear import GGUFLinear
from mla_conformance.kernels.gguf.shards import ShardSpec, qkv_shards
from mla_conformance.reference import fused_linear
from mla_conformance.suites.selfcheck.gguf_weights import BLOCK_32, BLOCK_256, PLAIN, judge_product, weight


@dataclass(frozen=True)
class Layer:
    """A layer of the whole model, how its shards arrive and how it is spread."""

    columns: int
    rows: tuple[int, ...]
    quants: tuple[str, ...]
    order: tuple[int, ...]
    parallel: Any = "replicated"
    tp_size: int = 1
    disable_tp: bool = False
    on_uneven: Any = "error"
    dtype: torch.dtype = torch.float32
    tokens: int = 3


def judge(layer: Layer, kind: type[GGUFLinear] = GGUFLinear, ranks: Sequence[int] | None = None) -> None:
    """Load a layer on some of its ranks (default: first and last) and hold weight and product to gguf-py's."""
    shards = [weight(layer.quants[i], (rows, layer.columns), i) for i, rows in enumerate(layer.rows)]
    specs = [ShardSpec(f"s{i}", n) for i, n in enumerate(layer.rows)]
    for rank in ranks if ranks is not None else sorted({0, layer.tp_size - 1}):
        made = kind(
            layer.columns,
            specs,
            parallel=layer.parallel,
            tp_rank=rank,
            tp_size=layer.tp_size,
            disable_tp=layer.disable_tp,
            on_uneven=layer.on_uneven,
        )
        for index in layer.order:
            made.load_shard(shards[index][0], layer.quants[index], index if rank % 2 else f"s{index}")
        made.finish_loading()
        parts = [values for _, values in shards]
        if not layer.disable_tp and layer.parallel != "replicated":
            cut = fused_linear.slice_rows if layer.parallel == "column" else fused_linear.slice_columns
            parts = [cut(part, rank, layer.tp_size) for part in parts]
        expected = fused_linear.fuse(parts)
        torch.testing.assert_close(made.dequantized_weight(), expected, rtol=0, atol=0)
        x = torch.randn(layer.tokens, expected.shape[1], generator=torch.Generator().manual_seed(3)).to(layer.dtype)
        judge_product(made(x), x, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_arrival_order_gives_the_declared_order(count: int) -> None:
    """Types equal at the ends, mixed and unquantised between, widths all different."""
    for order in itertools.permutations(range(count)):
        quants = ("Q8_0", "Q8_0", "F16", "Q4_0")[:count]
        judge(Layer(64, (3, 5, 2, 4)[:count], quants, order))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Up to four shards of any types, in any order, spread in any way that cuts no block."""
    count = draw(st.integers(1, 4))
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    parallel = draw(st.sampled_from(["column", "row", "replicated"]))
    large = draw(st.booleans())
    quants = st.sampled_from(PLAIN + BLOCK_32 + (BLOCK_256 if large else ()))
    parts = tp_size if parallel == "row" else 1
    step = tp_size if parallel == "column" else 1
    return Layer(
        columns=(256 if large else 32) * parts * draw(st.integers(1, 2)),
        rows=tuple(step * n for n in draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))),
        quants=tuple(draw(st.lists(quants, min_size=count, max_size=count))),
        order=tuple(draw(st.permutations(range(count)))),
        parallel=parallel,
        tp_size=tp_size,
        disable_tp=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        tokens=draw(st.sampled_from([1, 2, 17])),
    )


@given(layers(), st.integers(0, 7))
def test_any_layer_holds_its_ranks_part_of_every_shard(layer: Layer, rank: int) -> None:
    """Weight bit for bit, product within the float32 sum's bound."""
    judge(layer, ranks=[rank % layer.tp_size])


REAL = {
    "GLM-5 fused_qkv_a": Layer(6144, (5, 3), ("Q4_K", "Q8_0"), (1, 0), "column", 8, disable_tp=True),
    "GLM-4.7-Flash fused_qkv_a": Layer(2048, (4, 3), ("Q5_K", "Q5_K"), (1, 0), "replicated", 4),
    "DeepSeek-V3 fused_qkv_a": Layer(7168, (3, 2), ("Q6_K", "BF16"), (1, 0), "column", 8, disable_tp=True),
    "Kimi-K2 q_b": Layer(1536, (16,), ("Q4_K",), (0,), "column", 8),
    "GLM-5 gate_up": Layer(6144, (8, 8), ("Q4_K", "Q6_K"), (1, 0), "column", 8),
    "V2-Lite gate_up": Layer(2048, (8, 8), ("Q4_K", "Q4_K"), (1, 0), "column", 4),
    "GLM-5 o_proj": Layer(16384, (3,), ("Q4_K",), (0,), "row", 8),
    "GLM-5 dense down": Layer(12288, (3,), ("Q6_K",), (0,), "row", 8),
    "DeepSeek-V3 dense down": Layer(18432, (3,), ("Q4_K",), (0,), "row", 8),
    "GLM-5 indexer wq_b": Layer(2048, (8,), ("Q8_0",), (0,), "replicated", 8),
}


@pytest.mark.parametrize("name", REAL)
def test_layers_of_real_models(name: str) -> None:
    """Real widths and degrees, few rows."""
    judge(replace(REAL[name], tokens=1), ranks=[REAL[name].tp_size - 1])


def test_a_run_of_equal_types_is_one_product_into_the_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gets the buffer itself and a view of the result: nothing is copied on the way."""
    made = GGUFLinear(64, [ShardSpec(name, 2) for name in "abcd"])
    for name, quant in zip("dcba", ("Q8_0", "F16", "Q8_0", "Q8_0"), strict=True):
        made.load_shard(weight(quant, (2, 64), ord(name))[0], quant, name)
    made.finish_loading()
    calls = []

    def spy(x: Tensor, data: Tensor, quant: str, *, out: Tensor) -> None:
        calls.append((quant, data.shape[0], data.data_ptr(), out.untyped_storage().data_ptr(), out.storage_offset()))

    monkeypatch.setattr(linear, "matmul", spy)
    whole = made(torch.zeros(1, 64)).untyped_storage().data_ptr()
    buffers = [buffer.data_ptr() for buffer in made.buffers()]
    places = [("Q8_0", 4, buffers[0], whole, 0), ("F16", 2, buffers[1], whole, 4), ("Q8_0", 2, buffers[2], whole, 6)]
    assert calls == places


UNEVEN = {
    "GLM-4.7-Flash o_proj": Layer(5120, (2,), ("Q4_K",), (0,), "row", 8),
    "V2-Lite shared down": Layer(2816, (2,), ("Q4_K",), (0,), "row", 2),
    "V2-Lite dense down": Layer(10944, (2,), ("Q8_0",), (0,), "row", 4),
    "merged, one shard cut": Layer(128, (2, 3), ("F16", "Q8_0"), (1, 0), "row", 8),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_cut_inside_a_block_is_refused_or_exact(name: str) -> None:
    """The error says dimension, block and degree; the fallback is bit-equal and says what it holds."""
    layer = UNEVEN[name]
    block = 256 if layer.quants[-1] == "Q4_K" else 32
    message = rf"columns is {layer.columns}.*tp_size of {layer.tp_size}.*{layer.quants[-1]}'s blocks of {block}\b"
    with pytest.raises(ValueError, match=message):
        judge(layer)
    judge(replace(layer, on_uneven="dequantize"), ranks=range(min(2, layer.tp_size)))


def test_the_fallback_is_reported() -> None:
    """Loaded as Q8_0, held as float32 of half the columns; the shard beside it not loaded."""
    made = GGUFLinear(96, [ShardSpec("a", 2), ShardSpec("b", 3)], parallel="row", tp_size=2, on_uneven="dequantize")
    made.load_shard(*weight("Q8_0", (3, 96), 0)[:1], "Q8_0", "b")
    assert made.describe() == [("a", None, None, 2, 48, 0), ("b", "Q8_0", "F32", 3, 48, 3 * 48 * 4)]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_ranks_share_key_and_value_heads_where_these_are_fewer(tp_size: int, kv_heads: int) -> None:
    """Neighbouring ranks hold the same head; loaded shard by shard or fused."""
    specs = qkv_shards(8, kv_heads, 4, v_head_dim=2)
    data = [weight("Q8_0", (spec.rows, 32), i) for i, spec in enumerate(specs)]
    for rank in range(tp_size):
        heads = ((8, 4), (kv_heads, 4), (kv_heads, 2))
        expected = fused_linear.fuse([fused_linear.slice_heads(data[i][1], rank, tp_size, *heads[i]) for i in range(3)])
        apart, fused = (GGUFLinear(32, specs, parallel="column", tp_rank=rank, tp_size=tp_size) for _ in range(2))
        for index in (2, 0, 1):
            apart.load_shard(data[index][0], "Q8_0", "qkv"[index])
        fused.load_shard(torch.cat([part for part, _ in data]), "Q8_0")
        for made in (apart, fused):
            made.finish_loading()
            torch.testing.assert_close(made.dequantized_weight(), expected, rtol=0, atol=0)


class ByArrival(GGUFLinear):
    """Concatenates as loaded, as vLLM 0.16 does."""

    def _order(self) -> list[int]:
        return list(self._states)


class RankZero(GGUFLinear):
    """Loads the first rank's part on every rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"tp_rank": 0}))


class AlwaysSliced(GGUFLinear):
    """Pays no heed to disable_tp."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable_tp": False}))


class CutsBytes(GGUFLinear):
    """Divides a row's bytes, wherever blocks begin, and reads as many blocks from there as the columns need."""

    def _cut(self, data: Tensor, form: Any, index: int) -> Any:
        first = data.shape[1] * self.rank // self.degree
        size = -(-self.local_columns // form.block_elements) * form.block_bytes
        part = np.resize(data[:, first:].numpy(), (len(data), size))
        values = gguf_dequantize(part, getattr(gguf.GGMLQuantizationType, form.name))[:, : self.local_columns]
        return torch.from_numpy(values.copy()).view(torch.uint8), form._replace(name="F32")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("broken", "layer"),
    [
        (ByArrival, REAL["GLM-4.7-Flash fused_qkv_a"]),
        (ByArrival, Layer(64, (4, 4), ("Q8_0", "Q8_0"), (1, 0))),
        (RankZero, REAL["V2-Lite gate_up"]),
        (RankZero, Layer(512, (3,), ("Q4_K",), (0,), "row", 2)),
        (AlwaysSliced, replace(REAL["V2-Lite gate_up"], disable_tp=True)),
        (AlwaysSliced, Layer(512, (3,), ("Q4_K",), (0,), "row", 2, disable_tp=True)),
        (CutsBytes, replace(UNEVEN["V2-Lite dense down"], on_uneven="dequantize")),
        (CutsBytes, replace(UNEVEN["GLM-4.7-Flash o_proj"], on_uneven="dequantize")),
    ],
)
def test_planted_faults_fail_the_comparison(broken: type[GGUFLinear], layer: Layer) -> None:
    """Each of the known faults gives another weight where the layer itself gives the right one."""
    judge(layer, ranks=[layer.tp_size - 1])
    with pytest.raises(AssertionError):
        judge(layer, broken, ranks=[layer.tp_size - 1])


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_ranks_together_give_the_layer_with_its_bias_once(parallel: Any) -> None:
    """Outputs of a column-parallel layer concatenate, those of a row-parallel layer add; leading dimensions stay."""
    data, values = weight("Q8_0", (8, 128), 5)
    x, bias = torch.randn(2, 3, 128), torch.randn(8)
    parts = []
    for rank in range(4):
        made = GGUFLinear(128, [ShardSpec("w", 8)], parallel=parallel, tp_rank=rank, tp_size=4, bias=True)
        made.load_bias(bias)
        made.load_shard(data, "Q8_0")
        made.finish_loading()
        parts.append(made(x[..., rank * 32 : rank * 32 + 32] if parallel == "row" else x))
    assert made.returns_partial_sum == (parallel == "row")
    whole = torch.stack(parts).sum(0) if parallel == "row" else torch.cat(parts, -1)
    expected = torch.nn.functional.linear(x.double(), values.double(), bias.double())
    magnitude = torch.nn.functional.linear(x.abs().double(), values.abs().double(), bias.abs().double())
    additions = 128 + len(parts)
    assert bool(((whole.double() - expected).abs() <= additions * 2.0**-24 * magnitude).all())
