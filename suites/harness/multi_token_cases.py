"""Cases of MLA decode with several query tokens: a cache as in decode, queries of one more dimension."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_conformance.suites.harness import cases
from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.problems import MLADecodeProblem, MLAMultiTokenProblem

QUERY_SEED = 7_919
"""Added to a problem's seed for its queries, so that they differ from the cache that the seed draws."""


@dataclass
class MultiTokenCase:
    """The tensors of one call.

    Attributes:
        q: [batch, query_tokens, heads, kv_lora_rank + qk_rope_head_dim]; ``q_nope`` and ``q_pe`` are views of it.
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim], as in :class:`DecodeCase`.
        block_table: int32 [batch, entries].
        seq_lens: int32 [batch], query tokens included.
        query_lens: int32 [batch], or None where no query token is padding.
        k_scale: float32 scalar tensor.
        out: [batch, query_tokens, heads, kv_lora_rank], poisoned; the implementation must write all of it.
        lse: float32 [batch, query_tokens, heads], poisoned.
        rows: per request, the dense cache rows in the cache's own dtype, for the oracle.
    """

    problem: MLAMultiTokenProblem
    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_lens: Tensor | None
    k_scale: Tensor
    out: Tensor
    lse: Tensor
    rows: list[Tensor]
    buffers: list[Buffer]

    @property
    def q_nope(self) -> Tensor:
        """The absorbed query, in latent space: [batch, query_tokens, heads, kv_lora_rank]."""
        return self.q[..., : self.problem.kv_lora_rank]

    @property
    def q_pe(self) -> Tensor:
        """The rotary query: [batch, query_tokens, heads, qk_rope_head_dim]."""
        return self.q[..., self.problem.kv_lora_rank :]


def build(problem: MLAMultiTokenProblem, device: torch.device | str = "cpu") -> MultiTokenCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    base = cases.build(one_token(problem, problem.lengths), device)
    dtype = getattr(torch, problem.dtype)
    gap = 5 if problem.layout == "gapped" else 0
    batch, tokens, heads = len(problem.lengths), problem.query_tokens, problem.heads
    q = Buffer.gapped("q", (batch, tokens, heads, problem.width), gap, dtype, problem.poison)
    generator = torch.Generator().manual_seed(problem.seed + QUERY_SEED)
    queries = torch.randn(q.view.shape, dtype=torch.float64, generator=generator)
    q.view.copy_(queries.zero_() if problem.values == "zero_query" else queries)
    out_shape = (batch, tokens, heads, problem.kv_lora_rank)
    out = Buffer.gapped("out", out_shape, gap, dtype, problem.poison, writable=True)
    lse = Buffer.gapped("lse", out_shape[:-1], gap, torch.float32, problem.poison, writable=True)
    buffers = [buffer.to(torch.device(device)) for buffer in (q, out, lse)]
    for buffer in buffers:
        buffer.guard()
    query_lens = None
    if problem.query_lens is not None:
        query_lens = torch.tensor(problem.query_lens, dtype=torch.int32, device=device)
    kept = [buffer for buffer in base.buffers if buffer.name not in ("q", "out", "lse")]
    return MultiTokenCase(
        problem=problem,
        kv_cache=base.kv_cache,
        block_table=base.block_table,
        seq_lens=base.seq_lens,
        query_lens=query_lens,
        k_scale=base.k_scale,
        rows=base.rows,
        buffers=[*kept, *buffers],
        **{buffer.name: buffer.view for buffer in buffers},
    )


def one_token(problem: MLAMultiTokenProblem, lengths: tuple[int, ...]) -> MLADecodeProblem:
    """The decode problem with the same fields, for other lengths."""
    shared = {field.name: getattr(problem, field.name) for field in fields(MLADecodeProblem)}
    return MLADecodeProblem(**(shared | {"lengths": lengths}))


def flattened(case: MultiTokenCase) -> DecodeCase:
    """The same numbers as a decode in which every query token is a request of the tokens that it sees.

    This is what vLLM's Triton backend does with several query tokens, and what the oracle is asked. The output and the
    log-sum-exp are fresh.
    """
    problem = case.problem
    visible = [n for request in range(len(problem.lengths)) for n in problem.visible(request)]
    out, lse = case.out.flatten(0, 1), case.lse.flatten(0, 1)
    return DecodeCase(
        problem=one_token(problem, tuple(visible)),
        q=case.q.flatten(0, 1),
        kv_cache=case.kv_cache,
        block_table=case.block_table.repeat_interleave(problem.query_tokens, 0),
        seq_lens=torch.tensor(visible, dtype=torch.int32, device=case.q.device),
        k_scale=case.k_scale,
        out=torch.full_like(out, poison_value(out.dtype, problem.poison)),
        lse=torch.full_like(lse, torch.nan),
        rows=[case.rows[i // problem.query_tokens][:n] for i, n in enumerate(visible)],
        buffers=[],
    )


def with_other_last_token(case: MultiTokenCase, value: float) -> MultiTokenCase:
    """The same call, with the cached row of every request's last token replaced by ``value`` throughout."""
    cache = case.kv_cache.clone()
    for request, length in enumerate(case.problem.lengths):
        page = int(case.block_table[request, (length - 1) // case.problem.page_size])
        cache[page, (length - 1) % case.problem.page_size] = value
    return _again(case, kv_cache=cache)


def subset(case: MultiTokenCase, requests: list[int]) -> MultiTokenCase:
    """The same numbers as another call: some requests of ``case``, in this order."""
    problem = case.problem
    lens = None if problem.query_lens is None else tuple(problem.query_lens[i] for i in requests)
    return _again(
        case,
        problem=problem.replace(lengths=tuple(problem.lengths[i] for i in requests), query_lens=lens),
        q=case.q[requests],
        block_table=case.block_table[requests],
        seq_lens=case.seq_lens[requests],
        query_lens=None if case.query_lens is None else case.query_lens[requests],
        out=case.out[requests],
        lse=case.lse[requests],
        rows=[case.rows[i] for i in requests],
    )


def _again(case: MultiTokenCase, **changed: object) -> MultiTokenCase:
    kept = {field.name: getattr(case, field.name) for field in fields(case)} | changed
    kept["out"] = torch.full_like(kept["out"], poison_value(case.out.dtype, case.problem.poison))
    kept["lse"] = torch.full_like(kept["lse"], torch.nan)
    kept["buffers"] = []
    return MultiTokenCase(**kept)
