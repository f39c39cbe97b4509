"""The README's commands are those that CI runs, and its GGUF example runs as written."""

from pathlib import Path

import pytest
import torch

from mla_conformance.reference.gguf import dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, matmul_bound
from mla_conformance.suites.gguf.writing import TensorSpec, write
from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.lanes.interpreter import Lane
from mla_conformance.suites.selfcheck.conftest import ROOT
from mla_conformance.suites.selfcheck.readme import code_blocks, example_with


def test_ci_runs_the_commands_of_the_readme_as_written() -> None:
    """Every command of ``.ci/run`` stands in a code block of the README, word for word, and there are two."""
    documented = {line for block in code_blocks() for line in block.splitlines()}
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in script if "tox run" in line]
    assert len(commands) == 2
    assert set(commands) <= documented


def test_the_gguf_example_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small file with the tensors that it names, the fused layer gives [q_a | kv_a]."""
    example = example_with("open_gguf(")
    generator = torch.Generator().manual_seed(0)
    shards = {"attn_q_a": ("Q4_K", 48), "attn_kv_a_mqa": ("Q8_0", 16)}
    data = {name: blocks.draw(quant, rows, 256, "moderate", generator) for name, (quant, rows) in shards.items()}
    write(
        tmp_path / "model.gguf",
        {"general.architecture": "deepseek2"},
        [
            TensorSpec(f"blk.0.{name}.weight", quant, (rows, 256), data[name].numpy().tobytes())
            for name, (quant, rows) in shards.items()
        ],
    )
    monkeypatch.chdir(tmp_path)
    x = torch.randn(3, 256, generator=generator)
    names = {"x": x, "data": data["attn_q_a"], "torch": torch}
    with Lane().running():
        exec(compile(example, "README.md", "exec"), names)
    weight = torch.cat([dequantize(data[name], quant) for name, (quant, _) in shards.items()])
    bound = matmul_bound(x.double(), weight.double(), MatmulArithmetic("float32", "float32", "float32"))
    assert ((names["y"].double() - x.double() @ weight.double().T).abs() <= bound.out).all()
