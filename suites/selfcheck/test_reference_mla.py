"""The two MLA decode oracles agree with each other and with what attention is by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.reference.absorption import absorb_query, project_output
from mla_conformance.reference.mla import decode_absorbed, decode_expanded, decode_paged
from mla_conformance.reference.paged_cache import build

FAST = settings(derandomize=True, deadline=None, max_examples=50)


@dataclass(frozen=True)
class Problem:
    """Sizes and a seed; the tensors follow from them."""

    heads: int
    latent: int
    nope: int
    rope: int
    v: int
    tokens: int
    softmax_scale: float
    query_size: float
    seed: int

    def draw(self) -> dict[str, Tensor]:
        """Return the arguments of `decode_expanded` in float64."""
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        return {
            "q_nope": normal(self.heads, self.nope) * self.query_size,
            "q_pe": normal(self.heads, self.rope) * self.query_size,
            "ckv": normal(self.tokens, self.latent),
            "kpe": normal(self.tokens, self.rope),
            "w_uk": normal(self.heads, self.nope, self.latent) * self.latent**-0.5,
            "w_uv": normal(self.heads, self.v, self.latent) * self.latent**-0.5,
        }


problems = st.builds(
    Problem,
    heads=st.integers(1, 8),
    latent=st.integers(4, 64),
    nope=st.integers(1, 32),
    rope=st.integers(0, 16),
    v=st.integers(1, 32),
    tokens=st.integers(0, 40),
    softmax_scale=st.floats(0.01, 2.0),
    query_size=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    seed=st.integers(0, 2**32 - 1),
)


def score_bound(x: dict[str, Tensor], softmax_scale: float) -> float:
    """Return 1e-12 times the largest sum of magnitudes behind a score, but at least 1e-12.

    A score passes fewer than 200 roundings, so its error is below 200 * 2^-53 = 2.2e-14 of that sum. Two
    oracles and the division of two exponentials make it 9e-14 of a probability; the rest is margin.
    """
    magnitudes = torch.einsum("hp,hpl,tl->ht", x["q_nope"].abs(), x["w_uk"].abs(), x["ckv"].abs())
    magnitudes = (magnitudes + x["q_pe"].abs() @ x["kpe"].abs().T) * softmax_scale
    return 1e-12 * max([1.0, *magnitudes.flatten().tolist()])


@FAST
@given(problems)
def test_absorbed_and_expanded_agree_after_projection(problem: Problem) -> None:
    """Attention in the latent space, projected, is attention over rebuilt keys and values."""
    x = problem.draw()
    absorbed = decode_absorbed(
        absorb_query(x["q_nope"], x["w_uk"]),
        x["q_pe"],
        x["ckv"],
        x["kpe"],
        softmax_scale=problem.softmax_scale,
    )
    expanded = decode_expanded(**x, softmax_scale=problem.softmax_scale)

    bound = score_bound(x, problem.softmax_scale)
    values = torch.einsum("hvl,tl->htv", x["w_uv"].abs(), x["ckv"].abs())
    largest_value = max([1.0, *values.flatten().tolist()])
    torch.testing.assert_close(
        project_output(absorbed.out, x["w_uv"]), expanded.out, rtol=0, atol=bound * largest_value
    )
    torch.testing.assert_close(absorbed.lse, expanded.lse, rtol=0, atol=bound)


@FAST
@given(problems.filter(lambda p: p.tokens > 0))
def test_lse_and_output_follow_the_definition(problem: Problem) -> None:
    """The absorbed oracle is softmax and logsumexp of the scores written as one sum over all widths."""
    x = problem.draw()
    query = torch.cat([absorb_query(x["q_nope"], x["w_uk"]), x["q_pe"]], dim=1)
    scores = torch.einsum("hd,td->ht", query, torch.cat([x["ckv"], x["kpe"]], dim=1)) * problem.softmax_scale

    result = decode_absorbed(
        query[:, : problem.latent], x["q_pe"], x["ckv"], x["kpe"], softmax_scale=problem.softmax_scale
    )

    bound = score_bound(x, problem.softmax_scale)
    torch.testing.assert_close(result.lse, torch.logsumexp(scores, dim=1), rtol=0, atol=bound)
    expected = torch.einsum("ht,tl->hl", torch.softmax(scores, dim=1), x["ckv"])
    torch.testing.assert_close(result.out, expected, rtol=0, atol=bound * x["ckv"].abs().max().item())


@pytest.mark.parametrize("tokens", [1, 2, 3, 1024])
@pytest.mark.parametrize("score", [-700.0, 0.0, 1.25, 700.0])
def test_equal_keys_give_score_plus_log_of_their_number(tokens: int, score: float) -> None:
    """With n keys of one score s, lse is s + ln n in natural log, and the output is the common value."""
    row = torch.tensor([[1.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    query = torch.tensor([[score, 0.0, 5.0, -5.0]], dtype=torch.float64)
    no_rope = row.new_zeros(1, 0)

    result = decode_absorbed(query, no_rope, row.expand(tokens, -1), no_rope.expand(tokens, -1), softmax_scale=1.0)

    torch.testing.assert_close(result.lse.item(), score + math.log(tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.out, row, rtol=1e-13, atol=0)


@FAST
@given(problems)
def test_no_keys_give_the_identity_of_the_merge(problem: Problem) -> None:
    """Without keys both oracles give out 0 and lse -inf, and never NaN."""
    x = problem.draw()
    x["ckv"], x["kpe"] = x["ckv"][:0], x["kpe"][:0]
    latent_query = absorb_query(x["q_nope"], x["w_uk"])

    for result in (
        decode_absorbed(latent_query, x["q_pe"], x["ckv"], x["kpe"], softmax_scale=1.0),
        decode_expanded(**x, softmax_scale=1.0),
    ):
        assert torch.equal(result.out, torch.zeros_like(result.out))
        assert torch.equal(result.lse, torch.full_like(result.lse, -math.inf))


@FAST
@given(problems)
def test_softmax_scale_multiplies_all_scores(problem: Problem) -> None:
    """Four times the scale is four times the query, latent and rope alike, to the bit."""
    x = problem.draw()
    query = absorb_query(x["q_nope"], x["w_uk"])

    scaled = decode_absorbed(query, x["q_pe"], x["ckv"], x["kpe"], softmax_scale=2.0)
    enlarged = decode_absorbed(4 * query, 4 * x["q_pe"], x["ckv"], x["kpe"], softmax_scale=0.5)

    assert torch.equal(scaled.out, enlarged.out)
    assert torch.equal(scaled.lse, enlarged.lse)


def test_huge_scores_pick_one_key_without_overflow() -> None:
    """Scores of plus and minus 100,000 give the value of the best key and its score."""
    ckv = torch.tensor([[-1.0, 3.0], [1.0, 7.0]], dtype=torch.float64)
    query = torch.tensor([[1e5, 0.0]], dtype=torch.float64)

    result = decode_absorbed(query, ckv.new_zeros(1, 0), ckv, ckv.new_zeros(2, 0), softmax_scale=1.0)

    assert result.out.tolist() == [[1.0, 7.0]]
    assert result.lse.tolist() == [1e5]


@dataclass(frozen=True)
class PagedProblem:
    """A batch of requests whose pages are shuffled over a cache with pages to spare."""

    lengths: list[int]
    page_size: int
    seed: int

    def draw(self, fill: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return the tensors of `decode_paged`, with `fill` in every slot not in use."""
        rng = torch.Generator().manual_seed(self.seed)
        latent, rope, heads = 12, 5, 3
        max_pages = max(-(-length // self.page_size) for length in self.lengths) + 1
        pages = torch.randperm(len(self.lengths) * max_pages, generator=rng)
        block_table = pages.reshape(len(self.lengths), max_pages)
        rows = [torch.randn(n, latent + rope, generator=rng, dtype=torch.float64) for n in self.lengths]
        kv_cache = build(
            [r.to(dtype) for r in rows],
            block_table,
            num_pages=pages.numel(),
            page_size=self.page_size,
            fill=fill,
        )
        for request, length in enumerate(self.lengths):
            block_table[request, -(-length // self.page_size) :] = -(2**40)
        return {
            "q_nope": torch.randn(len(self.lengths), heads, latent, generator=rng, dtype=torch.float64),
            "q_pe": torch.randn(len(self.lengths), heads, rope, generator=rng, dtype=torch.float64),
            "kv_cache": kv_cache,
            "block_table": block_table,
            "seq_lens": torch.tensor(self.lengths),
            "rows": torch.nn.utils.rnn.pad_sequence([r.to(dtype).double() for r in rows], batch_first=True),
        }


paged_problems = st.builds(
    PagedProblem,
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 2, 7, 16]),
    seed=st.integers(0, 2**32 - 1),
)


@FAST
@given(paged_problems)
def test_paged_decode_is_the_expanded_oracle_on_the_contiguous_rows(problem: PagedProblem) -> None:
    """Paging changes where rows lie and nothing else; identity weights make the other oracle apply."""
    x = problem.draw(fill=math.nan)
    rows = x.pop("rows")
    identity = torch.eye(12, dtype=torch.float64).expand(3, -1, -1)

    result = decode_paged(**x, softmax_scale=0.3)

    for request, length in enumerate(problem.lengths):
        expected = decode_expanded(
            x["q_nope"][request],
            x["q_pe"][request],
            rows[request, :length, :12],
            rows[request, :length, 12:],
            identity,
            identity,
            softmax_scale=0.3,
        )
        torch.testing.assert_close(result.out[request], expected.out, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.lse[request], expected.lse, rtol=0, atol=1e-12)


@FAST
@given(paged_problems)
def test_paged_decode_never_reads_an_unused_slot(problem: PagedProblem) -> None:
    """Whatever unused slots hold, the result has the same bits."""
    results = []
    for fill in (math.nan, 0.0, 1e300):
        x = problem.draw(fill)
        del x["rows"]
        results.append(decode_paged(**x, softmax_scale=0.3))

    for other in results[1:]:
        assert torch.equal(results[0].out, other.out)
        assert torch.equal(results[0].lse, other.lse)


@FAST
@given(paged_problems)
def test_fp8_cache_is_widened_and_then_scaled(problem: PagedProblem) -> None:
    """An fp8 cache with scale 0.5 gives the bits of a float64 cache that holds the halved numbers."""
    x = problem.draw(fill=math.nan, dtype=torch.float8_e4m3fn)
    del x["rows"]

    from_bytes = decode_paged(**x, softmax_scale=0.3, cache_scale=0.5)
    widened = decode_paged(**{**x, "kv_cache": x["kv_cache"].double() * 0.5}, softmax_scale=0.3)

    assert torch.equal(from_bytes.out, widened.out)
    assert torch.equal(from_bytes.lse, widened.lse)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("q_pe", torch.zeros(3, 4, dtype=torch.float64), ValueError),
        ("ckv", torch.zeros(5, 7, dtype=torch.float64), ValueError),
        ("kpe", torch.zeros(6, 4, dtype=torch.float64), ValueError),
        ("ckv", torch.zeros(5, 6, dtype=torch.float32), TypeError),
        ("softmax_scale", math.nan, ValueError),
    ],
)
def test_arguments_that_do_not_fit_are_named(argument: str, value: object, error: type[Exception]) -> None:
    """A wrong shape, dtype or scale raises an error that names the argument."""
    arguments: dict[str, object] = {
        "q_nope": torch.zeros(2, 6, dtype=torch.float64),
        "q_pe": torch.zeros(2, 4, dtype=torch.float64),
        "ckv": torch.zeros(5, 6, dtype=torch.float64),
        "kpe": torch.zeros(5, 4, dtype=torch.float64),
        "softmax_scale": 1.0,
    }
    with pytest.raises(error, match=argument):
        decode_absorbed(**{**arguments, argument: value})  # type: ignore[arg-type]
    if argument != "softmax_scale":
        # W_UK and W_UV that fit the good arguments; the other oracle checks on its own.
        weights = {"w_uk": torch.zeros(2, 6, 6).double(), "w_uv": torch.zeros(2, 3, 6).double()}
        with pytest.raises(error):
            decode_expanded(**{**arguments, argument: value}, **weights)  # type: ignore[arg-type]
