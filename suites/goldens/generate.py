"""Make the golden tensors with Hugging Face transformers' own attention modules, or check the stored ones.

    python -m mla_conformance.suites.goldens.generate --check    (or --write)

`REQUIRED_ENVIRONMENT` has to be set beforehand, so that every x86 CPU gives the same bits: the plain C++
code path of ATen, the same code path of MKL on every brand of CPU, the plain variants of glibc's exp, sin and
pow, one thread, and no working folder on `sys.path` (a folder `kernels` there would be taken for Hugging
Face's package of that name).

The modules run unchanged in float64, twice. As shipped they compute norms, softmax, cos and sin in float32
whatever their dtype; `output_as_shipped` is that run. In the other run, requests for float32 are answered
with float64, so that the same code gives a result sharp enough to compare with at 1e-12.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mla_conformance.suites.goldens import FOLDER, PROVENANCE, GoldenError, load
from mla_conformance.suites.goldens.comparison import describe_differences

REQUIRED_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}
BATCH, TOKENS = 2, 9
VERSION_KEYS = ("torch", "transformers")

# No two sizes are equal, and none is the sum of two others that are joined anywhere in the layer.
SIZES = {
    "hidden_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "num_hidden_layers": 1,
}
# DeepSeek-V3's own scaling but for the two mscale fields, which it sets equal and which are told apart here.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


@dataclass(frozen=True)
class Case:
    """One golden: which module makes it, from which seed, and how its config differs from `SIZES`."""

    name: str
    model: str
    prefix: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def generator(self) -> str:
        """Return the import path of the module class that makes this golden."""
        return f"transformers.models.{self.model}.modeling_{self.model}.{self.prefix}Attention"


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES = (
    Case(
        "deepseek_v3_plain",
        "deepseek_v3",
        "DeepseekV3",
        seed=101,
        options={"rope_interleave": False, "rope_parameters": PLAIN_ROPE},
    ),
    Case(
        "deepseek_v3_yarn",
        "deepseek_v3",
        "DeepseekV3",
        seed=102,
        options={"rope_interleave": True, "rope_parameters": YARN, "max_position_embeddings": 163840},
    ),
    Case(
        "deepseek_v3_no_q_lora",
        "deepseek_v3",
        "DeepseekV3",
        seed=103,
        options={"q_lora_rank": None, "rope_interleave": True, "rope_parameters": PLAIN_ROPE},
    ),
    Case(
        "glm_moe_dsa",
        "glm_moe_dsa",
        "GlmMoeDsa",
        seed=104,
        options={
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            # At least as many as tokens, so that sparse attention selects all of them and is dense attention.
            "index_topk": 2 * TOKENS,
            "index_n_heads": 2,
            "index_head_dim": 14,
        },
    ),
)


class Float32AsFloat64(TorchFunctionMode):
    """Answers every request for float32 with float64: dtype arguments and `Tensor.float()`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Pass the call on with its dtypes widened."""
        if func is torch.Tensor.float:
            return args[0].double()
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*widened, **named)


def generate(case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run the third-party module of one case and return its tensors and its provenance."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    modeling = importlib.import_module(case.generator.rpartition(".")[0])
    config_class = getattr(transformers, f"{case.prefix}Config")
    config = config_class(**{**SIZES, **case.options}, attn_implementation="eager")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    rng = torch.Generator().manual_seed(case.seed)
    hidden_states = _draw((BATCH, TOKENS, config.hidden_size), rng, largest=2.0)
    attention = getattr(modeling, f"{case.prefix}Attention")(config, layer_idx=0).double().eval()
    for name, parameter in sorted(attention.named_parameters()):
        parameter.data = _draw_weight(name, parameter.shape, rng)

    def run(precision: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        before_o_proj: list[Tensor] = []
        hook = attention.o_proj.register_forward_pre_hook(lambda _, args: before_o_proj.append(args[0]))
        with torch.no_grad(), precision:
            positions = torch.arange(TOKENS)[None].expand(BATCH, -1)
            rotary = getattr(modeling, f"{case.prefix}RotaryEmbedding")(config)
            output = attention(
                hidden_states=hidden_states,
                position_embeddings=rotary(hidden_states, positions),
                attention_mask=_causal_mask(),
                position_ids=positions,
            )[0]
        hook.remove()
        return output, before_o_proj[0].view(BATCH, TOKENS, config.num_attention_heads, config.v_head_dim)

    output, attention_output = run(Float32AsFloat64())
    output_as_shipped, _ = run(nullcontext())
    tensors = {
        "hidden_states": hidden_states,
        "attention_output": attention_output,
        "output": output,
        "output_as_shipped": output_as_shipped,
        **{f"weights.{name}": parameter.data for name, parameter in attention.named_parameters()},
    }
    settings = {**SIZES, **case.options, "norm_eps": attention.kv_a_layernorm.variance_epsilon}
    provenance = {
        "generator": case.generator,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "seed": case.seed,
        "config": settings,
    }
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, provenance


def to_bytes(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> bytes:
    """Serialise one golden. One metadata entry only: safetensors writes several in random order."""
    return tensors_to_bytes(tensors, metadata={"provenance": json.dumps(provenance, sort_keys=True)})


def differences(case: Case) -> list[str]:
    """Regenerate one golden in memory and describe every way in which the stored file differs, bit by bit."""
    try:
        stored, stored_provenance = load(case.name)
    except GoldenError as error:
        return [str(error)]
    tensors, provenance = generate(case)
    fresh = tensors_from_bytes(to_bytes(tensors, provenance))
    return describe_differences(stored, stored_provenance, fresh, provenance, VERSION_KEYS)


def write_all() -> None:
    """Replace the stored goldens of this module and their entries in `provenance.toml`."""
    sections = ["# What made each golden; load() refuses a file whose sha256 differs.\n"]
    made_here = {case.name for case in CASES}
    others = tomllib.loads(PROVENANCE.read_text(encoding="utf-8")) if PROVENANCE.is_file() else {}
    for case in CASES:
        tensors, provenance = generate(case)
        content = to_bytes(tensors, provenance)
        (FOLDER / f"{case.name}.safetensors").write_bytes(content)
        entries = {key: value for key, value in provenance.items() if key != "config"}
        entries["sha256"] = hashlib.sha256(content).hexdigest()
        sections.append(_section(case.name, entries))
    sections += [_section(name, entries) for name, entries in others.items() if name not in made_here]
    PROVENANCE.write_text("\n".join(sections), encoding="utf-8")


def _section(name: str, entries: dict[str, Any]) -> str:
    """Return one section of `provenance.toml`. A JSON string or integer is a TOML one too."""
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]) + "\n"


def _draw(shape: Iterable[int], rng: torch.Generator, *, largest: float) -> Tensor:
    """Draw multiples of 2^-16 in (-1, 1), scaled: integers are the same on every machine, normals are not."""
    return torch.randint(-(2**16) + 1, 2**16, tuple(shape), generator=rng).double() / 2**16 * largest


def _draw_weight(name: str, shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Draw norm weights around 1, and matrices that keep the size of what they multiply."""
    if len(shape) == 1:
        return 1.0 + _draw(shape, rng, largest=0.5)
    # Query projections get larger weights, or softmax would be near uniform and hide mistakes in the scores.
    gain = 4.0 if name in ("q_b_proj.weight", "q_proj.weight") else 1.0
    return _draw(shape, rng, largest=gain * 2.0 ** -round(0.5 * (shape[1] - 1).bit_length()))


def _causal_mask() -> Tensor:
    """Return the additive mask [BATCH, 1, TOKENS, TOKENS] that transformers builds for eager attention."""
    lowest = torch.finfo(torch.float64).min
    mask = torch.full((TOKENS, TOKENS), lowest, dtype=torch.float64).triu(diagonal=1)
    return mask[None, None].expand(BATCH, 1, -1, -1)


def main() -> int:
    """Return 0 if all is well, 1 if a golden differs, 2 if the environment is not the required one."""
    parser = argparse.ArgumentParser(description="Make or check the golden tensors.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare the stored goldens with fresh ones")
    action.add_argument("--write", action="store_true", help="replace the stored goldens")
    arguments = parser.parse_args()

    wrong = {k: v for k, v in REQUIRED_ENVIRONMENT.items() if os.environ.get(k) != v}
    if wrong:
        settings = " ".join(f"{key}={value}" for key, value in wrong.items())
        print(f"set this before the start, or the bits depend on the CPU: {settings}", file=sys.stderr)
        return 2
    if arguments.write:
        write_all()
        return 0
    found = [f"{case.name}.safetensors: {text}" for case in CASES for text in differences(case)]
    for line in found:
        print(line)
    print(f"{len(CASES)} goldens checked, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
