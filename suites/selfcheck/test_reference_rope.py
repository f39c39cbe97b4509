"""RoPE pairs the right dimensions, rotates them the right way, and YaRN slows the right pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.reference.rope import rope_frequencies, rotate_half_split, rotate_interleaved
from mla_conformance.reference.softmax_scale import YarnScaling, rope_magnitude

FAST = settings(derandomize=True, deadline=None, max_examples=60)
Rotate = Callable[..., Tensor]
ROTATIONS = [rotate_interleaved, rotate_half_split]
DEEPSEEK_V3 = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)


def one_hot(dim: int, index: int) -> Tensor:
    """Return [1 token, 1 head, dim] with a single 1."""
    return torch.eye(dim, dtype=torch.float64)[index].reshape(1, 1, dim)


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize(
    ("rotate", "partner"),
    [(rotate_interleaved, lambda i: i ^ 1), (rotate_half_split, lambda i: (i + 4) % 8)],
    ids=["interleaved", "half_split"],
)
def test_one_hot_shows_the_pairing(rotate: Rotate, partner: Callable[[int], int], index: int) -> None:
    """Turning a unit vector puts cos where the 1 was and sin at its partner, with the sign of its side."""
    inv_freq = torch.tensor([0.3, 0.2, 0.1, 0.05], dtype=torch.float64)
    pair = min(index, partner(index)) // 2 if rotate is rotate_interleaved else index % 4
    angle = inv_freq[pair].item()

    turned = rotate(one_hot(8, index), torch.tensor([1]), inv_freq).flatten()

    assert set(turned.nonzero().flatten().tolist()) == {index, partner(index)}
    assert turned[index].item() == pytest.approx(math.cos(angle), abs=1e-15)
    sign = 1 if index < partner(index) else -1
    assert turned[partner(index)].item() == pytest.approx(sign * math.sin(angle), abs=1e-15)


@FAST
@given(pairs=st.integers(1, 8), rest=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_rotation_is_multiplication_by_a_unit_complex_number(pairs: int, rest: int, seed: int) -> None:
    """Both pairings equal e^(i p f) on the pairs as complex numbers, and leave the other dimensions alone."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 3, 2 * pairs + rest, generator=rng, dtype=torch.float64)
    positions = torch.randint(0, 10000, (2, 5), generator=rng)
    inv_freq = torch.rand(pairs, generator=rng, dtype=torch.float64)
    unit = torch.polar(torch.ones(2, 5, 1, pairs).double(), (positions[..., None] * inv_freq)[:, :, None, :])

    interleaved = rotate_interleaved(x, positions, inv_freq)
    half_split = rotate_half_split(x, positions, inv_freq)

    rotated = x[..., : 2 * pairs]
    by_neighbours = torch.view_as_complex(rotated.reshape(2, 5, 3, pairs, 2).contiguous()) * unit
    by_halves = torch.complex(rotated[..., :pairs], rotated[..., pairs:]) * unit
    expected = {
        "interleaved": torch.view_as_real(by_neighbours).flatten(-2),
        "half_split": torch.cat([by_halves.real, by_halves.imag], dim=-1),
    }
    for name, turned in (("interleaved", interleaved), ("half_split", half_split)):
        torch.testing.assert_close(turned[..., : 2 * pairs], expected[name], rtol=0, atol=1e-14)
        assert torch.equal(turned[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("rotate", ROTATIONS)
@FAST
@given(
    query_position=st.integers(0, 5000),
    distance=st.integers(0, 5000),
    shift=st.integers(0, 5000),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_depend_on_the_distance_only(
    rotate: Rotate, query_position: int, distance: int, shift: int, seed: int
) -> None:
    """Shifting query and key together keeps their product, and rotating keeps the length."""
    rng = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 1, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    inv_freq = rope_frequencies(16, 10000.0)

    def score(offset: int) -> float:
        turned_query = rotate(query, torch.tensor([query_position + offset]), inv_freq)
        turned_key = rotate(key, torch.tensor([query_position + distance + offset]), inv_freq)
        return float((turned_query * turned_key).sum())

    # An angle of up to 15,000 rad is rounded to 1.8e-12 / 2, twice; the vectors have lengths of about 4.
    assert score(shift) == pytest.approx(score(0), abs=1e-10)
    turned = rotate(query, torch.tensor([query_position]), inv_freq)
    torch.testing.assert_close(turned.norm(), query.norm(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_position_zero_changes_nothing(rotate: Rotate) -> None:
    """At position 0 the result is the input, to the bit."""
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    assert torch.equal(rotate(x, torch.tensor([0]), rope_frequencies(8, 10000.0)), x)


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "magnitude"),
    [(0.707, 0.707, 1.0), (1.0, 1.0, 1.0), (1.0, 0.5, 1.1557219902)],
)
def test_cos_and_sin_have_the_ratio_of_the_mscales(
    rotate: Rotate, mscale: float, mscale_all_dim: float, magnitude: float
) -> None:
    """cos^2 + sin^2 is the squared ratio of the two mscales at every position (kekzl/imp#880)."""
    yarn = YarnScaling(40.0, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim)
    inv_freq = rope_frequencies(8, 10000.0, yarn)
    positions = torch.tensor([0, 1, 5, 777, 100_000])

    turned = rotate(one_hot(8, 0).expand(5, 1, 8), positions, inv_freq, rope_magnitude(yarn))

    expected = torch.full((5,), magnitude**2, dtype=torch.float64)
    torch.testing.assert_close(turned.square().sum(dim=(1, 2)), expected, rtol=1e-9, atol=0)


def test_frequencies_are_a_geometric_series() -> None:
    """Pair i turns by theta^(-2 i / dim) radians a position."""
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)

    torch.testing.assert_close(rope_frequencies(8, 10000.0), expected, rtol=1e-15, atol=0)
    assert rope_frequencies(0, 10000.0).shape == (0,)


def test_yarn_keeps_fast_pairs_and_slows_slow_pairs() -> None:
    """DeepSeek-V3 keeps the frequency of pairs up to 10 and slows those from 23 on by 40, a ramp between.

    By hand: pair 64 ln(4096 / (2 pi turns)) / (2 ln 10000) turns `turns` times over 4096 tokens; that is
    10.47 for 32 turns (rounded down to 10) and 22.51 for one turn (rounded up to 23).
    """
    plain = rope_frequencies(64, 10000.0)

    ratio = rope_frequencies(64, 10000.0, DEEPSEEK_V3) / plain

    torch.testing.assert_close(ratio[:11], torch.ones(11).double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64), rtol=1e-14, atol=0)
    ramp = 1 - torch.arange(1, 13).double() / 13 * (1 - 1 / 40)
    torch.testing.assert_close(ratio[11:23], ramp, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("theta", "yarn", "slowed_share"),
    [
        # By hand: 512 turns give pair 0.42 (0), one turn gives 11.3 (12), which is clamped to dim - 1 = 7.
        (10.0, YarnScaling(4.0, 4096, beta_fast=512.0), [0, 1 / 7, 2 / 7, 3 / 7]),
        # A context of less than one turn of the fastest pair: both bounds are 0, and the ramp is a step.
        (10000.0, YarnScaling(4.0, 6), [0, 1, 1, 1]),
    ],
    ids=["clamped", "step"],
)
def test_yarn_ramp_at_its_limits(theta: float, yarn: YarnScaling, slowed_share: list[float]) -> None:
    """A bound past the last dimension is clamped, and a ramp without length divides nothing by zero."""
    ratio = rope_frequencies(8, theta, yarn) / rope_frequencies(8, theta)

    expected = 1 - torch.tensor(slowed_share, dtype=torch.float64) * (1 - 1 / 4)
    torch.testing.assert_close(ratio, expected, rtol=1e-14, atol=0)


def test_bad_arguments_are_refused() -> None:
    """An odd width, a theta of 1 and a vector narrower than the rotation raise."""
    with pytest.raises(ValueError, match="dim is 7"):
        rope_frequencies(7, 10000.0)
    with pytest.raises(ValueError, match="theta is 1"):
        rope_frequencies(8, 1.0)
    for rotate in ROTATIONS:
        with pytest.raises(ValueError, match="at least 8"):
            rotate(torch.zeros(1, 1, 6), torch.tensor([0]), rope_frequencies(8, 10000.0))
