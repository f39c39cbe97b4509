"""The repaired interpreter multiplies bfloat16 and float8 as PyTorch does, and refuses what it cannot do."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from mla_conformance.suites.harness import interpreter_repair

SIZE = 32


@pytest.fixture(autouse=True, scope="module")
def repaired() -> None:
    """Repairing twice changes nothing."""
    interpreter_repair.repair()
    interpreter_repair.repair()


@triton.jit
def dot_kernel(a, b, c, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def cast_kernel(a, b, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(b + at, tl.load(a + at).to(b.dtype.element_ty))


@triton.jit
def add_kernel(a, b, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(b + at, tl.load(a + at) + tl.load(a + at))


@triton.jit
def sum_kernel(a, b, COUNT: tl.constexpr):
    tl.store(b, tl.sum(tl.load(a + tl.arange(0, COUNT)), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_dot_agrees_with_pytorch(dtype: torch.dtype) -> None:
    """Products are exact in float32; only the order of the float32 sums differs: 32 terms, 32 unit roundoffs."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(SIZE, SIZE, generator=generator).to(dtype) for _ in range(2))
    c = torch.empty(SIZE, SIZE)
    dot_kernel[(1,)](a, b, c, SIZE)
    bound = SIZE * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - a.double() @ b.double()).abs() <= bound).all()
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_casts_round_to_nearest_even(target: torch.dtype) -> None:
    """Ties, subnormals, overflow, infinities and NaN, bit for bit as PyTorch casts them."""
    special = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1e-40, 6e-8, 65520.0, 3.4e38, torch.inf, -torch.inf, torch.nan]
    values = torch.cat((torch.tensor(special), torch.randn(502, generator=torch.Generator().manual_seed(2))))
    result = torch.empty(512, dtype=target)
    cast_kernel[(1,)](values, result, 512)
    torch.testing.assert_close(result, values.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_every_float8_code_widens_to_its_value(source: torch.dtype, target: torch.dtype) -> None:
    """All 256 codes, NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).view(source)
    result = torch.empty(256, dtype=target)
    cast_kernel[(1,)](codes, result, 256)
    torch.testing.assert_close(result, codes.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", [add_kernel, sum_kernel])
def test_other_bfloat16_arithmetic_is_refused(kernel: object) -> None:
    """Better no verdict than arithmetic on bit patterns."""
    values = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError) as caught:
        kernel[(1,)](values, torch.empty_like(values), 16)
    assert interpreter_repair.refusal(caught.value) is not None


def test_the_probe_finds_the_fault_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the repaired dot product replaced by one on bit patterns, the probe names the fault."""
    assert interpreter_repair.probe() is None

    def on_bit_patterns(self, a, b, d, *rest):
        product = a.data.astype("float32") @ b.data.astype("float32")
        return triton.runtime.interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(triton.runtime.interpreter.InterpreterBuilder, "create_dot", on_bit_patterns)
    assert "triton-lang/triton#11584" in str(interpreter_repair.probe())
