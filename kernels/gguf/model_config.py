"""The sizes of a model that decide which tensors its file holds and what shape they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of an MLA model with experts, called as in its Hugging Face config.

    `q_lora_rank` is None where queries come from one full-rank projection (DeepSeek-V2-Lite); `index_n_heads` is 0
    where there is no indexer. `has_score_correction` says whether the router adds `e_score_correction_bias`.
    `shared_indexer_layers` are the layers that reuse the top-k of an earlier one and own no indexer (GLM-5.2).
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    first_k_dense_replace: int
    vocab_size: int
    q_lora_rank: int | None = None
    n_shared_experts: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    has_score_correction: bool = True
    shared_indexer_layers: frozenset[int] = field(default=frozenset())

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a checkpoint's config.json, given as a mapping.

        Raises:
            ValueError: if a size is missing or no whole number, or the config describes a layer that the tables do not
                have (biases, experts in other layers than the last ones, an indexer schedule without `indexer_types`).

        """
        _refuse_unknown_layers(config)
        sizes = {name: _size(config, name) for name in _REQUIRED} | {
            name: _size(config, name) for name in _OPTIONAL if config.get(name) is not None
        }
        model_type = str(config.get("model_type"))
        # Where the key is missing the model class itself decides: only DeepSeek-V2's router has no such bias.
        method = config.get("topk_method", "greedy" if model_type == "deepseek_v2" else "noaux_tc")
        kinds = config.get("indexer_types") or ()
        return cls(
            model_type=model_type,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            has_score_correction=method == "noaux_tc",
            shared_indexer_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared"),
            **sizes,
        )

    def layers(self, kind: str) -> range:
        """Numbers of the layers of one kind: "every", "dense", "moe" (none of the predictor's) or "mtp"."""
        end = self.num_hidden_layers
        ranges = {
            "every": range(end),
            "dense": range(min(self.first_k_dense_replace, end)),
            "moe": range(min(self.first_k_dense_replace, end), end),
            "mtp": range(end, end + self.num_nextn_predict_layers),
        }
        return ranges[kind]

    def sizes(self) -> dict[str, int]:
        """Return the size that each name used in the tables' shapes stands for."""
        heads = self.num_attention_heads
        return {
            "hidden": self.hidden_size,
            "twice_hidden": 2 * self.hidden_size,
            "vocab": self.vocab_size,
            "heads": heads,
            "nope": self.qk_nope_head_dim,
            "v": self.v_head_dim,
            "q_lora": self.q_lora_rank or 0,
            "kv_lora": self.kv_lora_rank,
            "q": heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            "kv_a": self.kv_lora_rank + self.qk_rope_head_dim,
            "kv_b": heads * (self.qk_nope_head_dim + self.v_head_dim),
            "o": heads * self.v_head_dim,
            "index_heads": self.index_n_heads,
            "index": self.index_head_dim,
            "index_q": self.index_n_heads * self.index_head_dim,
            "ffn": self.intermediate_size,
            "experts": self.n_routed_experts,
            "expert_ffn": self.moe_intermediate_size,
            "shared_ffn": self.moe_intermediate_size * self.n_shared_experts,
        }

    def has(self, flag: str, layer: int | None) -> bool:
        """Whether a table's `needs` flag is set, in this layer where it depends on the layer."""
        flags = {
            "": True,
            "untied_embeddings": not self.tie_word_embeddings,
            "low_rank_q": self.q_lora_rank is not None,
            "full_rank_q": self.q_lora_rank is None,
            "indexer": self.index_n_heads > 0 and layer not in self.shared_indexer_layers,
            "score_correction": self.has_score_correction,
            "shared_experts": self.n_shared_experts > 0,
        }
        return flags[flag]


_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "first_k_dense_replace",
    "vocab_size",
)
_OPTIONAL = ("q_lora_rank", "n_shared_experts", "index_n_heads", "index_head_dim", "num_nextn_predict_layers")


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}; the model's config must give it as a whole number")
    return value


def _refuse_unknown_layers(config: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ValueError(
                f"{name} is {config[name]!r}; the name tables have no such biases, add rows for them first"
            )
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"moe_layer_freq is {config['moe_layer_freq']!r}; only 1 (experts in every layer) is known")
    kinds = config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace", 0)
    if kinds is not None and list(kinds) != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ValueError(f"mlp_layer_types is not first_k_dense_replace = {dense} dense layers and then sparse ones")
    scheduled = config.get("index_topk_pattern") or (config.get("index_topk_freq") or 1) > 1
    if scheduled and not config.get("indexer_types"):
        raise ValueError("the config shares indexers between layers; give indexer_types, one of full or shared a layer")
