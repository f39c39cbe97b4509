"""The softmax scale has the factors of YaRN in the right places."""

from __future__ import annotations

import math

import pytest

from mla_conformance.reference.softmax_scale import YarnScaling, rope_magnitude, softmax_scale

LN_40 = 3.6888794541139363


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "score_factor", "magnitude"),
    [
        # DeepSeek-V2-Lite: 0.1 * 0.707 * ln 40 + 1 = 1.2608038
        (0.707, 0.707, 1.2608037774**2, 1.0),
        # DeepSeek-V3
        (1.0, 1.0, 1.3688879454**2, 1.0),
        # Tells the two fields apart: 0.1 * 0.5 * ln 40 + 1 = 1.1844440
        (1.0, 0.5, 1.1844439727**2, 1.3688879454 / 1.1844439727),
    ],
)
def test_yarn_factors_by_hand(mscale: float, mscale_all_dim: float, score_factor: float, magnitude: float) -> None:
    """Scores get mscale_all_dim squared, RoPE the ratio (onnxruntime/mobius#548, kekzl/imp#880)."""
    yarn = YarnScaling(40.0, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim)

    assert softmax_scale(192, yarn) == pytest.approx(score_factor / math.sqrt(192), rel=1e-9)
    assert softmax_scale(192, yarn) == pytest.approx(192**-0.5 * (0.1 * mscale_all_dim * LN_40 + 1) ** 2, rel=1e-15)
    assert rope_magnitude(yarn) == pytest.approx(magnitude, rel=1e-9)


def test_without_yarn_only_the_width_counts() -> None:
    """GLM-5 has 192 + 64 = 256 wide keys, so its scale is exactly 1/16, and cos and sin are not enlarged."""
    assert softmax_scale(256) == 1 / 16
    assert rope_magnitude(None) == 1.0


def test_absent_mscale_all_dim_leaves_scores_alone() -> None:
    """With the defaults of the config fields only cos and sin are corrected."""
    yarn = YarnScaling(factor=40.0, original_max_position_embeddings=4096)

    assert softmax_scale(192, yarn) == softmax_scale(192)
    assert rope_magnitude(yarn) == pytest.approx(0.1 * LN_40 + 1, rel=1e-15)


def test_a_factor_of_one_or_less_corrects_nothing() -> None:
    """A context that is not extended has no correction."""
    for factor in (0.5, 1.0):
        yarn = YarnScaling(factor, 4096, mscale=1.0, mscale_all_dim=0.5)
        assert softmax_scale(192, yarn) == softmax_scale(192)
        assert rope_magnitude(yarn) == 1.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"factor": 0.0}, "factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow"),
    ],
)
def test_bad_yarn_settings_are_named(arguments: dict[str, float], name: str) -> None:
    """A setting that has no meaning raises an error that names it."""
    settings = {"factor": 40.0, "original_max_position_embeddings": 4096, **arguments}
    with pytest.raises(ValueError, match=name):
        YarnScaling(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="qk_head_dim"):
        softmax_scale(0)
