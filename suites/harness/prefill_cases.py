"""Cases of MLA prefill: ragged queries and one or more parts of keys in poisoned memory, and the same densely."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer
from mla_conformance.suites.harness.problems.prefill import MLAPrefillProblem

GAP = 5
FAR_KEY_STRIDE = 2**30 + 24
"""Elements between keys of the ``far`` layout: key 2 and above lie past a signed 32-bit offset."""
FAR_MARGIN = 2**31
"""Elements reserved before ``far`` keys: as far as a wrapped 32-bit offset can reach back."""
LARGE = 40.0
"""Factor on queries and keys of ``large`` values."""


class Request(NamedTuple):
    """The numbers of one request, dense, in the problem's dtype, for the oracle.

    q [queries, heads, width], k_nope [keys, heads, qk_nope_head_dim], k_pe [keys, qk_rope_head_dim] and
    v [keys, heads, v_head_dim].
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor

    def slice(self, queries: slice, keys: slice) -> Request:
        """Some of the queries and some of the keys."""
        return Request(self.q[queries], self.k_nope[keys], self.k_pe[keys], self.v[keys])


@dataclass
class Part:
    """Keys that are attended in one call: all of them, the new tokens', or those of one chunk of context.

    Attributes:
        k_nope: [keys, heads, qk_nope_head_dim], any strides but the last.
        k_pe: [keys, qk_rope_head_dim], likewise.
        v: [keys, heads, v_head_dim], likewise.
        cu_seqlens_k: int32 [requests + 1].
        causal: whether its last key is that of the last query, and no query sees a key behind its own.
    """

    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    cu_seqlens_k: Tensor
    causal: bool


@dataclass
class MLAPrefillCase:
    """The tensors of one prefill.

    Attributes:
        q: [queries, heads, qk_nope_head_dim + qk_rope_head_dim]; ``q_nope`` and ``q_pe`` are views of it.
        cu_seqlens_q: int32 [requests + 1].
        parts: the keys, in one part, or the new tokens' and then each chunk of context.
        out: [queries, heads, v_head_dim], poisoned; the implementation must write the rows of the requests.
        lse: float32 [queries, heads], poisoned; for implementations that take the buffer.
        requests: the numbers, for the oracle.
    """

    problem: MLAPrefillProblem
    q: Tensor
    cu_seqlens_q: Tensor
    parts: list[Part]
    out: Tensor
    lse: Tensor
    requests: list[Request]
    buffers: list[Buffer]

    @property
    def q_nope(self) -> Tensor:
        """The part of the queries that is not rotated."""
        return self.q[..., : self.problem.qk_nope_head_dim]

    @property
    def q_pe(self) -> Tensor:
        """The rotary part of the queries."""
        return self.q[..., self.problem.qk_nope_head_dim :]

    @property
    def used_rows(self) -> int:
        """Queries that belong to a request; those behind them belong to none."""
        return sum(self.problem.query_lens)

    @property
    def max_seqlen_q(self) -> int:
        """Queries of the longest request."""
        return max(self.problem.query_lens, default=0)

    def rows(self, request: int) -> slice:
        """Where the queries of a request are."""
        start = sum(self.problem.query_lens[:request])
        return slice(start, start + self.problem.query_lens[request])


def build(problem: MLAPrefillProblem, device: torch.device | str = "cpu") -> MLAPrefillCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    return lay_out(problem, draw(problem), device)


def lay_out(problem: MLAPrefillProblem, requests: list[Request], device: torch.device | str = "cpu") -> MLAPrefillCase:
    """Lay these numbers out as ``problem`` says."""
    dtype = getattr(torch, problem.dtype)
    gap = GAP if problem.layout == "gapped" else 0
    total = sum(problem.query_lens) + problem.spare_rows
    q = Buffer.gapped("q", (total, problem.heads, problem.width), gap, dtype, problem.poison)
    _fill(q.view, [request.q for request in requests])
    out = Buffer.gapped("out", (total, problem.heads, problem.v_head_dim), gap, dtype, problem.poison, writable=True)
    lse = Buffer.gapped("lse", (total, problem.heads), gap, torch.float32, problem.poison, writable=True)
    offsets = _offsets("cu_seqlens_q", problem.query_lens)
    buffers = [buffer.to(torch.device(device)) for buffer in (q, offsets, out, lse)]
    views = {buffer.name: buffer.view for buffer in buffers}

    parts = []
    for name, keys, causal in key_parts(problem):
        pieces = [request.slice(slice(None), piece) for request, piece in zip(requests, keys, strict=True)]
        part, held = _part(problem, name, pieces, causal, torch.device(device))
        parts.append(part)
        buffers += held
    # Far keys are address space, too large to compare byte by byte.
    guarded = [b for b in buffers if not (b.name.startswith("kv") and problem.layout == "far")]
    for buffer in guarded:
        buffer.guard()
    moved = [Request(*(tensor.to(device) for tensor in request)) for request in requests]
    return MLAPrefillCase(problem=problem, parts=parts, requests=moved, buffers=guarded, **views)


def subset(case: MLAPrefillCase, requests: Sequence[int]) -> MLAPrefillCase:
    """The same numbers as another call: some requests of ``case``, in this order."""
    problem = case.problem
    smaller = problem.replace(
        query_lens=tuple(problem.query_lens[i] for i in requests),
        context_lens=tuple(problem.context_lens[i] for i in requests),
    )
    kept = [Request(*(tensor.cpu() for tensor in case.requests[i])) for i in requests]
    return lay_out(smaller, kept, case.q.device)


def with_other_last_key(case: MLAPrefillCase, value: float) -> MLAPrefillCase:
    """The same call, with the last key and value of every request replaced by ``value`` throughout."""
    changed = []
    for request in case.requests:
        numbers = Request(*(tensor.cpu().clone() for tensor in request))
        for tensor in numbers[1:]:
            tensor[-1:] = value
        changed.append(numbers)
    return lay_out(case.problem, changed, case.q.device)


def draw(problem: MLAPrefillProblem) -> list[Request]:
    """Draw the numbers of each request in their final dtype."""
    generator = torch.Generator().manual_seed(problem.seed)
    dtype = getattr(torch, problem.dtype)
    nope, heads = problem.qk_nope_head_dim, problem.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    requests = []
    for queries, keys in zip(problem.query_lens, problem.key_lens, strict=True):
        q, k_nope = normal(queries, heads, problem.width), normal(keys, heads, nope)
        k_pe, v = normal(keys, problem.qk_rope_head_dim), normal(keys, heads, problem.v_head_dim)
        if problem.values == "large":
            q, k_nope, k_pe = q * LARGE, k_nope * LARGE, k_pe * LARGE
        elif problem.values == "zero_query":
            q.zero_()
        elif problem.values == "constant":
            k_nope, k_pe, v = (tensor[:1].expand(tensor.shape) for tensor in (k_nope, k_pe, v))
        elif problem.values == "one_hot":
            q[..., 0] = 16
            k_nope[..., 0] = 0
            k_nope[:1, :, 0] = 64
        requests.append(Request(*(tensor.to(dtype) for tensor in (q, k_nope, k_pe, v))))
    return requests


def key_parts(problem: MLAPrefillProblem) -> list[tuple[str, list[slice], bool]]:
    """A name for each part, which keys of each request are in it, and whether it is causal."""
    if problem.context_chunk is None:
        return [("", [slice(None) for _ in problem.query_lens], problem.causal)]
    parts = [("", [slice(context, None) for context in problem.context_lens], True)]
    for i in range(problem.chunks):
        start, end = i * problem.context_chunk, (i + 1) * problem.context_chunk
        parts.append((f" of chunk {i}", [slice(start, min(end, n)) for n in problem.context_lens], False))
    return parts


def _part(
    problem: MLAPrefillProblem, name: str, pieces: list[Request], causal: bool, device: torch.device
) -> tuple[Part, list[Buffer]]:
    """Lay one part out; return it and its buffers."""
    dtype = getattr(torch, problem.dtype)
    gap = GAP if problem.layout == "gapped" else 0
    lens = [len(piece.v) for piece in pieces]
    shape, nope = (sum(lens) + problem.spare_rows, problem.heads), problem.qk_nope_head_dim
    k_pe = Buffer.gapped(f"k_pe{name}", (shape[0], problem.qk_rope_head_dim), gap, dtype, problem.poison)
    offsets = _offsets(f"cu_seqlens_k{name}", lens)
    if problem.layout == "far":
        width = nope + problem.v_head_dim
        strides = (FAR_KEY_STRIDE, width, 1)
        keys = [Buffer.reserve(f"kv{name}", (*shape, width), strides, dtype, FAR_MARGIN)]
    elif problem.layout == "kv_halves":
        keys = [Buffer.gapped(f"kv{name}", (*shape, nope + problem.v_head_dim), gap, dtype, problem.poison)]
    else:
        keys = [
            Buffer.gapped(f"k_nope{name}", (*shape, nope), gap, dtype, problem.poison),
            Buffer.gapped(f"v{name}", (*shape, problem.v_head_dim), gap, dtype, problem.poison),
        ]
    buffers = [buffer.to(device) for buffer in (*keys, k_pe, offsets)]
    *halves, k_pe_view, cu_seqlens_k = (buffer.view for buffer in buffers)
    k_nope, v = halves if len(halves) == 2 else (halves[0][..., :nope], halves[0][..., nope:])
    for view, field in ((k_nope, "k_nope"), (k_pe_view, "k_pe"), (v, "v")):
        _fill(view, [getattr(piece, field) for piece in pieces])
    return Part(k_nope, k_pe_view, v, cu_seqlens_k, causal), buffers


def _fill(view: Tensor, pieces: list[Tensor]) -> None:
    """Write the pieces one after another; what lies behind them keeps its poison."""
    start = 0
    for piece in pieces:
        view[start : start + len(piece)] = piece
        start += len(piece)


def _offsets(name: str, lens: Sequence[int]) -> Buffer:
    buffer = Buffer.allocate(name, (len(lens) + 1,), (1,), torch.int32, fill=-1)
    buffer.view.copy_(torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32))
    return buffer
