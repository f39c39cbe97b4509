"""A file's tensors fill a model's parameters one to one, and every misfit is listed by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

import gguf
import pytest

from mla_conformance.kernels.gguf.loading_plan import LoadingPlan, expected_parameters, plan_loading
from mla_conformance.kernels.gguf.model_config import ModelConfig
from mla_conformance.kernels.gguf.names import GGUFNamesError
from mla_conformance.suites.gguf import hf_parameters, writing
from mla_conformance.suites.gguf.models import MODELS, FileTensor, Model, gguf_tensors

NAMES = list(MODELS)
GLM = MODELS["GLM-5"]


def config_of(model: Model) -> ModelConfig:
    return ModelConfig.from_hf(model.config)


def plan(model: Model, tensors: list[FileTensor], *, mtp: bool = False) -> LoadingPlan:
    return plan_loading(model.arch, config_of(model), tensors, mtp=mtp)


def misfit(model: Model, tensors: list[FileTensor], *, mtp: bool = False) -> GGUFNamesError:
    """Return the error that a file must give."""
    with pytest.raises(GGUFNamesError) as caught:
        plan(model, tensors, mtp=mtp)
    return caught.value


def first_differences(ours: Collection[str], theirs: Collection[str]) -> list[str]:
    """Name some of the differing entries; pytest's own comparison of 60,000 takes minutes."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        ours, theirs = {f"{k} {v}" for k, v in ours.items()}, {f"{k} {v}" for k, v in theirs.items()}
    return sorted(set(ours) ^ set(theirs))[:10]


def kinds(error: GGUFNamesError) -> tuple[int, int, int, int]:
    """Count an error's entries: unmapped, missing, doubled, mis-shaped."""
    return len(error.unmapped), len(error.missing), len(error.doubled), len(error.misshaped)


# Whole models.


@pytest.mark.parametrize("name", NAMES)
def test_expected_parameters_are_transformers_own(name: str) -> None:
    """Names and shapes are those of transformers' model class, taken from the golden."""
    model = MODELS[name]
    ours, theirs = expected_parameters(config_of(model), model.arch), hf_parameters.load(name)
    assert first_differences(ours, theirs) == []
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("split_kv_b", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_fills_every_parameter_once(name: str, split_kv_b: bool) -> None:
    """All elements of a file go to all elements of the model's parameters, one to one."""
    model = MODELS[name]
    tensors = gguf_tensors(model, split_kv_b=split_kv_b)
    found = plan(model, tensors)
    parameters = hf_parameters.load(name)
    assert first_differences(found.sources.keys(), parameters.keys()) == []
    assert (found.shared, found.ignored) == ({}, {})
    used = {source.tensor for sources in found.sources.values() for source in sources}
    assert used == {tensor for tensor, _, _ in tensors}
    held = {tensor: math.prod(shape) for tensor, shape, _ in tensors}
    experts = config_of(model).n_routed_experts
    for parameter, sources in found.sources.items():
        elements = sum(held[s.tensor] // (1 if s.expert is None else experts) for s in sources)
        assert elements == math.prod(parameters[parameter])
    assert sum(held.values()) == sum(map(math.prod, parameters.values()))


@pytest.mark.parametrize(("mtp", "count"), [(False, 3 + 3 * 18 + 75 * 23), (True, 3 + 3 * 18 + 75 * 23 + 27)])
def test_glm_5_has_1782_tensors_and_1809_with_the_predictor(mtp: bool, count: int, tmp_path: Path) -> None:
    """A shape-only GGUF file with GLM-5's real sizes, read back by gguf-py, fills the model."""
    tensors = gguf_tensors(GLM, mtp=mtp)
    assert len(tensors) == count == (1809 if mtp else 1782)
    path = tmp_path / "glm-5.gguf"
    writing.write(
        path, {"general.architecture": "glm-dsa"}, [writing.TensorSpec(n, q, s) for n, s, q in tensors], shape_only=True
    )
    reader = gguf.GGUFReader(path)
    read = [(t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name) for t in reader.tensors]
    assert read == tensors
    found = plan(GLM, read, mtp=mtp)
    assert len({source.tensor for sources in found.sources.values() for source in sources}) == count
    expected = expected_parameters(config_of(GLM), "glm-dsa", mtp=mtp)
    assert first_differences(found.sources.keys() | found.shared.keys(), expected.keys()) == []
    assert found.sources.keys().isdisjoint(found.shared)


def test_experts_keep_their_row_of_the_stack() -> None:
    """Expert 17 is row 17 of each of the three stacks, whatever types these have."""
    found = plan(GLM, gguf_tensors(GLM))
    for matrix in ("gate", "up", "down"):
        (source,) = found.sources[f"model.layers.3.mlp.experts.17.{matrix}_proj.weight"]
        assert source == (f"blk.3.ffn_{matrix}_exps.weight", "experts", "Q4_K", 17)


# What a file may lack or have besides.


def test_tied_embeddings_need_no_output_tensor() -> None:
    """With tied embeddings the head uses the embedding; a file that brings a head as well is refused."""
    tied = Model(GLM.arch, GLM.config | {"tie_word_embeddings": True})
    assert plan(tied, gguf_tensors(tied, tied=True)).shared == {"lm_head.weight": "model.embed_tokens.weight"}
    error = misfit(tied, gguf_tensors(tied))
    assert kinds(error) == (0, 0, 1, 0)
    assert "output.weight" in error.doubled[0]


def test_untied_embeddings_need_an_output_tensor() -> None:
    """A missing head is not replaced by the embedding without the config saying so."""
    error = misfit(GLM, gguf_tensors(GLM, tied=True))
    assert kinds(error) == (0, 1, 0, 0)
    assert error.missing[0] == "output.weight for lm_head.weight"


@pytest.mark.parametrize("own", [True, False])
def test_predictor_without_its_own_embedding_uses_the_models(own: bool) -> None:
    """`embed_tokens` and `shared_head.head` of layer 78 come from the file, or else from the model."""
    found = plan(GLM, gguf_tensors(GLM, mtp=True, mtp_embeddings=own), mtp=True)
    stands_in = {
        "model.layers.78.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.78.shared_head.head.weight": "lm_head.weight",
    }
    assert found.shared == ({} if own else stands_in)
    assert all((parameter in found.sources) == own for parameter in stands_in)


def test_predictor_that_is_not_wanted_is_listed_as_ignored() -> None:
    """All 27 tensors of layer 78 are named with the reason when mtp is False."""
    found = plan(GLM, gguf_tensors(GLM, mtp=True))
    assert len(found.ignored) == 27
    assert all(name.startswith("blk.78.") and "mtp=False" in reason for name, reason in found.ignored.items())


def test_predictor_that_is_wanted_and_absent_is_missing() -> None:
    """All 27 tensors of layer 78 are named, kv_b's halves in one entry."""
    error = misfit(GLM, gguf_tensors(GLM), mtp=True)
    assert kinds(error) == (0, 26, 0, 0)
    assert "blk.78.nextn.eh_proj.weight for model.layers.78.eh_proj.weight" in error.missing
    assert sum("blk.78.attn_k_b.weight and blk.78.attn_v_b.weight" in entry for entry in error.missing) == 1


def test_predictor_is_refused_where_there_is_none() -> None:
    """deepseek2 files hold no predictor, and a config may have none."""
    with pytest.raises(ValueError, match="deepseek2 has no tensors for such layers"):
        plan(MODELS["DeepSeek-V3"], [], mtp=True)
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        plan(Model(GLM.arch, GLM.config | {"num_nextn_predict_layers": 0}), [], mtp=True)


def test_rotary_tables_are_ignored_with_a_reason() -> None:
    """`rope_freqs` and `attn_rot_embd` hold no parameter, and the plan says so."""
    extra: list[FileTensor] = [("rope_freqs.weight", (32,), "F32"), ("blk.5.attn_rot_embd.weight", (32,), "F32")]
    found = plan(GLM, gguf_tensors(GLM) + extra)
    assert found.ignored.keys() == {name for name, _, _ in extra}
    assert all("metadata" in reason for reason in found.ignored.values())


def test_layers_that_share_an_indexer_need_none() -> None:
    """With `indexer_types` only "full" layers need indexer tensors; those of other layers are ignored by name."""
    kinds_of_layers = ["full", "full", "shared"] + ["full"] * 75
    sharing = Model(GLM.arch, GLM.config | {"indexer_types": kinds_of_layers})
    without = [tensor for tensor in gguf_tensors(GLM) if not tensor[0].startswith("blk.2.indexer.")]
    assert plan(sharing, without).ignored == {}
    assert len(plan(sharing, gguf_tensors(GLM)).ignored) == 5
    assert len(misfit(GLM, without).missing) == 5


def test_nvfp4_scales_belong_to_their_matrix() -> None:
    """An NVFP4 matrix has a scale of its own, a stack one an expert; the range of activations is ignored by name."""
    tensors = gguf_tensors(GLM, quant="NVFP4")
    extra: list[FileTensor] = [
        ("blk.3.attn_output.scale", (1,), "F32"),
        ("blk.3.ffn_up_exps.scale", (256,), "F32"),
        ("blk.3.attn_output.input_scale", (1,), "F32"),
    ]
    found = plan(GLM, tensors + extra)
    assert [s.part for s in found.sources["model.layers.3.self_attn.o_proj.weight"]] == ["whole", "scale"]
    assert found.sources["model.layers.3.mlp.experts.9.up_proj.weight"][1][3] == 9
    assert found.ignored.keys() == {"blk.3.attn_output.input_scale"}


@pytest.mark.parametrize(
    ("scale", "quant", "counts"),
    [
        (("blk.3.attn_output.scale", (1,), "F32"), "Q4_K", (1, 0, 0, 0)),
        (("blk.3.attn_output.scale", (1,), "F16"), "NVFP4", (1, 0, 0, 0)),
        (("blk.3.attn_output.scale", (64,), "F32"), "NVFP4", (0, 0, 0, 1)),
        (("blk.3.ffn_up_exps.scale", (1,), "F32"), "NVFP4", (0, 0, 0, 1)),
    ],
)
def test_scale_that_does_not_fit_is_listed(scale: FileTensor, quant: str, counts: tuple[int, int, int, int]) -> None:
    """A scale beside another type, of another type or shape is named."""
    error = misfit(GLM, [*gguf_tensors(GLM, quant=quant), scale])
    assert kinds(error) == counts
    assert scale[0] in str(error)


# Planted faults: one change of a right file, and the entry that must name it.

Fault = Callable[[list[FileTensor]], list[FileTensor]]


def renamed(old: str, new: str) -> Fault:
    return lambda tensors: [(new if n == old else n, s, q) for n, s, q in tensors]


def dropped(*names: str) -> Fault:
    return lambda tensors: [tensor for tensor in tensors if tensor[0] not in names]


def added(name: str, shape: tuple[int, ...]) -> Fault:
    return lambda tensors: [*tensors, (name, shape, "Q8_0")]


def reshaped(name: str, shape: tuple[int, ...]) -> Fault:
    return lambda tensors: [(n, shape if n == name else s, q) for n, s, q in tensors]


FAULTS: dict[str, tuple[Fault, tuple[int, int, int, int], list[str]]] = {
    "renamed": (
        renamed("blk.9.attn_q_a.weight", "blk.9.attn_qa.weight"),
        (1, 1, 0, 0),
        ["blk.9.attn_qa.weight", "blk.9.attn_q_a.weight"],
    ),
    "dropped": (dropped("blk.40.ffn_norm.weight"), (0, 1, 0, 0), ["blk.40.ffn_norm.weight"]),
    "expert stack dropped": (dropped("blk.3.ffn_up_exps.weight"), (0, 1, 0, 0), ["blk.3.ffn_up_exps.weight"]),
    "correction bias dropped": (dropped("blk.3.exp_probs_b.bias"), (0, 1, 0, 0), ["e_score_correction_bias"]),
    "half of kv_b dropped": (dropped("blk.3.attn_k_b.weight"), (0, 1, 0, 0), ["blk.3.attn_k_b.weight for"]),
    "both halves dropped": (
        dropped("blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight"),
        (0, 1, 0, 0),
        ["blk.3.attn_k_b.weight and blk.3.attn_v_b.weight (or blk.3.attn_kv_b.weight)"],
    ),
    "kv_b whole and split": (
        added("blk.3.attn_kv_b.weight", (28672, 512)),
        (0, 0, 1, 0),
        ["blk.3.attn_kv_b.weight, blk.3.attn_k_b.weight, blk.3.attn_v_b.weight"],
    ),
    "same name twice": (added("output_norm.weight", (6144,)), (0, 0, 1, 0), ["output_norm.weight"]),
    "k_b transposed": (
        reshaped("blk.3.attn_k_b.weight", (64, 192, 512)),
        (0, 0, 0, 1),
        ["blk.3.attn_k_b.weight", "(64, 192, 512)", "(64, 512, 192)"],
    ),
    "expert count": (
        reshaped("blk.3.ffn_down_exps.weight", (255, 6144, 2048)),
        (0, 0, 0, 1),
        ["blk.3.ffn_down_exps.weight", "(255, 6144, 2048)", "(256, 6144, 2048)"],
    ),
    "layer too many": (added("blk.79.attn_norm.weight", (6144,)), (1, 0, 0, 0), ["blk.79.attn_norm.weight"]),
    "experts in a dense layer": (
        added("blk.0.ffn_gate_inp.weight", (256, 6144)),
        (1, 0, 0, 0),
        ["blk.0.ffn_gate_inp.weight", "none of the moe layers"],
    ),
    "query at full rank": (added("blk.0.attn_q.weight", (16384, 6144)), (1, 0, 0, 0), ["blk.0.attn_q.weight"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(fault: str) -> None:
    """One change gives exactly the entries that it must, which name the tensor and the shapes."""
    plant, counts, named = FAULTS[fault]
    error = misfit(GLM, plant(gguf_tensors(GLM)))
    assert kinds(error) == counts
    assert all(text in str(error) for text in named)


def test_all_faults_are_listed_in_one_error() -> None:
    """Faults of every kind together are all in the message, none hidden by another."""
    tensors = gguf_tensors(GLM)
    for fault in ("renamed", "dropped", "same name twice", "k_b transposed"):
        tensors = FAULTS[fault][0](tensors)
    error = misfit(GLM, tensors)
    assert kinds(error) == (1, 2, 1, 1)
    assert "1 unmapped, 2 missing, 1 doubled, 1 mis-shaped" in str(error)


def test_an_empty_file_lists_every_parameter() -> None:
    """Nothing is taken for granted: 1782 tensors less 78 halves and no optional one."""
    assert kinds(misfit(GLM, [])) == (0, 1782 - 78, 0, 0)
