"""Layers that own quantised shards: order, types, tensor-parallel slices, and what must be refused."""

from __future__ import annotations

import itertools
import re

import pytest

from mla_conformance.suites.harness.drawing import drawn, linear_problems
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_judge import check_product
from mla_conformance.suites.harness.problems import GGUFLinearProblem
from mla_conformance.suites.harness.subject import Subject

Q_A_AND_KV_A = GGUFLinearProblem(shards=(("Q8_0", 64), ("Q8_0", 32)), disable_tp=True)
FOUR = GGUFLinearProblem(shards=(("Q8_0", 3), ("Q8_0", 5), ("Q8_0", 2), ("Q8_0", 4)))
QKV = GGUFLinearProblem(layer="qkv", shards=(("Q8_0", 64), ("Q8_0", 32), ("Q8_0", 32)))
MIXED = (("Q4_K", 16), ("Q6_K", 32), ("IQ4_XS", 16))
WITH_PLAIN = (("Q8_0", 32), ("F16", 16))
GATE_UP = GGUFLinearProblem(shards=(("Q4_K", 64), ("Q4_K", 64)))

MODELS = {
    "GLM-5 fused_qkv_a": GGUFLinearProblem(
        shards=(("Q4_K", 64), ("Q8_0", 32)), columns=6144, disable_tp=True, tp_size=8
    ),
    "DeepSeek-V3 fused_qkv_a": GGUFLinearProblem(shards=(("Q4_K", 64), ("Q4_K", 32)), columns=7168, disable_tp=True),
    "GLM-4.7-Flash o_proj": GGUFLinearProblem(layer="row", shards=(("Q4_K", 16),), columns=5120, tp_size=4),
    "GLM-5 down_proj": GGUFLinearProblem(layer="row", shards=(("Q6_K", 16),), columns=12288, tp_size=8),
    "Kimi-K2 down_proj": GGUFLinearProblem(layer="row", shards=(("Q4_K", 16),), columns=18432, tp_size=8),
    "DeepSeek-V2-Lite kv_a_proj": GGUFLinearProblem(
        layer="replicated", shards=(("Q4_K", 64),), columns=2048, tp_size=2
    ),
}
CUTTING = {
    "Q8_0, 256 columns, 16 ranks": GGUFLinearProblem(layer="row", shards=(("Q8_0", 16),), columns=256, tp_size=16),
    "GLM-4.7-Flash expert down": GGUFLinearProblem(layer="row", shards=(("Q4_K", 16),), columns=1536, tp_size=4),
    "GLM-4.7-Flash o_proj": GGUFLinearProblem(layer="row", shards=(("Q4_K", 16),), columns=5120, tp_size=8),
    "DeepSeek-V2-Lite shared down": GGUFLinearProblem(layer="row", shards=(("Q4_K", 16),), columns=2816, tp_size=2),
    "DeepSeek-V2-Lite dense down": GGUFLinearProblem(layer="row", shards=(("Q8_0", 16),), columns=10944, tp_size=4),
}


def named(problems: dict[str, GGUFLinearProblem]) -> pytest.MarkDecorator:
    """Run a test on each problem, under its name."""
    return pytest.mark.parametrize("problem", [pytest.param(p, id=name) for name, p in problems.items()])


def every_rank(problem: GGUFLinearProblem) -> list[GGUFLinearProblem]:
    """The problem on each of its ranks."""
    return [problem.replace(tp_rank=rank) for rank in range(problem.tp_size)]


def _permutations(base: GGUFLinearProblem) -> list[GGUFLinearProblem]:
    return [base.replace(arrival=order) for order in itertools.permutations(range(len(base.shards)))]


@pytest.mark.requirement("GGUF-LIN-01")
@named({"in order": Q_A_AND_KV_A, "kv_a first": Q_A_AND_KV_A.replace(arrival=(1, 0))})
def test_q_a_and_kv_a_keep_their_places(subject: Subject, problem: GGUFLinearProblem) -> None:
    """The story: GGUF files hold kv_a before q_a, and the fused projection came out as [kv_a | q_a]."""
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-01")
@pytest.mark.parametrize("base", [FOUR, QKV], ids=["four shards", "qkv"])
def test_every_order_of_arrival_gives_the_layers_order(subject: Subject, base: GGUFLinearProblem) -> None:
    """All 24 orders of four shards, all 6 of q, k and v."""
    for problem in _permutations(base):
        check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-01")
@named({"merged": FOUR.replace(arrival=(None,))})
def test_a_tensor_fused_on_disk_is_the_whole_layer(subject: Subject, problem: GGUFLinearProblem) -> None:
    """No shard id: all shards in one tensor, in the layer's order."""
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-02")
@pytest.mark.parametrize("base", [GGUFLinearProblem(shards=MIXED)], ids=["mixed types"])
def test_shards_of_mixed_types_in_every_order(subject: Subject, base: GGUFLinearProblem) -> None:
    """Files of the K-quant mixes give each tensor a type of its own."""
    for problem in _permutations(base):
        check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-03")
@pytest.mark.parametrize("plain", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("arrival", [(0, 1), (1, 0)], ids=["quantised first", "plain first"])
def test_an_unquantised_shard_beside_a_quantised_one(subject: Subject, plain: str, arrival: tuple[int, int]) -> None:
    """Dynamic mixes leave small tensors unquantised."""
    problem = GGUFLinearProblem(shards=(("Q8_0", 32), (plain, 16)), arrival=arrival)
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-04")
@named({"gate_up": GATE_UP, "qkv": QKV, "column": GGUFLinearProblem(layer="column", shards=(("Q8_0", 64),))})
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_each_rank_computes_with_its_own_rows(subject: Subject, problem: GGUFLinearProblem, tp_size: int) -> None:
    """Every rank; key and value heads fewer than the ranks are shared by neighbours."""
    for local in every_rank(problem.replace(tp_size=tp_size, head_dim=8)):
        check_product(subject.gguf_linear(local))


@pytest.mark.requirement("GGUF-LIN-04")
@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
def test_each_rank_computes_with_its_own_columns(subject: Subject, quant: str, tp_size: int) -> None:
    """A row-parallel layer, cut at the edges of blocks."""
    problem = GGUFLinearProblem(layer="row", shards=((quant, 16),), columns=256 * tp_size, tp_size=tp_size)
    for local in every_rank(problem):
        check_product(subject.gguf_linear(local))


@pytest.mark.requirement("GGUF-LIN-04")
@drawn(linear_problems())
def test_drawn_layers_are_right_on_every_rank(subject: Subject, problem: GGUFLinearProblem) -> None:
    """Layers, types, orders, degrees and ranks together."""
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-05")
@pytest.mark.parametrize("layer", ["merged", "column", "row"])
def test_disable_tp_keeps_the_layer_whole(subject: Subject, layer: str) -> None:
    """Rank 1 of two has everything."""
    shards = (("Q8_0", 64), ("Q8_0", 32)) if layer == "merged" else (("Q8_0", 64),)
    problem = GGUFLinearProblem(layer=layer, shards=shards, disable_tp=True, tp_size=2, tp_rank=1, columns=512)
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-06")
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K", "F16"])
def test_a_replicated_layer_may_be_quantised(subject: Subject, quant: str) -> None:
    """As DeepSeek-V2-Lite's kv_a_proj_with_mqa is."""
    problem = GGUFLinearProblem(layer="replicated", shards=((quant, 64),), tp_size=2, tp_rank=1)
    check_product(subject.gguf_linear(problem))


@pytest.mark.requirement("GGUF-LIN-07")
@named(CUTTING)
def test_a_slice_that_cuts_a_block_is_refused_or_exact(subject: Subject, problem: GGUFLinearProblem) -> None:
    """Bytes of half a block mean nothing; a loader that cuts there reads other numbers without a word."""
    local = problem.replace(tp_rank=problem.tp_size - 1)
    try:
        words = subject.gguf_linear_refusal(local)
    except Mismatch as accepted:
        try:
            check_product(subject.gguf_linear(local))
        except Mismatch as wrong:
            raise Mismatch(f"{accepted}, and then: {wrong}") from wrong
        return
    quant = problem.shards[0][0]
    block = {"Q8_0": 32, "Q4_K": 256}[quant]
    _names(words, str(problem.columns), str(block), str(problem.tp_size))


@pytest.mark.requirement("GGUF-LIN-08")
@pytest.mark.parametrize("arrival", [(0,), (1,)], ids=["second is missing", "first is missing"])
def test_a_missing_shard_is_refused_when_loading_ends(subject: Subject, arrival: tuple[int]) -> None:
    """Not at the first forward, when the file's name is forgotten."""
    _names(subject.gguf_linear_refusal(Q_A_AND_KV_A.replace(arrival=arrival)), str(1 - arrival[0]))


@pytest.mark.requirement("GGUF-LIN-09")
@pytest.mark.parametrize(
    ("arrival", "named_id"),
    [((0, 1, 1), "1"), ((0, 1, 7), "7"), ((0, (0, 1)), "(0, 1)")],
    ids=["doubled", "unknown", "tuple"],
)
def test_a_faulty_shard_id_is_refused_by_name(subject: Subject, arrival: tuple[object, ...], named_id: str) -> None:
    """A shard twice, a shard that the layer does not have, two shards as one."""
    _names(subject.gguf_linear_refusal(Q_A_AND_KV_A.replace(arrival=arrival)), named_id)


@pytest.mark.requirement("GGUF-LIN-10")
@named(MODELS)
def test_layers_of_real_models(subject: Subject, problem: GGUFLinearProblem) -> None:
    """Their in-features and types on the ranks that they are run on, with fewer rows."""
    for rank in {0, problem.tp_size - 1}:
        check_product(subject.gguf_linear(problem.replace(tp_rank=rank)))


def _names(words: str, *wanted: str) -> None:
    """The words of a refusal name all that is ``wanted``, numbers as whole ones."""
    absent = [text for text in wanted if not re.search(rf"(?<!\d){re.escape(text)}(?!\d)", words)]
    if absent:
        raise Mismatch(f"the refusal does not name {', '.join(absent)}: {words}")
