"""The fused multiplication with a quantised matrix: values, bits, layouts, refusals, and that a fault would be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_conformance.kernels.gguf import matmul_launch
from mla_conformance.kernels.gguf.decode import DECODE
from mla_conformance.kernels.gguf.formats import FORMATS
from mla_conformance.kernels.gguf.matmul import matmul
from mla_conformance.kernels.launch import SM90, SM100, SM120
from mla_conformance.reference.gguf import dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, matmul_bound, matmul_oracle
from mla_conformance.suites.harness.blocks import draw

# Two tiles of rows, the second nearly empty; four steps.
ROWS, COLUMNS = 37, 256
MANY = 17
"""One token more than the fused kernel takes."""


def case(
    quant: str, tokens: int, dtype: torch.dtype = torch.float16, rows: int = ROWS, columns: int = COLUMNS
) -> tuple[Tensor, Tensor]:
    """Activations and the bytes of a matrix, always the same for the same sizes."""
    generator = torch.Generator().manual_seed(7)
    data = draw(quant, rows, columns, "moderate", generator)
    return torch.randn(tokens, columns, generator=generator).to(dtype), data


def worst(out: Tensor, x: Tensor, data: Tensor, quant: str) -> float:
    """The largest error over its bound."""
    name = str(x.dtype).removeprefix("torch.")
    weight = dequantize(data, quant).double()
    bound = matmul_bound(x.double(), weight, MatmulArithmetic("float64", weights=name, output=name))
    error = (out.double() - matmul_oracle(x, weight)).abs() / bound.out
    return float(error.nan_to_num(torch.inf).max())


@pytest.mark.parametrize("quant", sorted(set(FORMATS) - {"F32"}))
def test_every_type_is_right(quant: str) -> None:
    """Three float16 tokens, within the derived bound."""
    x, data = case(quant, 3)
    assert worst(matmul(x, data, quant), x, data, quant) <= 1


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7, 16, MANY])
@pytest.mark.parametrize(("quant", "dtype"), [("Q4_K", torch.float16), ("Q8_0", torch.float32), ("F32", torch.float32)])
def test_every_number_of_tokens_is_right(quant: str, dtype: torch.dtype, tokens: int) -> None:
    """One contract on both sides of every switch between kernels, ours and others'."""
    x, data = case(quant, tokens, dtype)
    assert worst(matmul(x, data, quant), x, data, quant) <= 1


@pytest.mark.parametrize(("quant", "dtype"), [("Q4_K", torch.float16), ("Q8_0", torch.float32)])
def test_a_token_has_the_same_bits_among_any_others(quant: str, dtype: torch.dtype) -> None:
    """From 1 to 16 tokens, also beside tokens that are not finite."""
    x, data = case(quant, 16, dtype)
    together = matmul(x, data, quant)
    for tokens in (1, 2, 3, 7, 15):
        assert torch.equal(matmul(x[:tokens], data, quant), together[:tokens])
    x[1:] = torch.nan
    assert torch.equal(matmul(x, data, quant)[0], together[0])


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_slices_is_right_and_repeatable(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are added in one order."""
    monkeypatch.setattr(matmul_launch, "choose_num_splits", lambda *_: splits)
    x, data = case("Q6_K", 2, rows=17)
    out = matmul(x, data, "Q6_K")
    assert worst(out, x, data, "Q6_K") <= 1
    assert torch.equal(matmul(x, data, "Q6_K"), out)


@pytest.mark.parametrize("run", [2, 4, 8])
def test_a_wrong_run_costs_no_correctness(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming columns changes the order of the sum only."""
    monkeypatch.setattr(matmul_launch, "run", lambda *_: run)
    x, data = case("Q5_K", 2)
    assert worst(matmul(x, data, "Q5_K"), x, data, "Q5_K") <= 1


@pytest.mark.parametrize("step", [32, 64, 128])
@pytest.mark.parametrize("block_n", [16, 32])
def test_any_tile_is_right(step: int, block_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that another target may get."""
    config = matmul_launch.MatmulConfig(block_n, step, 1)
    monkeypatch.setattr(matmul_launch, "matmul_config", lambda *_: config)
    x, data = case("Q4_0", 2, columns=480)
    assert worst(matmul(x, data, "Q4_0"), x, data, "Q4_0") <= 1


@pytest.mark.parametrize("tokens", [2, MANY])
@pytest.mark.parametrize(
    ("quant", "columns"), [("Q8_0", 288), ("MXFP4", 32), ("F16", 40), ("F16", 37), ("BF16", 1), ("Q4_K", 512)]
)
def test_any_number_of_columns_is_right(quant: str, columns: int, tokens: int) -> None:
    """Whole blocks that fill no step; plain numbers in any count."""
    x, data = case(quant, tokens, columns=columns)
    assert worst(matmul(x, data, quant), x, data, quant) <= 1


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_any_number_of_rows_is_right(rows: int) -> None:
    """Around the edge of a tile."""
    x, data = case("Q8_0", 2, rows=rows)
    assert worst(matmul(x, data, "Q8_0"), x, data, "Q8_0") <= 1


@pytest.mark.parametrize("tokens", [3, MANY])
@pytest.mark.parametrize("gap", [1, 2, 4, 16])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K", "F32"])
def test_layout_changes_no_bit(quant: str, gap: int, tokens: int) -> None:
    """Rows of x, of the matrix and of the output at odd distances from odd addresses on; the gaps stay as they were."""
    x, data = case(quant, tokens)
    plain = matmul(x, data, quant)
    wide_x = torch.full((tokens, COLUMNS + 3), torch.nan, dtype=x.dtype)
    wide_x[:, 1:-2] = x
    bytes_ = torch.full((ROWS, data.shape[1] + gap), 0xFF, dtype=torch.uint8)
    bytes_[:, gap:] = data
    wide_out = torch.full((tokens, ROWS + 5), -7.0, dtype=x.dtype)
    out = wide_out[:, 2:-3]
    assert matmul(wide_x[:, 1:-2], bytes_[:, gap:], quant, out=out) is out
    assert torch.equal(out, plain)
    assert (wide_out[:, :2] == -7).all()
    assert (wide_out[:, -3:] == -7).all()


def test_a_type_is_given_by_name_or_number() -> None:
    """12 is Q4_K."""
    x, data = case("Q4_K", 1)
    assert torch.equal(matmul(x, data, 12), matmul(x, data, "Q4_K"))


def test_leading_dimensions_are_kept() -> None:
    """One token without a dimension for it, and a batch of sequences."""
    x, data = case("Q8_0", 6)
    flat = matmul(x, data, "Q8_0")
    assert torch.equal(matmul(x[0], data, "Q8_0"), flat[0])
    assert torch.equal(matmul(x.view(2, 3, -1), data, "Q8_0"), flat.view(2, 3, -1))
    out = torch.empty(2, 3, ROWS, dtype=x.dtype)
    assert matmul(x.view(2, 3, -1), data, "Q8_0", out=out) is out
    assert torch.equal(out, flat.view(2, 3, -1))


def test_nothing_to_do_is_done() -> None:
    """No tokens, no rows; no columns give zeros."""
    x, data = case("Q8_0", 2)
    assert matmul(x[:0], data, "Q8_0").shape == (0, ROWS)
    assert matmul(x[None, :0], data, "Q8_0").shape == (1, 0, ROWS)
    assert matmul(x, data[:0], "Q8_0").shape == (2, 0)
    assert matmul(x[:0], data[:0], "Q8_0").shape == (0, 0)
    assert not matmul(x[:, :0], data[:, :0], "Q8_0").any()


def test_a_weight_that_is_not_finite_stays_in_its_row() -> None:
    """The last block of the last row, which clamped reads meet again: NaN there, bits as before elsewhere."""
    x, data = case("Q8_0", 2, columns=480)
    before = matmul(x, data, "Q8_0")
    data[-1, -34:-32] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    after = matmul(x, data, "Q8_0")
    assert after[:, -1].isnan().all()
    assert torch.equal(after[:, :-1], before[:, :-1])


def test_an_infinite_weight_gives_infinity() -> None:
    """And not NaN, as a product of zero with a repeated read would."""
    x, data = case("Q8_0", 1, columns=480)
    data[-1, -34:] = 1
    data[-1, -34:-32] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    assert (matmul(x.abs(), data, "Q8_0")[:, -1] == torch.inf).all()


def test_a_large_product_sums_in_float32_whatever_the_process_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches are right while torch multiplies, and as before afterwards, also after an error."""
    switches = torch.backends.cuda.matmul
    names = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(switches, name) for name in names}
    seen = []

    def note(*_: Any, **__: Any) -> None:
        seen.append([getattr(switches, name) for name in names])
        raise ArithmeticError

    x, data = case("Q8_0", MANY)
    try:
        for name in names:
            setattr(switches, name, "tf32" if name == "fp32_precision" else True)
        monkeypatch.setattr(torch, "matmul", note)
        with pytest.raises(ArithmeticError):
            matmul(x, data, "Q8_0")
        assert seen == [["ieee", False, False]]
        assert [getattr(switches, name) for name in names] == ["tf32", True, True]
    finally:
        for name, value in before.items():
            setattr(switches, name, value)


@triton.jit
def _decode_of_the_next_group(ptr, block, group, tables, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    return RIGHT(ptr, block, group ^ 1, tables, ALIGN)


@triton.jit
def _decode_one_percent_off(ptr, block, group, tables, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    return RIGHT(ptr, block, group, tables, ALIGN) * 1.01


RIGHT = DECODE["Q8_0"]


@pytest.mark.parametrize("fault", [_decode_of_the_next_group, _decode_one_percent_off])
def test_a_planted_fault_of_decoding_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that judges the tests above is not too wide for them."""
    monkeypatch.setitem(DECODE, "Q8_0", fault)
    x, data = case("Q8_0", 2)
    assert worst(matmul(x, data, "Q8_0"), x, data, "Q8_0") > 1


def test_a_planted_fault_of_slicing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that believes the row to be one block of 32 shorter."""
    x, data = case("Q8_0", 2)
    assert worst(matmul(x[:, :-32], data[:, :-34], "Q8_0"), x, data, "Q8_0") > 1


def test_every_target_has_configurations() -> None:
    """For every family, kind and type."""
    for family in (SM90, SM100, SM120):
        for kind in ("half", "fp32"):
            assert (family, kind) in matmul_launch.MATMUL_CONFIGS
    configs = (matmul_launch.MATMUL_CONFIGS, matmul_launch.FORMAT_CONFIGS, matmul_launch.IRREGULAR_CONFIGS)
    for config in (config for table in configs for config in table.values()):
        assert config.block_n % 16 == 0
        assert config.step % 32 == 0
    named = {quant for _, _, quant in matmul_launch.FORMAT_CONFIGS} | {quant for quant, _ in matmul_launch.VERSION_RUNS}
    assert named | set(matmul_launch.RUNS) <= set(FORMATS)


def test_the_number_of_slices_fills_the_gpu_and_not_more() -> None:
    """A small matrix is cut, a large one is not, and no slice is shorter than worthwhile."""
    config = matmul_launch.MatmulConfig(block_n=32, step=64, programs_per_sm=16)
    assert matmul_launch.choose_num_splits(config, 200_000, 4096, 132) == 1
    assert matmul_launch.choose_num_splits(config, 32, 128, 132) == 1
    splits = matmul_launch.choose_num_splits(config, 512, 8192, 132)
    assert 16 <= splits <= 8192 // 64 // matmul_launch.MIN_STEPS_PER_SPLIT


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("x", lambda x, d: {"x": [1.0]}, TypeError),
        ("x", lambda x, d: {"x": x.double()}, TypeError),
        ("x", lambda x, d: {"x": x[:, :-32]}, ValueError),
        ("x", lambda x, d: {"x": x[0, 0]}, ValueError),
        ("x", lambda x, d: {"x": x.T.contiguous().T}, ValueError),
        ("data", lambda x, d: {"data": d.numpy()}, TypeError),
        ("data", lambda x, d: {"data": d.view(torch.int8)}, TypeError),
        ("data", lambda x, d: {"data": d[None]}, ValueError),
        ("data", lambda x, d: {"data": d[:, :-1]}, ValueError),
        ("data", lambda x, d: {"data": d.T.contiguous().T}, ValueError),
        ("data", lambda x, d: {"data": d.to("meta")}, ValueError),
        ("quant", lambda x, d: {"quant": "Q9_9"}, ValueError),
        ("quant", lambda x, d: {"quant": "F64"}, ValueError),
        ("quant", lambda x, d: {"quant": None}, TypeError),
        ("out", lambda x, d: {"out": [0]}, TypeError),
        ("out", lambda x, d: {"out": torch.empty(2, ROWS)}, TypeError),
        ("out", lambda x, d: {"out": x.new_empty(ROWS, 2)}, ValueError),
        ("out", lambda x, d: {"out": x.new_empty(ROWS, 2).T}, ValueError),
        ("out", lambda x, d: {"out": x.new_empty(1, ROWS).expand(2, ROWS)}, ValueError),
        ("out", lambda x, d: {"out": x.new_empty(2, ROWS, device="meta")}, ValueError),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, change: Any, error: type[Exception]) -> None:
    """Before anything is launched, with the argument's name in the message."""
    x, data = case("Q8_0", 2)
    with pytest.raises(error, match=rf"^{name}\b"):
        matmul(**({"x": x, "data": data, "quant": "Q8_0"} | change(x, data)))


def test_tokens_at_no_one_distance_are_refused() -> None:
    """An output whose leading dimensions do not merge cannot be written in place."""
    x, data = case("Q8_0", 4)
    out = torch.empty(2, 3, ROWS, dtype=x.dtype)[:, :2]
    with pytest.raises(ValueError, match=r"^out has strides"):
        matmul(x.view(2, 2, -1), data, "Q8_0", out=out)
