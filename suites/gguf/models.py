"""Real models: their Hugging Face configs, as far as they decide tensors, and the tensors of a GGUF file of each.

The lists are written down independently of the name tables under test. Sizes are those of the published configs;
GLM-5, GLM-4.7-Flash and DeepSeek-V3 are also the defaults of transformers 5.24's config classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FileTensor = tuple[str, tuple[int, ...], str]


class Model(NamedTuple):
    """A model: its GGUF architecture and the keys of its config.json that decide names and shapes."""

    arch: str
    config: dict[str, Any]


_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}

MODELS = {
    "GLM-5": Model(
        "glm-dsa",
        _DEEPSEEK_V3
        | {
            "model_type": "glm_moe_dsa",
            "hidden_size": 6144,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "intermediate_size": 12288,
            "vocab_size": 154880,
            "index_n_heads": 32,
            "index_head_dim": 128,
        },
    ),
    "DeepSeek-V3": Model("deepseek2", _DEEPSEEK_V3),
    "DeepSeek-V2-Lite": Model(
        "deepseek2",
        _DEEPSEEK_V3
        | {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_nextn_predict_layers": 0,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
            "topk_method": "greedy",
        },
    ),
    "Kimi-K2": Model(
        "deepseek2",
        _DEEPSEEK_V3
        | {
            "model_type": "kimi_k2",
            "num_nextn_predict_layers": 0,
            "num_attention_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
        },
    ),
    "GLM-4.7-Flash": Model(
        "deepseek2",
        _DEEPSEEK_V3
        | {
            "model_type": "glm4_moe_lite",
            "hidden_size": 2048,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "first_k_dense_replace": 1,
            "vocab_size": 154880,
        },
    ),
}


def gguf_tensors(
    model: Model,
    *,
    split_kv_b: bool = True,
    mtp: bool = False,
    mtp_embeddings: bool = False,
    tied: bool = False,
    quant: str = "Q4_K",
    fallback: str = "Q8_0",
) -> list[FileTensor]:
    """List the tensors of a model's GGUF file, as (name, shape in numpy order, type), in llama.cpp's order.

    Args:
        model: One of `MODELS`.
        split_kv_b: `attn_k_b` and `attn_v_b` as llama.cpp writes since 2025, or the older `attn_kv_b`.
        mtp: Whether the file holds the multi-token predictor (glm-dsa only).
        mtp_embeddings: Whether the predictor brings its own embedding and head; published GLM-5 files do not.
        tied: Leave out `output.weight`.
        quant: Type of the matrices.
        fallback: Type of those whose rows are no whole number of 256 elements, as llama-quantize chooses.

    """
    c = model.config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    layers = c["num_hidden_layers"]
    for layer in range(layers + (c["num_nextn_predict_layers"] if mtp else 0)):
        block = _attention(c, split_kv_b) | _feed_forward(c, layer < c["first_k_dense_replace"])
        if layer >= layers:
            block |= _predictor(c, mtp_embeddings)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return [
        (name, shapes[name], _quant(name, shapes[name], quant, fallback)) for name in sorted(shapes, key=_file_order)
    ]


def _attention(c: dict[str, Any], split_kv_b: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, q_rows = c["q_lora_rank"], heads * (nope + rope)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_kv_a_mqa.weight": (rank + rope, hidden),
        "attn_kv_a_norm.weight": (rank,),
        "attn_output.weight": (hidden, heads * v),
        "ffn_norm.weight": (hidden,),
    }
    if q_rank is None:
        shapes["attn_q.weight"] = (q_rows, hidden)
    else:
        shapes |= {
            "attn_q_a.weight": (q_rank, hidden),
            "attn_q_a_norm.weight": (q_rank,),
            "attn_q_b.weight": (q_rows, q_rank),
        }
    if split_kv_b:
        shapes |= {"attn_k_b.weight": (heads, rank, nope), "attn_v_b.weight": (heads, v, rank)}
    else:
        shapes["attn_kv_b.weight"] = (heads * (nope + v), rank)
    if c.get("index_n_heads"):
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        shapes |= {
            "indexer.k_norm.weight": (index_dim,),
            "indexer.k_norm.bias": (index_dim,),
            "indexer.proj.weight": (index_heads, hidden),
            "indexer.attn_k.weight": (index_dim, hidden),
            "indexer.attn_q_b.weight": (index_heads * index_dim, q_rank),
        }
    return shapes


def _feed_forward(c: dict[str, Any], dense: bool) -> dict[str, tuple[int, ...]]:
    hidden, experts, inner = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"]
    if dense:
        return _gated("", c["intermediate_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (experts, hidden)}
    if c["topk_method"] == "noaux_tc":
        shapes["exp_probs_b.bias"] = (experts,)
    shapes |= {name: (experts, *shape) for name, shape in _gated("_exps", inner, hidden).items()}
    if c["n_shared_experts"]:
        shapes |= _gated("_shexp", inner * c["n_shared_experts"], hidden)
    return shapes


def _gated(suffix: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{suffix}.weight": (inner, hidden),
        f"ffn_up{suffix}.weight": (inner, hidden),
        f"ffn_down{suffix}.weight": (hidden, inner),
    }


def _predictor(c: dict[str, Any], embeddings: bool) -> dict[str, tuple[int, ...]]:
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        "nextn.shared_head_norm.weight": (hidden,),
    }
    if embeddings:
        shapes |= {"nextn.embed_tokens.weight": (vocab, hidden), "nextn.shared_head_head.weight": (vocab, hidden)}
    return shapes


def _quant(name: str, shape: tuple[int, ...], quant: str, fallback: str) -> str:
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    return quant if shape[-1] % 256 == 0 else fallback


def _file_order(name: str) -> tuple[int, str]:
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1, name)
