"""Which GGUF tensors an architecture has, as data: one row a tensor, with the parameter it fills and its shape.

GGUF names are those of gguf-py's `MODEL_TENSORS` (glm-dsa, deepseek2); parameter names are those of the Hugging Face
checkpoints. Shapes are in numpy order (out-features first), the reverse of the order in which ggml prints them.

`kv_b_proj` has two layouts: whole (`attn_kv_b`, older files) or split into `attn_k_b`, whose two last dimensions are
transposed, and `attn_v_b`. vllm-gguf-plugin 0.0.5 drops the split pair without a word and does not match `glm_moe_dsa`
with glm-dsa; here a tensor without a row is an error.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One tensor of an architecture.

    Attributes:
        tensor: GGUF name; `{layer}` stands for the layer number.
        parameter: Name in the checkpoint; a stack of experts is named without the expert's number.
        shape: Sizes of the tensor in numpy order, by name (`model_config.ModelConfig.sizes`).
        part: What piece of the parameter the tensor is: "whole", "k_b", "v_b" or "experts" (all of them, stacked).
        layers: Where it occurs: "once", "every", "dense", "moe" or "mtp" (layers of the multi-token predictor, which
            also have what "every" and "moe" layers have).
        needs: A flag of the config that must be set for the tensor to exist; empty if it always does.
        instead: The parameter that stands in where a file may leave the tensor out; empty if it may not.
    """

    tensor: str
    parameter: str
    shape: tuple[str, ...]
    part: str = "whole"
    layers: str = "every"
    needs: str = ""
    instead: str = ""


class Architecture(NamedTuple):
    """One GGUF architecture: its rows, its checkpoints' `model_type`s, and what it may leave out (with reasons)."""

    name: str
    model_types: tuple[str, ...]
    rows: tuple[Row, ...]
    ignorable: dict[str, str]

    @property
    def has_mtp(self) -> bool:
        """Whether files of this architecture can hold the multi-token predictor."""
        return any(row.layers == "mtp" for row in self.rows)


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BLOCK, _LAYER = "blk.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
_INDEXER = _ATTENTION + "indexer."

_ONCE = (
    Row("token_embd.weight", _EMBEDDING, ("vocab", "hidden"), layers="once"),
    Row("output_norm.weight", "model.norm.weight", ("hidden",), layers="once"),
    Row("output.weight", _HEAD, ("vocab", "hidden"), layers="once", needs="untied_embeddings", instead=_EMBEDDING),
)

_LAYER_NORMS = (
    Row(_BLOCK + "attn_norm.weight", _LAYER + "input_layernorm.weight", ("hidden",)),
    Row(_BLOCK + "ffn_norm.weight", _LAYER + "post_attention_layernorm.weight", ("hidden",)),
)

_MLA = (
    Row(_BLOCK + "attn_q.weight", _ATTENTION + "q_proj.weight", ("q", "hidden"), needs="full_rank_q"),
    Row(_BLOCK + "attn_q_a.weight", _ATTENTION + "q_a_proj.weight", ("q_lora", "hidden"), needs="low_rank_q"),
    Row(_BLOCK + "attn_q_a_norm.weight", _ATTENTION + "q_a_layernorm.weight", ("q_lora",), needs="low_rank_q"),
    Row(_BLOCK + "attn_q_b.weight", _ATTENTION + "q_b_proj.weight", ("q", "q_lora"), needs="low_rank_q"),
    Row(_BLOCK + "attn_kv_a_mqa.weight", _ATTENTION + "kv_a_proj_with_mqa.weight", ("kv_a", "hidden")),
    Row(_BLOCK + "attn_kv_a_norm.weight", _ATTENTION + "kv_a_layernorm.weight", ("kv_lora",)),
    Row(_BLOCK + "attn_kv_b.weight", _ATTENTION + "kv_b_proj.weight", ("kv_b", "kv_lora")),
    Row(_BLOCK + "attn_k_b.weight", _ATTENTION + "kv_b_proj.weight", ("heads", "kv_lora", "nope"), "k_b"),
    Row(_BLOCK + "attn_v_b.weight", _ATTENTION + "kv_b_proj.weight", ("heads", "v", "kv_lora"), "v_b"),
    Row(_BLOCK + "attn_output.weight", _ATTENTION + "o_proj.weight", ("hidden", "o")),
)

_SPARSE_INDEXER = (
    Row(_BLOCK + "indexer.attn_q_b.weight", _INDEXER + "wq_b.weight", ("index_q", "q_lora"), needs="indexer"),
    Row(_BLOCK + "indexer.attn_k.weight", _INDEXER + "wk.weight", ("index", "hidden"), needs="indexer"),
    Row(_BLOCK + "indexer.k_norm.weight", _INDEXER + "k_norm.weight", ("index",), needs="indexer"),
    Row(_BLOCK + "indexer.k_norm.bias", _INDEXER + "k_norm.bias", ("index",), needs="indexer"),
    Row(_BLOCK + "indexer.proj.weight", _INDEXER + "weights_proj.weight", ("index_heads", "hidden"), needs="indexer"),
)

_DENSE_FFN = (
    Row(_BLOCK + "ffn_gate.weight", _MLP + "gate_proj.weight", ("ffn", "hidden"), layers="dense"),
    Row(_BLOCK + "ffn_up.weight", _MLP + "up_proj.weight", ("ffn", "hidden"), layers="dense"),
    Row(_BLOCK + "ffn_down.weight", _MLP + "down_proj.weight", ("hidden", "ffn"), layers="dense"),
)


def _experts(tensor: str, parameter: str, shape: tuple[str, ...]) -> Row:
    return Row(_BLOCK + tensor, _MLP + "experts." + parameter, ("experts", *shape), "experts", "moe")


def _shared_experts(tensor: str, parameter: str, shape: tuple[str, ...]) -> Row:
    return Row(_BLOCK + tensor, _MLP + "shared_experts." + parameter, shape, layers="moe", needs="shared_experts")


_MOE_FFN = (
    Row(_BLOCK + "ffn_gate_inp.weight", _MLP + "gate.weight", ("experts", "hidden"), layers="moe"),
    Row(
        _BLOCK + "exp_probs_b.bias",
        _MLP + "gate.e_score_correction_bias",
        ("experts",),
        layers="moe",
        needs="score_correction",
    ),
    _experts("ffn_gate_exps.weight", "gate_proj.weight", ("expert_ffn", "hidden")),
    _experts("ffn_up_exps.weight", "up_proj.weight", ("expert_ffn", "hidden")),
    _experts("ffn_down_exps.weight", "down_proj.weight", ("hidden", "expert_ffn")),
    _shared_experts("ffn_gate_shexp.weight", "gate_proj.weight", ("shared_ffn", "hidden")),
    _shared_experts("ffn_up_shexp.weight", "up_proj.weight", ("shared_ffn", "hidden")),
    _shared_experts("ffn_down_shexp.weight", "down_proj.weight", ("hidden", "shared_ffn")),
)


def _next_token(tensor: str, parameter: str, shape: tuple[str, ...], instead: str = "") -> Row:
    return Row(_BLOCK + "nextn." + tensor, _LAYER + parameter, shape, layers="mtp", instead=instead)


_MTP = (
    _next_token("eh_proj.weight", "eh_proj.weight", ("hidden", "twice_hidden")),
    _next_token("enorm.weight", "enorm.weight", ("hidden",)),
    _next_token("hnorm.weight", "hnorm.weight", ("hidden",)),
    _next_token("shared_head_norm.weight", "shared_head.norm.weight", ("hidden",)),
    _next_token("embed_tokens.weight", "embed_tokens.weight", ("vocab", "hidden"), _EMBEDDING),
    _next_token("shared_head_head.weight", "shared_head.head.weight", ("vocab", "hidden"), _HEAD),
)

_ROPE_FROM_METADATA = "rotary frequencies follow from the file's rope metadata; no parameter holds them"
_IGNORABLE = {
    "rope_freqs.weight": _ROPE_FROM_METADATA,
    "blk.{layer}.attn_rot_embd.weight": _ROPE_FROM_METADATA,
}

_COMMON = _ONCE + _LAYER_NORMS + _MLA + _DENSE_FFN + _MOE_FFN

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("glm-dsa", ("glm_moe_dsa",), _COMMON + _SPARSE_INDEXER + _MTP, _IGNORABLE),
        Architecture("deepseek2", ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _COMMON, _IGNORABLE),
    )
}
