"""The adapters of shipped GGUF code: right where that code is right, and its known faults show, each at its stage."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.reference.gguf import dequantize
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.errors import NoResult
from mla_conformance.suites.harness.shipped import gguf_plugin, vllm_0_16, vllm_layers
from mla_conformance.suites.harness.shipped.vllm_layers import Linear, ShippedError

if any(importlib.util.find_spec(name) is None for name in ("vllm", "vllm_gguf_plugin")):
    pytest.skip("vllm and vllm-gguf-plugin are not installed", allow_module_level=True)

COLUMNS = 512
TOKENS = 3
ROUNDED_ONCE = 2.0**-23
"""Relative: float32 has half of it, float64 sums add next to nothing."""
BOTH = [
    pytest.param(gguf_plugin, id="plugin"),
    pytest.param(vllm_0_16, id="vllm-0.16", marks=pytest.mark.skipif(bool(vllm_0_16.available()), reason="not here")),
]
INTERPRETED = """
import torch
from mla_conformance.reference.gguf import dequantize
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.shipped import gguf_plugin
data = blocks.draw("Q4_K", 2, 256, "moderate", torch.Generator().manual_seed(0))
x = torch.eye(256)[:3]
with gguf_plugin.on_cpu():
    weight = gguf_plugin.dequantize(data, "Q4_K", 256, torch.float32)
    product = gguf_plugin.matmul(x, data, "Q4_K")
assert torch.equal(weight, dequantize(data, "Q4_K"))
torch.testing.assert_close(product, weight.T[:3], rtol=1e-5, atol=1e-6)
print("equal")
"""


def draw(rows: Sequence[int], quants: Sequence[str], columns: int = COLUMNS) -> list[Tensor]:
    """Blocks of each shard, all different."""
    generator = torch.Generator().manual_seed(1)
    pairs = zip(rows, quants, strict=True)
    return [blocks.draw(quant, count, columns, "moderate", generator) for count, quant in pairs]


def x(columns: int = COLUMNS) -> Tensor:
    """Activations."""
    return torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(2))


def products(shards: Sequence[Tensor], quants: Sequence[str]) -> list[Tensor]:
    """Float64 products of :func:`x` with each whole shard."""
    return [x().double() @ dequantize(shard, quant).double().T for shard, quant in zip(shards, quants, strict=True)]


def same(result: Tensor, expected: Tensor) -> bool:
    """Whether ``result`` is ``expected`` rounded once."""
    return result.shape == expected.shape and torch.allclose(
        result.double(), expected, rtol=ROUNDED_ONCE, atol=ROUNDED_ONCE**2
    )


def refusal(run: ModuleType, layer: Linear, shards: dict[Any, Tensor], width: int = COLUMNS) -> tuple[str, str]:
    """Stage and class of the shipped exception."""
    with pytest.raises(ShippedError) as caught:
        run.linear(layer, shards, x(width))
    return caught.value.stage, caught.value.kind


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("kind", ["merged", "qkv", "column", "row"])
def test_whole_layer_multiplies_by_every_shard(run: ModuleType, kind: Any) -> None:
    """At TP 1 and declared order both releases are right in every layer."""
    rows = {"merged": (48, 16), "qkv": (64, 32, 32)}.get(kind, (48,))
    quants = ("Q8_0", "Q4_K", "Q6_K")[: len(rows)]
    ids = {"merged": [0, 1], "qkv": ["q", "k", "v"]}.get(kind, [None])
    shards = draw(rows, quants)
    layer = Linear(kind, COLUMNS, rows, quants, qkv=(4, 2, 16) if kind == "qkv" else None)
    result = run.linear(layer, dict(zip(ids, shards, strict=True)), x())
    assert same(result, torch.cat(products(shards, quants), 1))


@pytest.mark.parametrize("quants", [("Q8_0",) * 3, ("Q4_K", "Q8_0", "IQ4_XS")], ids=["same", "mixed"])
def test_plugin_concatenates_in_declared_order_whatever_arrives_first(quants: tuple[str, ...]) -> None:
    """Plugin 0.0.5 sorts shards by id, in a replicated layer at TP 4 too."""
    rows = (48, 16, 32)
    shards = draw(rows, quants)
    layer = Linear("merged", COLUMNS, rows, quants, tp_size=4, tp_rank=3, disable_tp=True)
    for order in itertools.permutations(range(3)):
        result = gguf_plugin.linear(layer, dict(enumerate(shards)), x(), order)
        assert same(result, torch.cat(products(shards, quants), 1)), order


@pytest.mark.skipif(bool(vllm_0_16.available()), reason="vLLM 0.16.0 is not here")
@pytest.mark.parametrize("quants", [("Q8_0", "Q8_0"), ("Q8_0", "Q4_K")], ids=["same", "mixed"])
def test_vllm_0_16_concatenates_in_order_of_arrival(quants: tuple[str, ...]) -> None:
    """The story: kv_a loaded before q_a makes fused_qkv_a_proj return [kv_a | q_a] (vllm-project/vllm#41057)."""
    shards = draw((48, 16), quants)
    q_a, kv_a = products(shards, quants)
    layer = Linear("merged", COLUMNS, (48, 16), quants, disable_tp=True)
    assert same(vllm_0_16.linear(layer, dict(enumerate(shards)), x(), (0, 1)), torch.cat([q_a, kv_a], 1))
    assert same(vllm_0_16.linear(layer, dict(enumerate(shards)), x(), (1, 0)), torch.cat([kv_a, q_a], 1))


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_fused_layers_hold_rank_0s_rows_under_the_plugin_and_the_ranks_own_under_0_16(
    run: ModuleType, rank: int, kind: Any
) -> None:
    """vllm-project/vllm-gguf-plugin#103: every rank of a plugin layer gets the first slice."""
    rows = (64, 32, 32) if kind == "qkv" else (64, 32)
    quants = ("Q8_0",) * len(rows)
    shards = draw(rows, quants)
    layer = Linear(kind, COLUMNS, rows, quants, tp_size=2, tp_rank=rank, qkv=(4, 2, 16) if kind == "qkv" else None)
    ids = "qkv" if kind == "qkv" else (0, 1)
    result = run.linear(layer, dict(zip(ids, shards, strict=True)), x())
    held = 0 if run is gguf_plugin else rank
    assert same(result, torch.cat([whole.chunk(2, 1)[held] for whole in products(shards, quants)], 1))


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("rank", range(4))
def test_column_and_row_layers_hold_their_ranks_part(run: ModuleType, rank: int) -> None:
    """Column- and row-parallel layers are right in both releases."""
    (shard,) = draw((64,), ("Q8_0",))
    column = run.linear(Linear("column", COLUMNS, (64,), ("Q8_0",), 4, rank), {None: shard}, x())
    assert same(column, products([shard], ["Q8_0"])[0].chunk(4, 1)[rank])
    mine = x().chunk(4, 1)[rank].contiguous()
    row = run.linear(Linear("row", COLUMNS, (64,), ("Q8_0",), 4, rank), {None: shard}, mine)
    assert same(row, mine.double() @ dequantize(shard, "Q8_0").double().chunk(4, 1)[rank].T)


def test_plugin_slices_column_and_row_layers_that_disable_tp() -> None:
    """A known fault: the plugin asks the global group, not the layer."""
    (shard,) = draw((64,), ("Q8_0",))
    layer = Linear("column", COLUMNS, (64,), ("Q8_0",), 2, 1, disable_tp=True)
    assert same(gguf_plugin.linear(layer, {None: shard}, x()), products([shard], ["Q8_0"])[0].chunk(2, 1)[1])
    row = Linear("row", COLUMNS, (64,), ("Q8_0",), 2, 1, disable_tp=True)
    assert refusal(gguf_plugin, row, {None: shard}) == ("apply", "RuntimeError")


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize(("quant", "columns", "degree"), [("Q8_0", 256, 16), ("Q4_K", 2816, 2)])
def test_row_layer_cut_inside_a_block_loads_and_fails_at_apply(
    run: ModuleType, quant: str, columns: int, degree: int
) -> None:
    """A known fault: no loader looks at the block size."""
    (shard,) = draw((8,), (quant,), columns)
    layer = Linear("row", columns, (8,), (quant,), degree, 1)
    assert refusal(run, layer, {None: shard}, columns // degree) == ("apply", "ValueError")


@pytest.mark.parametrize(
    ("layer", "ids", "outcome"),
    [
        (Linear("replicated", COLUMNS, (64,), ("Q8_0",)), [None], ("load", "AssertionError")),
        (Linear("merged", COLUMNS, (64, 64), ("Q8_0", "F16")), [0, 1], ("make", "ValueError")),
        (Linear("merged", COLUMNS, (64, 64), ("Q8_0", "Q8_0")), [0], ("apply", "ValueError")),
        (Linear("merged", COLUMNS, (64, 64), ("Q8_0", "Q8_0")), [(0, 1)], ("load", "AttributeError")),
        (Linear("column", COLUMNS, (64,), ("TQ2_0",)), [None], ("load", "ValueError")),
    ],
    ids=["replicated", "quantised and F16", "one shard missing", "tuple id", "type unknown to it"],
)
def test_plugin_refuses_at_this_stage(layer: Linear, ids: list[Any], outcome: tuple[str, str]) -> None:
    """Where each refusal arises decides whether a requirement is broken: a missing shard is found at apply only."""
    shards = {shard: draw((64,), (layer.quant(shard),))[0] for shard in ids}
    assert refusal(gguf_plugin, layer, shards) == outcome


def test_layer_of_plain_shards_is_unquantised_and_ordered() -> None:
    """F16 and F32 shards together go to vLLM's own linear method, whatever their order."""
    quants = ("F16", "F32")
    shards = draw((48, 16), quants)
    layer = Linear("merged", COLUMNS, (48, 16), quants)
    result = gguf_plugin.linear(layer, dict(enumerate(shards)), x(), (1, 0))
    expected = torch.cat(products(shards, quants), 1)
    pairs = zip(shards, quants, strict=True)
    scale = torch.cat([x().abs() @ dequantize(shard, quant).abs().T for shard, quant in pairs], 1)
    assert ((result - expected).abs() <= COLUMNS * ROUNDED_ONCE * scale).all()


def test_kv_b_is_absorbed_by_vllm() -> None:
    """A fused attn_kv_b goes through a real layer and MLAAttention without a bit lost."""
    heads, nope, v, latent = 3, 32, 64, 256
    (shard,) = draw((heads * (nope + v),), ("Q4_K",), latent)
    w_uk_t, w_uv = gguf_plugin.absorbed(shard, "Q4_K", heads, nope, v, latent)
    per_head = dequantize(shard, "Q4_K").view(heads, nope + v, latent)
    assert torch.equal(w_uk_t, per_head[:, :nope])
    assert torch.equal(w_uv, per_head[:, nope:].transpose(1, 2))


@pytest.mark.parametrize(
    ("model_type", "config", "complaint"),
    [
        ("glm_moe_dsa", {"num_hidden_layers": 1}, "Unknown gguf model_type"),
        ("deepseek_v2", {"num_hidden_layers": 1, "first_k_dense_replace": 0}, "Failed to map GGUF parameters"),
        ("deepseek_v3", {"num_hidden_layers": 1, "first_k_dense_replace": 0}, "Failed to map GGUF parameters"),
    ],
)
def test_plugin_maps_no_mla_model_with_experts(model_type: str, config: dict[str, int], complaint: str) -> None:
    """The plugin's name maps end before any weight is read."""
    with pytest.raises(RuntimeError, match=complaint):
        gguf_plugin.name_map(model_type, config)


def test_plugin_drops_split_kv_b_without_a_word(tmp_path: Path) -> None:
    """A dense deepseek2 map has attn_kv_b only, and the reader passes attn_k_b and attn_v_b over."""
    names = gguf_plugin.name_map("deepseek_v3", {"num_hidden_layers": 1})
    file = tmp_path / "split.gguf"
    writer = gguf.GGUFWriter(file, "deepseek2")
    for name, shape in {"attn_k_b": (4, 32, 32), "attn_v_b": (4, 32, 32), "attn_norm": (64,)}.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "blk.0.attn_kv_b.weight" in names
    assert [name for name, _ in gguf_plugin.read(file, names)] == ["model.layers.0.input_layernorm.weight"]


def test_plugins_own_kernels_run_in_the_interpreter() -> None:
    """``kernel="shipped"`` on the CPU is the plugin's Triton code."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr


def test_cuda_kernels_are_refused_for_tensors_on_the_cpu() -> None:
    """A backend that cannot run is refused by name."""
    with pytest.raises(ValueError, match="backend='cuda': the tensors are on cpu"):
        gguf_plugin.dequantize(draw((4,), ("Q8_0",))[0], "Q8_0", COLUMNS, torch.float32, "cuda")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason says which file, and that no release is known for it."""
    monkeypatch.setenv(gguf_plugin.LIBRARY_VARIABLE, str(tmp_path / "_C_gguf.abi3.so"))
    gguf_plugin.cuda_library.cache_clear()
    reason = gguf_plugin.cuda_library()
    gguf_plugin.cuda_library.cache_clear()
    assert reason is not None
    assert "_C_gguf.abi3.so of an unknown release" in reason


def test_supported_types_are_the_plugins_twenty() -> None:
    """Its own tables decide what is asked of it."""
    assert len(gguf_plugin.supported()) == 20
    assert "MXFP4" not in gguf_plugin.supported()


def test_inconsistent_layer_is_refused() -> None:
    """What is no layer is a ValueError of the adapter, not of shipped code."""
    with pytest.raises(ValueError, match="one type a shard"):
        vllm_layers.make(gguf_plugin.method(), Linear("column", COLUMNS, (8, 8), ("Q8_0", "Q8_0")))
    with pytest.raises(ValueError, match="heads"):
        vllm_layers.make(gguf_plugin.method(), Linear("qkv", COLUMNS, (8, 8, 8), ("Q8_0",) * 3, qkv=(4, 2, 16)))


def test_absent_vllm_0_16_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason says what to set, or what the folder lacks."""
    monkeypatch.delenv(vllm_0_16.FOLDER_VARIABLE, raising=False)
    assert "is not set" in str(vllm_0_16.available())
    monkeypatch.setenv(vllm_0_16.FOLDER_VARIABLE, str(tmp_path))
    assert "holds no vllm/__init__.py" in str(vllm_0_16.available())
    with pytest.raises(ValueError, match=r"holds no vllm/__init__\.py"):
        vllm_0_16.linear(Linear("column", COLUMNS, (8,), ("Q8_0",)), {None: torch.zeros(0)}, x())


def test_broken_vllm_0_16_gives_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker whose vLLM cannot be imported says so."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('planted')\n")
    (tmp_path / f"vllm-{vllm_0_16.VERSION}.dist-info").mkdir()
    monkeypatch.setenv(vllm_0_16.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(NoResult, match="OSError: planted"):
        vllm_0_16.linear(Linear("column", COLUMNS, (8,), ("Q8_0",)), {None: draw((8,), ("Q8_0",))[0]}, x())
