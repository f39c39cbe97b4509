"""GGUFExperts against gguf-py's values, every token and expert by itself, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.kernels.gguf.experts import GGUFExperts, expert_slice
from mla_conformance.kernels.gguf.formats import find
from mla_conformance.suites.selfcheck.gguf_weights import BLOCK_32, BLOCK_256, PLAIN, weight

NAMES = ("gate", "up", "down")


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, and how they are spread."""

    experts: int = 3
    hidden: int = 64
    intermediate: int = 32
    quants: tuple[str, str, str] = ("Q4_0", "Q8_0", "Q5_1")
    tp_size: int = 1
    disable_tp: bool = False
    on_uneven: Any = "error"
    dtype: torch.dtype = torch.float32
    tokens: int = 4

    def shape(self, name: str) -> tuple[int, int, int]:
        """Shape of a projection in the whole model."""
        rows, columns = self.intermediate, self.hidden
        return (self.experts, columns, rows) if name == "down" else (self.experts, rows, columns)

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bytes and values by projection."""
        return {name: weight(self.quants[i], self.shape(name), i) for i, name in enumerate(NAMES)}

    def load(self, rank: int, kind: type[GGUFExperts] = GGUFExperts) -> GGUFExperts:
        """The layer on one rank, its tensors loaded in a file's order."""
        made = kind(
            self.experts,
            self.hidden,
            self.intermediate,
            tp_rank=rank,
            tp_size=self.tp_size,
            disable_tp=self.disable_tp,
            on_uneven=self.on_uneven,
        )
        weights = self.weights()
        for name in ("down", "gate", "up"):
            made.load(name, weights[name][0], self.quants[NAMES.index(name)])
        return made


def by_hand(case: Mixture, x: Tensor, ids: Tensor, scores: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Exact result and error bound of the declared arithmetic: float32 sums of any order, roundings to x's dtype."""
    part = slice(None)
    if not case.disable_tp:
        width = case.intermediate // case.tp_size
        part = slice(rank * width, (rank + 1) * width)
    values = {name: pair[1] for name, pair in case.weights().items()}
    gate, up, down = values["gate"][:, part], values["up"][:, part], values["down"][:, :, part]
    gate, up, down = (w.to(x.dtype).double() for w in (gate, up, down))
    u32, u_x = 2.0**-24, torch.finfo(x.dtype).eps / 2

    def product(w: Tensor, row: Tensor, error: Tensor | float) -> tuple[Tensor, Tensor]:
        out, slack = w @ row, len(row) * u32 * (w.abs() @ row.abs()) + w.abs() @ (torch.zeros_like(row) + error)
        return out, slack + u_x * (out.abs() + slack)

    out, bound = torch.zeros(2, *x.shape).double()
    magnitude = torch.zeros(x.shape).double()
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        expert, score = int(ids[token, slot]), float(scores[token, slot])
        g, g_error = product(gate[expert], x[token].double(), 0.0)
        u, u_error = product(up[expert], x[token].double(), 0.0)
        inner = torch.nn.functional.silu(g) * u
        # silu is steep by at most 1.1; its float32 evaluation and the product take at most 8 roundings.
        error = 1.1 * g_error * (u.abs() + u_error) + torch.nn.functional.silu(g).abs() * u_error
        error = error + (u_x + 8 * u32) * (inner.abs() + error) + 2.0**-25
        y, y_error = product(down[expert], inner, error)
        out[token] += score * y
        bound[token] += abs(score) * y_error
        magnitude[token] += abs(score) * (y.abs() + y_error)
    bound = bound + (2 * ids.shape[1] + 2) * u32 * magnitude
    return out, bound + u_x * (out.abs() + bound)


def judge(case: Mixture, kind: type[GGUFExperts] = GGUFExperts, rank: int | None = None) -> None:
    """Hold a rank's result (default: the last one's) to the bound."""
    rank = case.tp_size - 1 if rank is None else rank
    source = torch.Generator().manual_seed(11)
    x = torch.randn(case.tokens, case.hidden, generator=source).to(case.dtype) / 8
    ids = torch.randint(case.experts, (case.tokens, 2), generator=source)
    scores = torch.randn(case.tokens, 2, generator=source)
    out = case.load(rank, kind)(x, ids, scores)
    right, bound = by_hand(case, x, ids, scores, rank)
    assert out.dtype == case.dtype
    assert bool(((out.double() - right).abs() <= bound).all())


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Any types a projection, spread between blocks."""
    tp_size, large = draw(st.sampled_from([1, 2, 4, 8])), draw(st.booleans())
    of_gate_up = st.sampled_from(PLAIN + BLOCK_32 + (BLOCK_256 if large else ()))
    return Mixture(
        hidden=256 if large else 32,
        experts=2,
        intermediate=32 * tp_size,
        quants=(draw(of_gate_up), draw(of_gate_up), draw(st.sampled_from(PLAIN + BLOCK_32))),
        tp_size=tp_size,
        disable_tp=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        tokens=draw(st.integers(0, 3)),
    )


@given(mixtures(), st.integers(0, 7))
def test_any_mixture_gives_its_ranks_part_of_the_sum(case: Mixture, rank: int) -> None:
    """Each projection by its own type and cut."""
    judge(case, rank=rank % case.tp_size)


@pytest.mark.parametrize(
    ("intermediate", "quant", "tp_size"), [(1536, "Q4_K", 4), (1408, "Q8_0", 8)], ids=["GLM-4.7-Flash", "V2-Lite"]
)
def test_a_cut_inside_a_block_of_down_is_refused_or_exact(intermediate: int, quant: str, tp_size: int) -> None:
    """Real widths: an error with dimension, block and degree, or float32 storage."""
    case = Mixture(2, 32, intermediate, ("Q8_0", "Q4_0", quant), tp_size, tokens=1)
    block = find(quant).block_elements
    with pytest.raises(ValueError, match=rf"intermediate is {intermediate}.*tp_size of {tp_size}.*blocks of {block}\b"):
        judge(case)
    judge(replace(case, on_uneven="dequantize"))


class RankZero(GGUFExperts):
    """Loads the first rank's part on every rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"tp_rank": 0}))


class AlwaysSliced(GGUFExperts):
    """Pays no heed to disable_tp."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable_tp": False}))


class Swapped(GGUFExperts):
    """Takes gate for up."""

    def load(self, projection: Any, data: Tensor, quant: str | int | None = None) -> None:
        super().load({"gate": "up", "up": "gate"}.get(projection, projection), data, quant)  # type: ignore[arg-type]


class TypeOfGate(GGUFExperts):
    """Decodes up by gate's type, as a fused pair with one type does; both types have blocks of equal size here."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self._stored["up"] = self._stored["gate"]
        return super().forward(x, topk_ids, topk_weights)


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (RankZero, Mixture(intermediate=64, tp_size=2)),
        (AlwaysSliced, Mixture(intermediate=64, tp_size=2, disable_tp=True)),
        (Swapped, Mixture()),
        (TypeOfGate, Mixture(quants=("Q4_0", "IQ4_NL", "Q8_0"))),
    ],
)
def test_planted_faults_fail_the_comparison(broken: type[GGUFExperts], case: Mixture) -> None:
    """Each gives another sum where the layer itself gives the right one."""
    judge(case)
    with pytest.raises(AssertionError):
        judge(case, broken)


def test_an_expert_that_no_token_chose_is_not_read() -> None:
    """A layer of NaN experts but one gives what the one gives."""
    case = Mixture(quants=("F32", "F32", "F32"))
    made, poisoned = case.load(0), case.load(0)
    for name in NAMES:
        values = poisoned.get_buffer(name).view(torch.float32)
        values[0], values[2] = torch.nan, torch.nan
    call = (torch.randn(2, 64), torch.full((2, 1), 1), torch.ones(2, 1))
    torch.testing.assert_close(poisoned(*call), made(*call), rtol=0, atol=0)


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    """Nor whether an id is given twice or once with the summed weight: the same bits."""
    made, x = Mixture().load(0), torch.randn(1, 64)
    ids, scores = torch.tensor([[2, 0, 0]]), torch.tensor([[0.5, 0.25, 0.125]])
    right = made(x, ids, scores)
    torch.testing.assert_close(made(x, ids.flip(1), scores.flip(1)), right, rtol=0, atol=0)
    torch.testing.assert_close(made(x, ids[:, :2], torch.tensor([[0.5, 0.375]])), right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_ids": torch.tensor([[3], [0]])}, ValueError, r"topk_ids has \[3\]; this layer has experts 0 to 2"),
        ({"topk_ids": torch.tensor([[-1], [0]])}, ValueError, r"topk_ids has \[-1\]"),
        ({"topk_ids": torch.zeros(2, 1)}, TypeError, "topk_ids has dtype torch.float32"),
        ({"topk_ids": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, r"topk_ids has shape \[1, 1\]"),
        ({"topk_weights": torch.ones(2, 2)}, ValueError, r"topk_weights has shape \[2, 2\]"),
        ({"topk_weights": torch.ones(2, 1, dtype=torch.int64)}, TypeError, "topk_weights has dtype torch.int64"),
        ({"topk_weights": [1.0, 1.0]}, TypeError, "topk_weights is a list"),
        ({"x": torch.zeros(2, 32)}, ValueError, r"x has shape \[2, 32\]; pass \[tokens, 64\]"),
    ],
)
def test_a_wrong_call_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """An id that is no expert's above all."""
    call = {"x": torch.zeros(2, 64), "topk_ids": torch.zeros(2, 1, dtype=torch.int64), "topk_weights": torch.ones(2, 1)}
    with pytest.raises(error, match=message):
        Mixture().load(0)(**(call | change))


@pytest.mark.parametrize(
    ("projection", "data", "quant", "error", "message"),
    [
        ("down", torch.zeros(3, 64, 34, dtype=torch.uint8), "Q8_0", ValueError, "'down' was loaded before"),
        ("gate_up", torch.zeros(3, 64, 34, dtype=torch.uint8), "Q8_0", ValueError, "projection is 'gate_up'"),
        ("up", torch.zeros(2, 32, 68, dtype=torch.uint8), "Q8_0", ValueError, r"up needs \[3, 32, any\]"),
        ("up", torch.zeros(32, 68, dtype=torch.uint8), "Q8_0", ValueError, r"up needs \[3, 32, any\]"),
        ("up", torch.zeros(3, 32, 34, dtype=torch.uint8), "Q8_0", ValueError, "34 bytes a row; hidden 64 in Q8_0"),
        ("up", torch.zeros(3, 32, 144, dtype=torch.uint8), "Q4_K", ValueError, "hidden is 64, no multiple of Q4_K"),
        ("up", torch.zeros(3, 32, 64, dtype=torch.int8), None, TypeError, "data has dtype torch.int8"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    projection: Any, data: Tensor, quant: str | None, error: type[Exception], message: str
) -> None:
    """And what is missing is named when the layer is called."""
    made = GGUFExperts(3, 64, 32)
    made.load("down", *weight("Q8_0", (3, 64, 32), 0)[:1], "Q8_0")
    with pytest.raises(error, match=message):
        made.load(projection, data, quant)
    with pytest.raises(ValueError, match=r"projections \['gate', 'up'\] are not loaded"):
        made(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_expert_slice_is_a_view_of_one_expert() -> None:
    """And refuses what is none."""
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    assert expert_slice(data, 1).data_ptr() == data[1].data_ptr()
    for expert, error in ((2, ValueError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(error, match=r"^expert is"):
            expert_slice(data, expert)
    with pytest.raises(ValueError, match=r"^data has shape \[3, 4\]"):
        expert_slice(data[0], 0)
