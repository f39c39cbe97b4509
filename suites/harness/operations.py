"""The operations: each one's case, call and outcome. Adding one is a problem, these three, and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_conformance.suites.harness import (
    absorption_cases,
    absorption_outcomes,
    cache_cases,
    cache_gather_cases,
    cache_gather_outcomes,
    cache_outcomes,
    cases,
    gguf_cases,
    gguf_layer_cases,
    gguf_outcomes,
    merge_cases,
    merge_outcomes,
    multi_token_cases,
    multi_token_outcomes,
    outcomes,
    prefill_cases,
    prefill_outcomes,
)
from mla_conformance.suites.harness.implementation import Implementation


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: the method of an implementation that takes its case.
        build: turns a problem into the case on a device.
        outcome: turns the case, what the method returned, the implementation and the record into an outcome.
        prepared_by: what is called with the implementation and the case; the method itself if None.
    """

    name: str
    build: Callable[[Any, Any], Any]
    outcome: Callable[[Any, Any, Implementation, Any], Any]
    prepared_by: Callable[[Implementation, Any], Any] | None = None

    def call(self, implementation: Implementation, case: Any) -> Any:
        """Let ``implementation`` do ``case``."""
        if self.prepared_by is not None:
            return self.prepared_by(implementation, case)
        return getattr(implementation, self.name)(case)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("mla_decode", cases.build, outcomes.decode_outcome),
        Operation("mla_decode_multi", multi_token_cases.build, multi_token_outcomes.multi_token_outcome),
        Operation("mla_prefill", prefill_cases.build, prefill_outcomes.prefill_outcome),
        Operation("merge_states", merge_cases.build_states, merge_outcomes.merge_outcome),
        Operation("merge_shards", merge_cases.build_shards, merge_outcomes.merge_outcome),
        Operation("kv_cache_write", cache_cases.build, cache_outcomes.kv_cache_write_outcome),
        Operation("kv_cache_gather", cache_gather_cases.build, cache_gather_outcomes.kv_cache_gather_outcome),
        Operation("absorb_query", absorption_cases.build, absorption_outcomes.heads_product_outcome),
        Operation("v_up_proj", absorption_cases.build, absorption_outcomes.heads_product_outcome),
        Operation("gguf_dequantize", gguf_cases.build_dequantize, gguf_outcomes.dequantize_outcome),
        Operation("gguf_matmul", gguf_cases.build_matmul, gguf_outcomes.matmul_outcome),
        Operation(
            "gguf_linear", gguf_layer_cases.build_linear, gguf_outcomes.linear_outcome, gguf_outcomes.load_and_run
        ),
        Operation("gguf_names", gguf_layer_cases.build_names, gguf_outcomes.names_outcome, gguf_outcomes.map_names),
        Operation("gguf_kv_b", gguf_layer_cases.build_kv_b, gguf_outcomes.kv_b_outcome),
    )
}
