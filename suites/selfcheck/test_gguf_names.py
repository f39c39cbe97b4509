"""GGUF names and checkpoint names translate both ways, completely."""

from __future__ import annotations

from functools import lru_cache

import gguf
import pytest

from mla_conformance.kernels.gguf.architectures import ARCHITECTURES
from mla_conformance.kernels.gguf.loading_plan import expected_parameters, plan_loading
from mla_conformance.kernels.gguf.model_config import ModelConfig
from mla_conformance.kernels.gguf.names import (
    GGUFNamesError,
    Target,
    arch_of_model_type,
    expert_parameter,
    gguf_names_of,
    stack_of,
    target_of,
)
from mla_conformance.suites.gguf.models import MODELS, Model, gguf_tensors

GGUF_PY = {"glm-dsa": gguf.MODEL_ARCH.GLM_DSA, "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2}
NAMES = list(MODELS)
GLM = MODELS["GLM-5"]
TIED: dict[str, object] = {"tie_word_embeddings": True}


def config_of(model: Model) -> ModelConfig:
    return ModelConfig.from_hf(model.config)


@lru_cache
def gguf_pys_map(arch: str) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(GGUF_PY[arch], 80)


def from_gguf_py(arch: str, parameter: str) -> str | None:
    """Translate a parameter with gguf-py's map, called there as llama.cpp's converter calls it."""
    names = gguf_pys_map(arch)
    asked = stack_of(parameter).replace("e_score_correction_bias", "e_score_correction.bias")
    found = names.get_name(asked, try_suffixes=(".weight", ".bias"))
    return None if found is None else str(found)


def listed_parameters(model: Model, *, mtp: bool) -> set[str]:
    """Name the parameters of a model, stacks of experts once."""
    return {stack_of(name) for name in expected_parameters(config_of(model), model.arch, mtp=mtp)}


# Both ways.


@pytest.mark.parametrize("split_kv_b", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_file_round_trips(name: str, split_kv_b: bool) -> None:
    """Tensor to parameter to tensor gives the tensor again, for a file of either layout."""
    model = MODELS[name]
    mtp = model.arch == "glm-dsa"
    for tensor, _, _ in gguf_tensors(model, split_kv_b=split_kv_b, mtp=mtp, mtp_embeddings=mtp):
        target = target_of(model.arch, tensor)
        assert tensor in gguf_names_of(model.arch, target.parameter, split_kv_b=split_kv_b)


@pytest.mark.parametrize("split_kv_b", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_round_trips(name: str, split_kv_b: bool) -> None:
    """Parameter to tensors to parameter gives the parameter again, an expert giving its stack."""
    model = MODELS[name]
    for parameter in expected_parameters(config_of(model), model.arch, mtp=model.arch == "glm-dsa"):
        if ".mlp.experts." in parameter and ".mlp.experts.17." not in parameter:
            continue
        tensors = gguf_names_of(model.arch, parameter, split_kv_b=split_kv_b)
        parts = [target_of(model.arch, tensor) for tensor in tensors]
        assert {target.parameter for target in parts} == {stack_of(parameter)}
        assert len(tensors) == (2 if split_kv_b and parameter.endswith("kv_b_proj.weight") else 1)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_names_agree_with_gguf_py(arch: str) -> None:
    """Every parameter has the GGUF name that gguf-py's map gives, which has a name for each."""
    model = MODELS["GLM-5" if arch == "glm-dsa" else "DeepSeek-V3"]
    parameters = listed_parameters(model, mtp=arch == "glm-dsa")
    parameters.add("model.layers.3.self_attn.q_proj.weight")
    theirs = {parameter: from_gguf_py(arch, parameter) for parameter in parameters}
    assert theirs == {parameter: gguf_names_of(arch, parameter, split_kv_b=False)[0] for parameter in parameters}


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_split_kv_b_has_gguf_pys_names(arch: str) -> None:
    """The halves have the names that gguf-py gives the converter's k_b_proj and v_b_proj."""
    halves = [from_gguf_py(arch, f"model.layers.7.self_attn.{half}_proj.weight") for half in ("k_b", "v_b")]
    assert halves == list(gguf_names_of(arch, "model.layers.7.self_attn.kv_b_proj.weight"))


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_no_tensor_kind_of_the_architecture_is_unknown(arch: str) -> None:
    """Each kind of tensor that gguf-py lists has a row or a reason to be ignored, but for attention without MLA."""
    listed = {gguf.TENSOR_NAMES[kind].replace("{bid}", "{layer}") for kind in gguf.MODEL_TENSORS[GGUF_PY[arch]]}
    architecture = ARCHITECTURES[arch]
    known = {row.tensor.rsplit(".", 1)[0] for row in architecture.rows}
    known |= {name.rsplit(".", 1)[0] for name in architecture.ignorable}
    without_mla = {"blk.{layer}.attn_k", "blk.{layer}.attn_v"} if arch == "deepseek2" else set()
    assert listed - known == without_mla
    assert known <= listed


@pytest.mark.parametrize(
    ("tensor", "target"),
    [
        ("token_embd.weight", Target("model.embed_tokens.weight", "whole")),
        ("blk.3.attn_kv_b.weight", Target("model.layers.3.self_attn.kv_b_proj.weight", "whole")),
        ("blk.3.attn_k_b.weight", Target("model.layers.3.self_attn.kv_b_proj.weight", "k_b")),
        ("blk.3.attn_v_b.weight", Target("model.layers.3.self_attn.kv_b_proj.weight", "v_b")),
        ("blk.3.ffn_gate_exps.weight", Target("model.layers.3.mlp.experts.gate_proj.weight", "experts")),
        ("blk.3.ffn_gate_exps.scale", Target("model.layers.3.mlp.experts.gate_proj.weight", "scale")),
        ("blk.3.exp_probs_b.bias", Target("model.layers.3.mlp.gate.e_score_correction_bias", "whole")),
        ("blk.3.indexer.proj.weight", Target("model.layers.3.self_attn.indexer.weights_proj.weight", "whole")),
        ("blk.78.nextn.eh_proj.weight", Target("model.layers.78.eh_proj.weight", "whole")),
        ("blk.78.nextn.shared_head_head.weight", Target("model.layers.78.shared_head.head.weight", "whole")),
    ],
)
def test_known_pairs(tensor: str, target: Target) -> None:
    """The pairs that matter most, written out."""
    assert target_of("glm-dsa", tensor) == target


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.attn_q_a.bias",
        "blk.03.attn_q_a.weight",
        "blk.-1.attn_q_a.weight",
        "blk.٣.attn_q_a.weight",
        "blk.{layer}.attn_q_a.weight",
        "blk.3.attn_q_a.weight ",
        "v.blk.3.attn_q_a.weight",
        "blk.3.attn_norm.scale",
        "blk.3.attn_k_b.scale",
        "output",
        "",
    ],
)
def test_unknown_tensor_name_is_refused(name: str) -> None:
    """A name that is nearly right is an error that quotes it."""
    with pytest.raises(GGUFNamesError) as caught:
        target_of("glm-dsa", name)
    assert name in caught.value.unmapped[0]


@pytest.mark.parametrize(
    "name", ["model.layers.3.self_attn.q_a_proj.bias", "model.layers.3.mlp.experts.07.up_proj.weight", "lm_head", ""]
)
def test_unknown_parameter_name_is_refused(name: str) -> None:
    """The way back refuses as well."""
    with pytest.raises(GGUFNamesError) as caught:
        gguf_names_of("glm-dsa", name)
    assert name in caught.value.unmapped[0]


def test_indexer_and_predictor_are_unknown_to_deepseek2() -> None:
    """deepseek2 has neither, so their names are refused."""
    for name in ("blk.3.indexer.proj.weight", "blk.61.nextn.eh_proj.weight"):
        with pytest.raises(GGUFNamesError, match="deepseek2 has no such tensor"):
            target_of("deepseek2", name)


@pytest.mark.parametrize("name", NAMES)
def test_model_type_leads_to_the_architecture(name: str) -> None:
    """`glm_moe_dsa` is found as glm-dsa, which name equality would miss."""
    assert arch_of_model_type(MODELS[name].config["model_type"]) == MODELS[name].arch


def test_unknown_architecture_and_model_type_are_refused() -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match=r"arch is 'llama'.*deepseek2.*glm-dsa"):
        target_of("llama", "output.weight")
    with pytest.raises(ValueError, match=r"model_type is 'llama'.*glm_moe_dsa"):
        arch_of_model_type("llama")
    with pytest.raises(ValueError, match=r"stack is 'lm_head\.weight'"):
        expert_parameter("lm_head.weight", 3)


# Configs.


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"n_routed_experts": True}, "n_routed_experts is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types"),
        ({"index_topk_freq": 4}, "indexer_types"),
    ],
)
def test_config_that_the_tables_do_not_cover_is_refused(change: dict[str, object], named: str) -> None:
    """A config with layers that have no rows is refused by the key's name."""
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf(GLM.config | change)


@pytest.mark.parametrize("change", [{"q_lora_rank": None}, {"topk_method": "greedy"}, {"n_shared_experts": 0}, TIED])
@pytest.mark.parametrize("name", ["GLM-5", "DeepSeek-V3"])
def test_variant_is_filled_from_its_own_file_only(name: str, change: dict[str, object]) -> None:
    """A model with one layer kind less is filled from a file without it, and neither fits the other's."""
    without_indexer = {"index_n_heads": 0} if name == "GLM-5" else {}
    usual = Model(MODELS[name].arch, MODELS[name].config | without_indexer)
    variant = Model(usual.arch, usual.config | change)
    tensors = gguf_tensors(variant, tied=change is TIED)
    found = plan_loading(variant.arch, config_of(variant), tensors)
    expected = expected_parameters(config_of(variant), variant.arch)
    assert len(found.sources) + len(found.shared) == len(expected)
    assert "lm_head.weight" in expected
    for model, file in ((usual, tensors), (variant, gguf_tensors(usual))):
        with pytest.raises(GGUFNamesError):
            plan_loading(model.arch, config_of(model), file)


def test_config_of_another_architecture_is_refused() -> None:
    """A glm_moe_dsa model is not filled from a deepseek2 file."""
    with pytest.raises(ValueError, match=r"config\.model_type is 'glm_moe_dsa'"):
        plan_loading("deepseek2", config_of(GLM), [])
