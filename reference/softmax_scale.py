"""The softmax scale of MLA, and the two corrections that YaRN brings.

YaRN sharpens attention by a factor that grows with the context extension. DeepSeek splits it over two places,
each with its own config field, and they are easy to mix up (onnxruntime/mobius#548, kekzl/imp#880):

* the scores are multiplied by mscale(factor, mscale_all_dim) squared, whatever the position;
* cos and sin of RoPE are multiplied by mscale(factor, mscale) / mscale(factor, mscale_all_dim), which is 1
  when the two fields are equal, as in DeepSeek-V3.

Source: YaRN, arXiv 2309.00071, section 3.4, and the config fields of DeepSeek-V2 and V3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class YarnScaling:
    """The `rope_scaling` of a YaRN model, named as in its config.

    `factor` is the context extension, `original_max_position_embeddings` the context before it in tokens.
    `beta_fast` and `beta_slow` are turns over that context: pairs that turn more often than `beta_fast` keep
    their frequency, pairs that turn less often than `beta_slow` are slowed by `factor`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"factor is {self.factor}; it must be positive")
        if self.original_max_position_embeddings <= 0:
            raise ValueError(
                f"original_max_position_embeddings is {self.original_max_position_embeddings}; it must be positive"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow is {self.beta_slow}; it must be in (0, beta_fast={self.beta_fast}]")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1, or 1 when the context is not extended (factor <= 1)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(qk_head_dim: int, yarn: YarnScaling | None = None) -> float:
    """Return the factor on the attention scores.

    Args:
        qk_head_dim: qk_nope_head_dim + qk_rope_head_dim, the width of an *expanded* key. The absorbed width
            (kv_lora_rank + qk_rope_head_dim) is not it.
        yarn: the YaRN scaling of the model, if it has one.

    Raises:
        ValueError: if the width is not positive.

    """
    if qk_head_dim <= 0:
        raise ValueError(f"qk_head_dim is {qk_head_dim}; it must be positive")
    correction = 1.0 if yarn is None else yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return float(qk_head_dim**-0.5 * correction**2)


def rope_magnitude(yarn: YarnScaling | None) -> float:
    """Return the factor on cos and sin: 1 without YaRN, else the ratio of the two mscales."""
    if yarn is None:
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
