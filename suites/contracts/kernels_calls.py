"""How this repository's operators are called: the cases of the conformance tests, tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mla_conformance.kernels.ops  # noqa: F401 - registers them
from mla_conformance.suites.harness.op_call import Factory, OpCall
from mla_conformance.suites.harness.operations import OPERATIONS
from mla_conformance.suites.harness.problems import (
    AbsorbQueryProblem,
    GGUFDequantizeProblem,
    GGUFMatmulProblem,
    KVCacheGatherProblem,
    KVCacheWriteProblem,
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAMultiTokenProblem,
    MLAPrefillProblem,
    Problem,
    VUpProjProblem,
)
from mla_conformance.suites.harness.problems.cache import DS_MLA

DECODE = MLADecodeProblem(lengths=(20, 0, 37), heads=4, num_splits=2)
DECODES = {
    "one row": DECODE.replace(lengths=(5,)),
    "no rows": DECODE.replace(lengths=()),
    "bfloat16, one split": DECODE.replace(dtype="bfloat16", cache_dtype="bfloat16", num_splits=1),
    "float32, odd sizes": DECODE.replace(
        dtype="float32", cache_dtype="float32", heads=3, kv_lora_rank=80, qk_rope_head_dim=0, page_size=5
    ),
    "an e4m3 cache": DECODE.replace(cache_dtype="float8_e4m3fn", k_scale=0.5),
    "several query tokens": MLAMultiTokenProblem(lengths=(20, 0, 37), heads=4, query_tokens=2, query_lens=(2, 1, 1)),
}
PREFILL = MLAPrefillProblem(query_lens=(5, 2), context_lens=(0, 3))
PREFILLS = {
    "one row": PREFILL.replace(query_lens=(1,), context_lens=(4,)),
    "no rows": PREFILL.replace(query_lens=(0,), context_lens=(0,)),
    "float16, values wider than keys": PREFILL.replace(dtype="float16", qk_nope_head_dim=16, v_head_dim=48),
    "float32, a chunk of context": PREFILL.replace(dtype="float32", causal=False),
}
STATES = MergeStatesProblem(tokens=3)
SHARDS = MergeShardsProblem(tokens=3)
MERGES: dict[str, dict[str, Any]] = {
    "one row": {"tokens": 1},
    "no rows": {"tokens": 0},
    "float32, an odd width": {"dtype": "float32", "width": 33},
    "float16, empty states": {"dtype": "float16", "empty": "mixed"},
}
WRITE = KVCacheWriteProblem(tokens=3)
WRITES = {
    "one row": WRITE.replace(tokens=1),
    "no rows": WRITE.replace(tokens=0),
    "float32, odd sizes": WRITE.replace(dtype="float32", kv_lora_rank=9, page_size=3, slot_dtype="int32"),
    "e4m3": WRITE.replace(cache_format="float8_e4m3fn", k_scale=0.5),
    "fp8_ds_mla": WRITE.replace(cache_format="fp8_ds_mla", **DS_MLA),
}
GATHER = KVCacheGatherProblem(spare_rows=0)
GATHERS = {
    "one row": GATHER.replace(seq_lens=(1,), seq_starts=(3,)),
    "no rows": GATHER.replace(seq_lens=(0, 0), seq_starts=(0, 0)),
    "float32, odd sizes": GATHER.replace(dtype="float32", kv_lora_rank=9, page_size=3, seq_starts=()),
    "e4m3": GATHER.replace(cache_format="float8_e4m3fn", k_scale=0.5),
    "fp8_ds_mla": GATHER.replace(cache_format="fp8_ds_mla", **DS_MLA),
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "one row": {"tokens": 1},
    "no rows": {"tokens": 0},
    "float32, an odd width": {"dtype": "float32", "head_dim": 33},
    "float16, a matrix in place": {"dtype": "float16", "weight_layout": "kv_b_rows"},
}
DEQUANTIZE = GGUFDequantizeProblem(quant="Q4_K", rows=3, columns=256)
DEQUANTIZES = {
    "one row": DEQUANTIZE.replace(rows=1),
    "no rows": DEQUANTIZE.replace(rows=0),
    "Q8_0 in bfloat16": DEQUANTIZE.replace(quant="Q8_0", columns=32, dtype="bfloat16"),
    "IQ2_S in float16": DEQUANTIZE.replace(quant="IQ2_S", dtype="float16"),
}
MATMUL = GGUFMatmulProblem(quant="Q4_K", rows=5, columns=256, tokens=3)
MATMULS = {
    "one row": MATMUL.replace(tokens=1),
    "no rows": MATMUL.replace(tokens=0),
    "Q6_K in float32": MATMUL.replace(quant="Q6_K", dtype="float32"),
    "more tokens than are fused": MATMUL.replace(tokens=17, dtype="bfloat16"),
}


@functools.cache
def calls() -> Sequence[OpCall]:
    """All of them, each kind with and without buffers of the caller."""
    return [
        *_pair("mla_decode", _decode, ("out", "lse"), DECODE, DECODES),
        *_pair("mla_prefill", _prefill, ("out", "lse"), PREFILL, PREFILLS),
        *_pair("merge_states", _states, ("out", "lse"), STATES, _replaced(STATES, MERGES)),
        *_pair("merge_shards", _shards, ("out", "lse"), SHARDS, _replaced(SHARDS, MERGES)),
        _call("kv_cache_write", _write, WRITE, WRITES, updates=("kv_cache",)),
        _call("kv_cache_gather_out", _gather, GATHER, GATHERS, outputs=("out",)),
        *_pair("absorb_query", _absorb, ("out",), AbsorbQueryProblem(), _replaced(AbsorbQueryProblem(), PRODUCTS)),
        *_pair("v_up_proj", _v_up, ("out",), VUpProjProblem(), _replaced(VUpProjProblem(), PRODUCTS)),
        *_pair("gguf_dequantize", _dequantize, ("out",), DEQUANTIZE, DEQUANTIZES),
        *_pair("gguf_matmul", _matmul, ("out",), MATMUL, MATMULS),
    ]


def _pair(
    name: str, made: Callable[[Any], dict[str, object]], outputs: tuple[str, ...], problem: Problem, variants: Any
) -> list[OpCall]:
    def returned(case: Any) -> dict[str, object]:
        arguments = {key: value for key, value in made(case).items() if key not in outputs}
        # Without a buffer the dtype must be said.
        return arguments | ({"dtype": case.out.dtype} if name == "gguf_dequantize" else {})

    return [
        _call(f"{name}_out", made, problem, variants, outputs=outputs),
        _call(name, returned, problem, variants),
    ]


def _call(
    name: str,
    made: Callable[[Any], dict[str, object]],
    problem: Problem,
    variants: Mapping[str, Problem],
    outputs: tuple[str, ...] = (),
    updates: tuple[str, ...] = (),
) -> OpCall:
    op = getattr(torch.ops.mla_conformance, name).default
    others = {words: _factory(made, variant) for words, variant in variants.items()}
    return OpCall(op, _factory(made, problem), outputs, updates, others)


def _factory(made: Callable[[Any], dict[str, object]], problem: Problem) -> Factory:
    """Arguments from a case of the problem, with another seed, each tensor in memory of its own."""

    def factory(seed: int) -> dict[str, object]:
        changed = problem.replace(seed=seed)
        if type(changed) is MLADecodeProblem:
            # Rows of length 0 move; the sizes of cache and table stay.
            turn = seed % max(1, len(changed.lengths))
            changed = changed.replace(lengths=changed.lengths[turn:] + changed.lengths[:turn])
        arguments = made(OPERATIONS[problem.operation].build(changed, "cpu"))
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}

    return factory


def _replaced(problem: Problem, variants: Mapping[str, dict[str, Any]]) -> dict[str, Problem]:
    return {words: problem.replace(**changes) for words, changes in variants.items()}


def _fields(case: Any, *names: str) -> dict[str, object]:
    return {name: getattr(case, name) for name in names}


def _decode(case: Any) -> dict[str, object]:
    arguments = _fields(case, "q_nope", "q_pe", "kv_cache", "block_table", "seq_lens", "out", "lse", "k_scale")
    if isinstance(case.problem, MLAMultiTokenProblem):
        arguments["query_lens"] = case.query_lens
    return arguments | {"softmax_scale": case.problem.scale, "num_splits": case.problem.num_splits}


def _prefill(case: Any) -> dict[str, object]:
    (part,) = case.parts
    arguments = _fields(case, "q_nope", "q_pe", "cu_seqlens_q", "out", "lse", "max_seqlen_q")
    arguments |= _fields(part, "k_nope", "k_pe", "v", "cu_seqlens_k", "causal")
    return arguments | {"softmax_scale": case.problem.scale}


def _states(case: Any) -> dict[str, object]:
    return _fields(case, "out_a", "lse_a", "out_b", "lse_b", "out", "lse")


def _shards(case: Any) -> dict[str, object]:
    return _fields(case, "outs", "lses", "out", "lse")


def _write(case: Any) -> dict[str, object]:
    return _fields(case, "ckv", "kpe", "kv_cache", "slot_mapping", "k_scale")


def _gather(case: Any) -> dict[str, object]:
    return _fields(case, "kv_cache", "block_table", "cu_seqlens", "out", "seq_starts", "k_scale")


def _absorb(case: Any) -> dict[str, object]:
    return {"q_nope": case.x, "w_uk": case.weight, "out": case.result}


def _v_up(case: Any) -> dict[str, object]:
    return {"latent": case.x, "w_uv": case.weight, "out": case.out}


def _dequantize(case: Any) -> dict[str, object]:
    return {"data": case.data, "quant": case.problem.quant, "out": case.out}


def _matmul(case: Any) -> dict[str, object]:
    return {"x": case.x, "data": case.data, "quant": case.problem.quant, "out": case.out}
