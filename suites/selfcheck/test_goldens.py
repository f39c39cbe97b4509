"""The oracle agrees with Hugging Face's attention layers, and the comparison notices planted faults."""

from __future__ import annotations

import dataclasses
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mla_conformance.reference import attention_layer as layer_module
from mla_conformance.reference.attention_layer import Method, MlaConfig, attention_layer
from mla_conformance.reference.rope import rope_frequencies
from mla_conformance.reference.softmax_scale import YarnScaling, softmax_scale
from mla_conformance.suites import goldens

Weights = dict[str, Tensor]
Fault = Callable[[Weights, MlaConfig], tuple[Weights, MlaConfig]]
NAMES = ["deepseek_v3_no_q_lora", "deepseek_v3_plain", "deepseek_v3_yarn", "glm_moe_dsa"]
ALL_NAMES = sorted([*NAMES, "gguf_quantised"])
METHODS = get_args(Method)


def layer_config(settings: dict[str, Any]) -> MlaConfig:
    """Translate the settings stored in a golden."""
    rope = dict(settings["rope_parameters"])
    theta = rope.pop("rope_theta")
    return MlaConfig(
        num_heads=settings["num_attention_heads"],
        q_lora_rank=settings["q_lora_rank"],
        kv_lora_rank=settings["kv_lora_rank"],
        qk_nope_head_dim=settings["qk_nope_head_dim"],
        qk_rope_head_dim=settings["qk_rope_head_dim"],
        v_head_dim=settings["v_head_dim"],
        rope_theta=theta,
        # GlmMoeDsaAttention has no such setting: it always rotates neighbours.
        rope_interleave=settings.get("rope_interleave", True),
        yarn=YarnScaling(**rope) if rope.pop("rope_type") == "yarn" else None,
        rms_norm_eps=settings["norm_eps"],
    )


def layer_weights(tensors: dict[str, Tensor]) -> Weights:
    """Return the attention weights of a golden, without the indexer's, which selects every token here."""
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    return {name: t for name, t in weights.items() if not name.startswith("indexer.")}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_layer_equals_the_golden(name: str, method: Method) -> None:
    """Every form gives the third party's numbers before and after o_proj, to 1e-12."""
    tensors, metadata = goldens.load(name)

    result = attention_layer(
        tensors["hidden_states"],
        layer_weights(tensors),
        layer_config(metadata["config"]),
        method=method,
    )

    assert relative_error(result.attention, tensors["attention_output"]) < 1e-12
    assert relative_error(result.output, tensors["output"]) < 1e-12
    # As shipped, the third party rounds to float32 about ten times on the way (norms, cos and sin, softmax),
    # each 2^-24; where it rounds scores, the error is that times the score, and scores here stay below 32.
    assert relative_error(result.output, tensors["output_as_shipped"]) < 10 * 32 * 2.0**-24


def rotate_the_other_pairs(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Confuse the two pairings of RoPE."""
    return weights, dataclasses.replace(config, rope_interleave=not config.rope_interleave)


def swap_keys_and_values(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Lay the rows of every head in kv_b_proj out as values first."""
    per_head = weights["kv_b_proj.weight"].reshape(config.num_heads, -1, config.kv_lora_rank)
    swapped = per_head.roll(config.v_head_dim, dims=1).reshape(-1, config.kv_lora_rank)
    return {**weights, "kv_b_proj.weight": swapped}, config


def put_all_keys_before_all_values(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Lay kv_b_proj out by part instead of by head."""
    per_head = weights["kv_b_proj.weight"].reshape(config.num_heads, -1, config.kv_lora_rank)
    keys, values = per_head[:, : config.qk_nope_head_dim], per_head[:, config.qk_nope_head_dim :]
    by_part = torch.cat([keys.flatten(0, 1), values.flatten(0, 1)])
    return {**weights, "kv_b_proj.weight": by_part}, config


def put_rope_before_latent(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Lay kv_a_proj out with the key first."""
    rolled = weights["kv_a_proj_with_mqa.weight"].roll(config.qk_rope_head_dim, dims=0)
    return {**weights, "kv_a_proj_with_mqa.weight": rolled}, config


def forget_latent_norm_weight(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Normalise the latent without its weight."""
    name = "kv_a_layernorm.weight"
    return {**weights, name: torch.ones_like(weights[name])}, config


def take_the_wrong_eps(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Use another epsilon in the norms of attention (GLM-5's model-wide one is 1e-5)."""
    return weights, dataclasses.replace(config, rms_norm_eps=1e-5)


def take_the_wrong_theta(weights: Weights, config: MlaConfig) -> tuple[Weights, MlaConfig]:
    """Use a ten times larger base for the frequencies."""
    return weights, dataclasses.replace(config, rope_theta=10 * config.rope_theta)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fault",
    [
        rotate_the_other_pairs,
        swap_keys_and_values,
        put_all_keys_before_all_values,
        put_rope_before_latent,
        forget_latent_norm_weight,
        take_the_wrong_eps,
        take_the_wrong_theta,
    ],
)
def test_golden_notices_a_planted_fault(fault: Fault, name: str, method: Method) -> None:
    """Every planted fault is far above the tolerance of the comparison, in every golden and every form."""
    tensors, metadata = goldens.load(name)
    weights, config = fault(layer_weights(tensors), layer_config(metadata["config"]))

    result = attention_layer(tensors["hidden_states"], weights, config, method=method)

    assert relative_error(result.output, tensors["output"]) > 1e-8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("function", "replacement"),
    [
        ("softmax_scale", lambda width, yarn: softmax_scale(width)),
        ("rope_magnitude", lambda yarn: 1.0),
        (
            "softmax_scale",
            lambda width, yarn: softmax_scale(width, dataclasses.replace(yarn, mscale_all_dim=yarn.mscale)),
        ),
        ("rope_frequencies", lambda dim, theta, yarn: rope_frequencies(dim, theta)),
    ],
    ids=["no_mscale_in_scores", "no_mscale_in_rope", "wrong_mscale_field", "no_yarn_in_frequencies"],
)
def test_yarn_golden_notices_a_missing_correction(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    replacement: Callable[..., Any],
    method: Method,
) -> None:
    """Leaving out any one of YaRN's three corrections is far above the tolerance of the comparison."""
    tensors, metadata = goldens.load("deepseek_v3_yarn")
    monkeypatch.setattr(layer_module, function, replacement)

    result = attention_layer(
        tensors["hidden_states"],
        layer_weights(tensors),
        layer_config(metadata["config"]),
        method=method,
    )

    assert relative_error(result.output, tensors["output"]) > 1e-8


def test_every_golden_has_a_provenance_and_is_small() -> None:
    """Files and provenance name each other, agree on what made them, and stay under 200 KB."""
    listed = tomllib.loads(goldens.PROVENANCE.read_text(encoding="utf-8"))

    assert sorted(listed) == goldens.names() == ALL_NAMES
    assert sorted(path.stem for path in goldens.FOLDER.glob("*.safetensors")) == ALL_NAMES
    for name in ALL_NAMES:
        assert (goldens.FOLDER / f"{name}.safetensors").stat().st_size < 200_000
        _, metadata = goldens.load(name)
        stated = {key: value for key, value in listed[name].items() if key != "sha256"}
        assert stated == {key: value for key, value in metadata.items() if key != "config"}


@pytest.mark.parametrize("position", [0, 500, -1])
def test_one_flipped_bit_is_caught_before_use(tmp_path: Path, position: int) -> None:
    """A golden that differs from its provenance in one bit is refused with both checksums."""
    shutil.copytree(goldens.FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "glm_moe_dsa.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    with pytest.raises(goldens.GoldenError, match=r"glm_moe_dsa\.safetensors has sha256"):
        goldens.load("glm_moe_dsa", folder=tmp_path)
    goldens.load("deepseek_v3_yarn", folder=tmp_path)


def test_unknown_and_missing_goldens_are_named(tmp_path: Path) -> None:
    """A name without provenance and a listed file that is gone raise an error that says so."""
    shutil.copy(goldens.PROVENANCE, tmp_path)

    with pytest.raises(goldens.GoldenError, match="'no_such_golden' is not in provenance"):
        goldens.load("no_such_golden")
    with pytest.raises(goldens.GoldenError, match="is not there"):
        goldens.load("glm_moe_dsa", folder=tmp_path)


def test_layer_refuses_weights_that_it_would_ignore() -> None:
    """A missing weight, a bias and an unknown method raise instead of giving a plausible result."""
    tensors, metadata = goldens.load("deepseek_v3_plain")
    weights, config = layer_weights(tensors), layer_config(metadata["config"])
    with_bias = {**weights, "q_a_proj.bias": torch.zeros(24)}
    without_norm = {name: t for name, t in weights.items() if name != "q_a_layernorm.weight"}

    with pytest.raises(ValueError, match=r"q_a_proj\.bias"):
        attention_layer(tensors["hidden_states"], with_bias, config, method="absorbed")
    with pytest.raises(ValueError, match=r"q_a_layernorm\.weight"):
        attention_layer(tensors["hidden_states"], without_norm, config, method="absorbed")
    with pytest.raises(ValueError, match="method is 'naive'"):
        attention_layer(tensors["hidden_states"], weights, config, method="naive")  # type: ignore[arg-type]
