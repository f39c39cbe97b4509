"""Problems: what a case is made of, one module an area of operations."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from mla_conformance.suites.harness.problems.absorption import AbsorbQueryProblem, VUpProjProblem
from mla_conformance.suites.harness.problems.base import DTYPES, LAYOUTS, POISONS, Problem
from mla_conformance.suites.harness.problems.cache import KVCacheWriteProblem
from mla_conformance.suites.harness.problems.cache_gather import KVCacheGatherProblem
from mla_conformance.suites.harness.problems.decode import UNUSED_ENTRIES, MLADecodeProblem
from mla_conformance.suites.harness.problems.gguf import GGUFDequantizeProblem, GGUFMatmulProblem
from mla_conformance.suites.harness.problems.gguf_layers import GGUFKvBProblem, GGUFLinearProblem, GGUFNamesProblem
from mla_conformance.suites.harness.problems.merges import MergeShardsProblem, MergeStatesProblem
from mla_conformance.suites.harness.problems.multi_token import MLAMultiTokenProblem
from mla_conformance.suites.harness.problems.prefill import MLAPrefillProblem

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "POISONS",
    "UNUSED_ENTRIES",
    "AbsorbQueryProblem",
    "GGUFDequantizeProblem",
    "GGUFKvBProblem",
    "GGUFLinearProblem",
    "GGUFMatmulProblem",
    "GGUFNamesProblem",
    "KVCacheGatherProblem",
    "KVCacheWriteProblem",
    "MLADecodeProblem",
    "MLAMultiTokenProblem",
    "MLAPrefillProblem",
    "MergeShardsProblem",
    "MergeStatesProblem",
    "Problem",
    "VUpProjProblem",
    "parse_problem",
]

PROBLEMS: dict[str, type[Problem]] = {
    kind.__name__: kind
    for kind in (
        MLADecodeProblem,
        MLAMultiTokenProblem,
        MLAPrefillProblem,
        GGUFDequantizeProblem,
        GGUFMatmulProblem,
        GGUFLinearProblem,
        GGUFKvBProblem,
        GGUFNamesProblem,
        KVCacheWriteProblem,
        KVCacheGatherProblem,
        MergeStatesProblem,
        MergeShardsProblem,
        AbsorbQueryProblem,
        VUpProjProblem,
    )
}


def parse_problem(line: str) -> Problem:
    """Rebuild a problem from the line that it printed.

    Only keyword arguments with literal values are read; nothing is evaluated.

    Raises:
        ValueError: the line is no such line; the message says what is wrong with it.
    """
    try:
        call = ast.parse(line.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"problem {line!r} is not of the form Name(field=value, ...): {error}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"problem {line!r} is not of the form Name(field=value, ...)")
    kind = PROBLEMS.get(call.func.id)
    if kind is None:
        raise ValueError(f"problem {call.func.id!r} is unknown; known: {', '.join(PROBLEMS)}")
    known = {field.name for field in dataclasses.fields(kind)}
    fields: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"problem field {keyword.arg!r} is unknown; known: {', '.join(sorted(known))}")
        try:
            fields[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"problem field {keyword.arg!r} has no literal value in {line!r}") from None
    return kind(**fields)
