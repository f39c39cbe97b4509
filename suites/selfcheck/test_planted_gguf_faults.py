"""Each planted fault of a GGUF operation is caught by the requirement that one would expect, a right answer by none."""

from __future__ import annotations

from typing import Any

import pytest

from mla_conformance.suites.gguf import test_dequantize, test_kv_b, test_linear, test_matmul, test_names
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.cubin import CompiledKernel
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.lanes.compile import Lane as CompileLane
from mla_conformance.suites.harness.problems import GGUFDequantizeProblem, GGUFLinearProblem, GGUFNamesProblem
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.harness.targets import TARGETS
from mla_conformance.suites.selfcheck import broken_gguf as matrices
from mla_conformance.suites.selfcheck import broken_gguf_layers as layers
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize, undecorated
from mla_conformance.suites.target import test_gguf_budget as budget

deq, mul, lin, kvb, names = test_dequantize, test_matmul, test_linear, test_kv_b, test_names
Q4_0, Q8_0 = (GGUFDequantizeProblem(quant=quant) for quant in ("Q4_0", "Q8_0"))
MODERATE = GGUFDequantizeProblem(values="moderate")
PRODUCT = mul.BASE
KV_A_FIRST = lin.Q_A_AND_KV_A.replace(arrival=(1, 0))
SAME_SIZE = GGUFLinearProblem(shards=(("Q4_0", 16), ("IQ4_NL", 32)))
COLUMN = GGUFLinearProblem(layer="column", shards=(("Q8_0", 64),))
SMALL = GGUFNamesProblem(model="DeepSeek-V3", layers=3)
EXPERTS = GGUFNamesProblem(model="DeepSeek-V3", layers=4)
PREDICTOR = GGUFNamesProblem(model="GLM-5", layers=4, mtp=True)

# Fault, the test that must catch it, and what the test is called with beside the subject.
CAUGHT: list[tuple[type[Implementation], Any, dict[str, Any]]] = [
    (matrices.NibblesSwapped, deq.test_random_blocks_have_ggmls_bits, {"problem": Q4_0}),
    (
        matrices.SubnormalFactorsAreZero,
        deq.test_hostile_factors_have_ggmls_bits,
        {"problem": Q8_0, "values": "denormal"},
    ),
    (matrices.RoundsTwice, deq.test_narrow_results_are_rounded_once, {"problem": MODERATE, "dtype": "bfloat16"}),
    (matrices.RoundsTheFactor, deq.test_narrow_results_are_rounded_once, {"problem": Q8_0, "dtype": "bfloat16"}),
    (matrices.TopOfIQ3SIsFifteenAndAHalf, deq.test_every_entry_of_a_grid_is_right, {"quant": "IQ3_S"}),
    (matrices.OneRowOfIQ2XSWrong, deq.test_every_entry_of_a_grid_is_right, {"quant": "IQ2_XS"}),
    (matrices.ReadsDenseRows, deq.test_odd_strides_and_unaligned_starts, {"problem": Q8_0}),
    (matrices.BlocksInFours, deq.test_any_number_of_rows_and_blocks, {"problem": MODERATE.replace(columns=2816)}),
    (matrices.RowsOfOneTile, deq.test_any_number_of_rows_and_blocks, {"problem": MODERATE.replace(rows=37)}),
    (
        matrices.LeavesTheLastRow,
        deq.test_memory_that_must_not_matter_changes_no_bit,
        {"quant": "Q4_K", "poison": "nan"},
    ),
    (
        matrices.LeavesTheLastRow,
        deq.test_memory_that_must_not_matter_changes_no_bit,
        {"quant": "Q6_K", "poison": "huge"},
    ),
    (
        matrices.WritesAByteBeside,
        deq.test_memory_that_must_not_matter_changes_no_bit,
        {"quant": "Q4_K", "poison": "inf"},
    ),
    (
        matrices.ReturnsAnotherMatrix,
        deq.test_memory_that_must_not_matter_changes_no_bit,
        {"quant": "Q4_K", "poison": "nan"},
    ),
    (matrices.RowOffsetsOf32Bits, deq.test_rows_beyond_32_bit_offsets, {"problem": MODERATE}),
    (matrices.LargestE8M0IsNaN, deq.test_microscaling_factors_follow_ggml_at_the_ends, {}),
    (matrices.Q81InFortyBytes, deq.test_a_block_of_q8_1_is_36_bytes, {"values": "random"}),
    (matrices.OneFactorOnePercentOff, mul.test_product_is_within_the_derived_bound, {"problem": PRODUCT}),
    (matrices.DropsTheLastBlock, mul.test_product_is_within_the_derived_bound, {"problem": PRODUCT}),
    (matrices.EightBitActivations, mul.test_product_is_within_the_derived_bound, {"problem": PRODUCT}),
    (matrices.RoundsWeightsBeyondEight, mul.test_any_number_of_tokens, {"quant": "Q8_0", "tokens": 9}),
    (
        matrices.DeclaresAnotherArithmeticBeyondEight,
        mul.test_one_arithmetic_at_every_number_of_tokens,
        {"quant": "Q8_0", "rows": 37},
    ),
    (matrices.ReadsDenseRows, mul.test_any_layout_and_size, {"problem": PRODUCT.replace(layout="gapped")}),
    (matrices.RowsOfOneTile, mul.test_any_layout_and_size, {"problem": PRODUCT.replace(rows=129)}),
    (matrices.DropsTheLastBlock, mul.test_any_layout_and_size, {"problem": PRODUCT.replace(columns=2816)}),
    (matrices.TokensSeeTheirNeighbours, mul.test_neighbours_change_no_bit, {"quant": "Q8_0", "tokens": 2}),
    (matrices.Float32InBfloat16, mul.test_any_dtype_of_activations, {"problem": PRODUCT.replace(dtype="float32")}),
    (layers.OrderOfArrival, lin.test_q_a_and_kv_a_keep_their_places, {"problem": KV_A_FIRST}),
    (layers.OrderOfArrival, lin.test_every_order_of_arrival_gives_the_layers_order, {"base": lin.QKV}),
    (
        layers.RefusesFusedTensors,
        lin.test_a_tensor_fused_on_disk_is_the_whole_layer,
        {"problem": lin.FOUR.replace(arrival=(None,))},
    ),
    (layers.TypeOfTheFirstArrival, lin.test_shards_of_mixed_types_in_every_order, {"base": SAME_SIZE}),
    (
        layers.TypeOfTheFirstArrival,
        lin.test_shards_of_mixed_types_in_every_order,
        {"base": GGUFLinearProblem(shards=lin.MIXED)},
    ),
    (
        layers.RefusesPlainShards,
        lin.test_an_unquantised_shard_beside_a_quantised_one,
        {"plain": "F16", "arrival": (0, 1)},
    ),
    (layers.SliceOfRankZero, lin.test_each_rank_computes_with_its_own_rows, {"problem": COLUMN, "tp_size": 2}),
    (layers.SliceOfRankZero, lin.test_each_rank_computes_with_its_own_columns, {"quant": "Q4_K", "tp_size": 2}),
    (layers.IgnoresDisableTp, lin.test_disable_tp_keeps_the_layer_whole, {"layer": "merged"}),
    (layers.SlicesReplicatedLayers, lin.test_a_replicated_layer_may_be_quantised, {"quant": "Q4_K"}),
    (
        layers.CutsBlocks,
        lin.test_a_slice_that_cuts_a_block_is_refused_or_exact,
        {"problem": lin.CUTTING["GLM-4.7-Flash expert down"]},
    ),
    (
        layers.CutsBlocks,
        lin.test_a_slice_that_cuts_a_block_is_refused_or_exact,
        {"problem": lin.CUTTING["Q8_0, 256 columns, 16 ranks"]},
    ),
    (
        layers.RefusesWithoutNumbers,
        lin.test_a_slice_that_cuts_a_block_is_refused_or_exact,
        {"problem": lin.CUTTING["GLM-4.7-Flash o_proj"]},
    ),
    (layers.FindsMissingShardsInTheForward, lin.test_a_missing_shard_is_refused_when_loading_ends, {"arrival": (0,)}),
    (
        layers.OverwritesDoubledShards,
        lin.test_a_faulty_shard_id_is_refused_by_name,
        {"arrival": (0, 1, 1), "named_id": "1"},
    ),
    (
        layers.IgnoresUnknownShards,
        lin.test_a_faulty_shard_id_is_refused_by_name,
        {"arrival": (0, 1, 7), "named_id": "7"},
    ),
    (
        layers.AcceptsTuples,
        lin.test_a_faulty_shard_id_is_refused_by_name,
        {"arrival": (0, (0, 1)), "named_id": "(0, 1)"},
    ),
    (
        layers.AssertsInsteadOfRefusing,
        lin.test_a_faulty_shard_id_is_refused_by_name,
        {"arrival": (0, 1, 7), "named_id": "7"},
    ),
    (layers.ColumnsUpTo4096, lin.test_layers_of_real_models, {"problem": lin.MODELS["GLM-5 fused_qkv_a"]}),
    (layers.SliceOfRankZero, lin.test_layers_of_real_models, {"problem": lin.MODELS["GLM-4.7-Flash o_proj"]}),
    (layers.ValuesBeforeKeys, kvb.test_a_fused_kv_b_is_absorbed_bit_for_bit, {"problem": kvb.FUSED}),
    (
        layers.KvBRoundedTwice,
        kvb.test_a_fused_kv_b_is_absorbed_bit_for_bit,
        {"problem": kvb.FUSED.replace(dtype="bfloat16")},
    ),
    (layers.KeysNotTransposed, kvb.test_split_k_b_and_v_b_give_the_same_as_kv_b, {"problem": kvb.SPLIT}),
    (layers.KeysNotTransposed, kvb.test_sizes_of_real_models, {"base": kvb.SPLIT, "sizes": kvb.DEEPSEEK}),
    (layers.DropsKeys, names.test_no_tensor_of_the_file_is_dropped, {"problem": SMALL}),
    (layers.DropsThePredictor, names.test_no_tensor_of_the_file_is_dropped, {"problem": PREDICTOR}),
    (layers.InventsAnExpert, names.test_every_parameter_is_filled_and_none_invented, {"problem": EXPERTS}),
    (layers.ForgetsAnExpert, names.test_every_parameter_is_filled_and_none_invented, {"problem": EXPERTS}),
]

FITS = CompiledKernel(
    name="planted_kernel",
    target="sm_120",
    shared_bytes=101_376,
    registers=255,
    stack_bytes=0,
    spill_loads=0,
    spill_stores=0,
    tensor_core_instructions={},
    async_copies={},
    global_loads=1,
    programs=128,
    num_warps=4,
    num_stages=1,
    constants={},
    triton="",
    ptxas="",
    hash="",
).as_dict()
"""A kernel with all that sm_120 has: a quarter of a load for each element of ``budget.DEQUANTIZE``."""
DOES_NOT_COMPILE = {"error": "compile", "message": "planted"}

# What the compile worker says of a fault, and the test that must catch it.
OVER_BUDGET: list[tuple[dict[str, Any], Any]] = [
    ({"kernels": [FITS, FITS | {"shared_bytes": 101_377}]}, budget.test_dequantisation_fits_the_target),
    ({"kernels": [FITS | {"stack_bytes": 8}]}, budget.test_dequantisation_fits_the_target),
    (DOES_NOT_COMPILE, budget.test_dequantisation_fits_the_target),
    ({"kernels": [FITS | {"global_loads": 2}]}, budget.test_dequantisation_loads_words),
    ({"kernels": [FITS, FITS]}, budget.test_dequantisation_loads_words),
    ({"kernels": [FITS | {"shared_bytes": 101_377}]}, budget.test_products_fit_the_target),
    ({"kernels": [FITS | {"spill_stores": 1}]}, budget.test_products_fit_the_target),
    ({"kernels": []}, budget.test_products_fit_the_target),
    (DOES_NOT_COMPILE, budget.test_products_fit_the_target),
]


class Answers:
    """Takes a compile worker's place, with one answer to everything."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def ask(self, request: Any) -> dict[str, Any]:
        return self.answer


@pytest.mark.parametrize(
    ("fault", "test", "arguments"), CAUGHT, ids=[f"{fault.name}-{test.__name__}" for fault, test, _ in CAUGHT]
)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    right = layers.Names() if issubclass(fault, kernels.Adapter) else Broken()
    undecorated(test)(subject=Subject(right, AnySize()), **arguments)
    with pytest.raises(Mismatch):
        undecorated(test)(subject=Subject(fault(), AnySize()), **arguments)


@pytest.mark.parametrize(("answer", "test"), OVER_BUDGET)
def test_kernel_over_its_budget_fails_its_requirement(answer: dict[str, Any], test: Any) -> None:
    """As does one that does not compile; a kernel that uses just what there is passes."""
    problem = (budget.MATMUL if "products" in test.__name__ else budget.DEQUANTIZE)[budget.QUANTS.index("Q4_K")]
    test(compiler=compiler({"kernels": [FITS]}), problem=problem)
    with pytest.raises(Mismatch):
        test(compiler=compiler(answer), problem=problem)


def compiler(answer: dict[str, Any]) -> Compiler:
    """A compiler for sm_120 that says this of every problem."""
    return Compiler("planted", Broken(), CompileLane(), TARGETS["sm_120"], worker=Answers(answer))


def test_every_gguf_requirement_has_a_planted_fault() -> None:
    """A requirement that nothing was ever seen to break might be one that nothing can."""
    tests = [test for _, test, _ in CAUGHT] + [test for _, test in OVER_BUDGET]
    planted = {i for test in tests for mark in test.pytestmark if mark.name == "requirement" for i in mark.args}
    assert planted == {i for i in requirements.load() if i.startswith("GGUF-")}
