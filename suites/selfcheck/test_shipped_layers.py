"""The instruments around shipped GGUF code. The code itself is judged by suites/gguf, with its faults in the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.reference.gguf import dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, matmul_bound, matmul_oracle
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.errors import NoResult
from mla_conformance.suites.harness.shipped import gguf_plugin, vllm_0_16, vllm_layers
from mla_conformance.suites.harness.shipped.vllm_layers import Linear

COLUMNS = 512
TOKENS = 3
FLOAT32 = MatmulArithmetic("float32", "float32", "float32")
INTERPRETED = """
import torch
from mla_conformance.reference.gguf import dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, matmul_bound
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.capture import posing_as_cuda
from mla_conformance.suites.harness.shipped import gguf_plugin
data = blocks.draw("Q4_K", 2, 256, "moderate", torch.Generator().manual_seed(0))
x = torch.eye(256)[:3]
with posing_as_cuda():
    weight = gguf_plugin.dequantize(data, "Q4_K", 256, torch.float32)
    product = gguf_plugin.matmul(x, data, "Q4_K")
assert torch.equal(weight, dequantize(data, "Q4_K"))
bound = matmul_bound(x.double(), weight.double(), MatmulArithmetic("float32", "float32", "float32")).out
assert ((product.double() - weight.T[:3].double()).abs() <= bound).all()
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


def test_layer_of_plain_shards_is_unquantised_and_ordered() -> None:
    """F16 and F32 shards together go to vLLM's own linear method, whatever their order."""
    quants = ("F16", "F32")
    shards = draw((48, 16), quants)
    layer = Linear("merged", COLUMNS, (48, 16), quants)
    result = gguf_plugin.linear(layer, dict(enumerate(shards)), x(), (1, 0))
    weight = torch.cat([dequantize(shard, quant) for shard, quant in zip(shards, quants, strict=True)]).double()
    error = (result.double() - matmul_oracle(x(), weight)).abs()
    assert (error <= matmul_bound(x().double(), weight, FLOAT32).out).all()


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
