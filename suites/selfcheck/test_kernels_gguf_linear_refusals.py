"""What GGUFLinear refuses, by name, and that a refused shard changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.kernels.gguf.linear import GGUFLinear
from mla_conformance.kernels.gguf.shards import ShardSpec, qkv_shards
from mla_conformance.suites.selfcheck.gguf_weights import weight


def two_shards() -> GGUFLinear:
    """A layer with its second shard loaded."""
    made = GGUFLinear(64, [ShardSpec("a", 2), ShardSpec("b", 3)])
    made.load_shard(weight("Q8_0", (3, 64), 1)[0], "Q8_0", "b")
    return made


@pytest.mark.parametrize(
    ("data", "quant", "shard", "error", "message"),
    [
        (lambda d: d, "Q8_0", "c", ValueError, "shard is 'c'"),
        (lambda d: d, "Q8_0", 2, ValueError, "shard is 2"),
        (lambda d: d, "Q8_0", -2, ValueError, "shard is -2"),
        (lambda d: d, "Q8_0", (0, 1), TypeError, r"shard is \(0, 1\)"),
        (lambda d: d, "Q8_0", True, TypeError, "shard is True"),
        (lambda d: d.repeat(2, 1)[:3], "Q8_0", "b", ValueError, "shard 'b' was loaded before"),
        (lambda d: d.repeat(3, 1)[:5], "Q8_0", None, ValueError, "shard 'b' was loaded before"),
        (lambda d: d[:1], "Q8_0", "a", ValueError, "shard 'a' needs 2 rows"),
        (lambda d: d[0], "Q8_0", "a", ValueError, "data has shape"),
        (lambda d: d[:, None], "Q8_0", "a", ValueError, "data has shape"),
        (lambda d: d[:, :34], "Q8_0", "a", ValueError, "data has 34 bytes a row; columns 64 in Q8_0 takes 68"),
        (lambda d: d, "Q4_0", "a", ValueError, "data has 68 bytes a row; columns 64 in Q4_0 takes 36"),
        (lambda d: d, "Q4_K", "a", ValueError, "columns is 64, no multiple of Q4_K's block of 256"),
        (lambda d: d, "Q4_X", "a", ValueError, "Q4_X"),
        (lambda d: d, "F64", "a", ValueError, "F64"),
        (lambda d: d, None, "a", TypeError, "quant is None"),
        (lambda d: d.to(torch.int8), "Q8_0", "a", TypeError, "data has dtype torch.int8"),
        (lambda d: d.double(), None, "a", TypeError, "data has dtype torch.float64"),
        (lambda d: d[:, :64].half(), "Q8_0", "a", TypeError, "data has dtype torch.float16 but quant is 'Q8_0'"),
        (lambda d: d.numpy(), "Q8_0", "a", TypeError, "data is a ndarray"),
        (lambda d: d[0, 0], "Q8_0", "a", ValueError, "data is a single number"),
    ],
)
def test_a_wrong_shard_is_refused_and_changes_nothing(
    data: Callable[[Tensor], Any], quant: Any, shard: Any, error: type[Exception], message: str
) -> None:
    """By name; the layer can still be completed."""
    made, before = two_shards(), two_shards().describe()
    right, values = weight("Q8_0", (2, 64), 0)
    with pytest.raises(error, match=message):
        made.load_shard(data(right), quant, shard)
    assert made.describe() == before
    made.load_shard(right, "Q8_0", 0)
    made.finish_loading()
    expected = torch.cat((values, weight("Q8_0", (3, 64), 1)[1]))
    torch.testing.assert_close(made.dequantized_weight(), expected, rtol=0, atol=0)


def test_missing_shards_are_all_named() -> None:
    """On finishing, and on a call without it."""
    made = GGUFLinear(64, [ShardSpec(name, 2) for name in ("q_a", "kv_a", "z")], bias=True)
    made.load_shard(weight("Q8_0", (2, 64), 1)[0], "Q8_0", "kv_a")
    missing = r"'q_a', 'z', 'q_a \(bias\)', 'kv_a \(bias\)', 'z \(bias\)'"
    for call in (made.finish_loading, lambda: made(torch.zeros(1, 64)), made.dequantized_weight):
        with pytest.raises(ValueError, match=missing):
            call()
    complete = two_shards()
    complete.load_shard(weight("Q8_0", (2, 64), 1)[0], "Q8_0", "a")
    with pytest.raises(ValueError, match="finish_loading was not called"):
        complete(torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(1, 32), ValueError, r"x has shape \[1, 32\]; pass \[..., 64\]"),
        (torch.zeros(1, 64).double(), TypeError, "x has dtype torch.float64"),
        ([0.0] * 64, TypeError, "x is a list"),
    ],
)
def test_a_wrong_input_is_refused_by_name(x: Any, error: type[Exception], message: str) -> None:
    """Before anything is launched."""
    made = two_shards()
    made.load_shard(weight("Q8_0", (2, 64), 1)[0], "Q8_0", "a")
    made.finish_loading()
    with pytest.raises(error, match=message):
        made(x)


@pytest.mark.parametrize(
    ("data", "shard", "error", "message"),
    [
        (torch.zeros(2), "c", ValueError, "shard is 'c'"),
        (torch.zeros(3), "a", ValueError, "shard 'a' needs 2 rows"),
        (torch.zeros(2, 1), "a", ValueError, r"data has shape \[2, 1\]"),
        (torch.zeros(2, dtype=torch.int32), "a", TypeError, "data is no bias"),
        (torch.zeros(3), "b", ValueError, "shard 'b' was loaded before"),
    ],
)
def test_a_wrong_bias_is_refused_by_name(data: Tensor, shard: Any, error: type[Exception], message: str) -> None:
    """As a wrong shard is; a layer without a bias takes none."""
    made = GGUFLinear(64, [ShardSpec("a", 2), ShardSpec("b", 3)], bias=True)
    made.load_bias(torch.zeros(3), "b")
    with pytest.raises(error, match=message):
        made.load_bias(data, shard)
    with pytest.raises(ValueError, match="bias is False"):
        two_shards().load_bias(torch.zeros(2), "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "column", "tp_size": 3}, "rows of shard 'a' is 4, no multiple of tp_size 3"),
        ({"parallel": "row", "tp_size": 3}, "columns is 64, no multiple of tp_size 3"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2"),
        ({"parallel": "rows"}, "parallel is 'rows'"),
        ({"on_uneven": "pad"}, "on_uneven is 'pad'"),
        ({"shards": [ShardSpec("a", 4), ShardSpec("a", 4)]}, r"shards is \['a', 'a'\]"),
        ({"shards": qkv_shards(4, 3, 2), "parallel": "column", "tp_size": 4}, "heads of shard 'k' is 3"),
        ({"shards": qkv_shards(2, 1, 2), "parallel": "column", "tp_size": 4}, "heads of shard 'q' is 2"),
    ],
)
def test_a_layer_that_cannot_be_spread_is_refused(options: dict[str, Any], message: str) -> None:
    """When it is declared, with dimension, size and degree."""
    with pytest.raises(ValueError, match=message):
        GGUFLinear(64, options.pop("shards", [ShardSpec("a", 4)]), **options)
