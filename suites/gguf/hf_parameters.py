"""What transformers says about the real models' parameters, stored as `goldens/hf_parameters.json`.

    python -m mla_conformance.suites.gguf.hf_parameters --check    (or --write)

The model classes are built on the meta device, without data. transformers holds all experts of a layer in two
parameters (`gate_up_proj`: gate's rows, then up's); checkpoints hold each expert's three matrices on their own, as
`load` returns them. Layers with equal parameters are stored once, with the range that they span.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from typing import Any

from mla_conformance.suites.gguf.models import MODELS, Model
from mla_conformance.suites.goldens import FOLDER

GOLDEN = FOLDER / "hf_parameters.json"
Shape = tuple[int, ...]

# Kimi-K2's own modelling code is DeepSeek-V3's.
_CLASSES = {
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "kimi_k2": ("deepseek_v3", "DeepseekV3"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def load(name: str) -> dict[str, Shape]:
    """Return a model's parameters with their shapes from the stored golden, called as in its checkpoint.

    The multi-token predictor is not part of transformers' model classes.
    """
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))["models"][name]
    parameters: dict[str, Shape] = {}
    for parameter, shape in stored["once"].items():
        parameters[parameter] = tuple(shape)
    for run in stored["layers"]:
        for layer in range(run["first"], run["last"] + 1):
            for parameter, shape in run["parameters"].items():
                parameters |= _of_checkpoint(f"model.layers.{layer}.{parameter}", tuple(shape))
    return parameters


def compress(parameters: dict[str, Shape]) -> dict[str, Any]:
    """Store what follows no layer once, and each run of layers with equal parameters once."""
    once: dict[str, list[int]] = {}
    layers: dict[int, dict[str, list[int]]] = {}
    for name, shape in parameters.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            once[name] = list(shape)
        else:
            layers.setdefault(int(found[1]), {})[found[2]] = list(shape)
    runs: list[dict[str, Any]] = []
    for layer in sorted(layers):
        if runs and runs[-1]["last"] == layer - 1 and runs[-1]["parameters"] == layers[layer]:
            runs[-1]["last"] = layer
        else:
            runs.append({"first": layer, "last": layer, "parameters": layers[layer]})
    return {"once": once, "layers": runs}


def generate() -> dict[str, Any]:
    """Ask transformers (5.20 or later) for all models."""
    versions = {package: str(importlib.import_module(package).__version__) for package in ("transformers", "torch")}
    return {
        "provenance": {"generator": "state_dict() of transformers' ...ForCausalLM on the meta device", **versions},
        "models": {name: compress(_ask_transformers(model)) for name, model in MODELS.items()},
    }


def _ask_transformers(model: Model) -> dict[str, Shape]:
    torch = importlib.import_module("torch")
    folder, prefix = _CLASSES[model.config["model_type"]]
    package = f"transformers.models.{folder}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{folder}"), f"{prefix}Config")
    model_class = getattr(importlib.import_module(f"{package}.modeling_{folder}"), f"{prefix}ForCausalLM")
    settings = {key: value for key, value in model.config.items() if key != "model_type"}
    with torch.device("meta"):
        built = model_class(config_class(num_key_value_heads=settings["num_attention_heads"], **settings))
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


def _of_checkpoint(name: str, shape: Shape) -> dict[str, Shape]:
    stack, _, matrix = name.partition(".mlp.experts.")
    if not matrix:
        return {name: shape}
    experts, rows, columns = shape
    if matrix == "gate_up_proj":
        pieces: dict[str, Shape] = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    else:
        pieces = {matrix: (rows, columns)}
    return {
        f"{stack}.mlp.experts.{expert}.{piece}.weight": piece_shape
        for piece, piece_shape in pieces.items()
        for expert in range(experts)
    }


def main() -> int:
    """Write the golden, or tell whether transformers still says what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the stored file")
    action.add_argument("--write", action="store_true", help="write the stored file")
    write = parser.parse_args().write
    generated = generate()
    if write:
        lines = json.dumps(generated, indent=1)
        # Shapes on one line each, so that the file can be read.
        GOLDEN.write_text(re.sub(r"\[\s+([\d,\s]+?)\s+\]", _one_line, lines) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    differing = [name for name in MODELS if stored["models"].get(name) != generated["models"][name]]
    print(f"differ from {GOLDEN.name}: {differing}" if differing else f"{len(MODELS)} models as in {GOLDEN.name}")
    return 1 if differing else 0


def _one_line(found: re.Match[str]) -> str:
    return "[" + ", ".join(found[1].replace(",", " ").split()) + "]"


if __name__ == "__main__":
    sys.exit(main())
