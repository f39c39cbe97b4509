"""Problems of layers and models: shards that arrive in some order, MLA's kv_b, and the names of a whole file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.reference.gguf import FORMATS
from mla_conformance.suites.gguf.models import MODELS
from mla_conformance.suites.harness.problems.base import DTYPES, Problem, check_integers, check_listed, is_integer
from mla_conformance.suites.harness.problems.gguf import QUANTS

LAYERS = ("merged", "qkv", "column", "row", "replicated")
KV_B_FORMS = ("fused", "split")


@dataclass(frozen=True, repr=False)
class GGUFLinearProblem(Problem):
    """Load the shards of a linear layer in some order on one rank, then run it.

    Args:
        layer: ``merged`` (column-parallel, several shards), ``qkv``, ``column``, ``row`` or ``replicated``.
        shards: ``(quant, rows)`` of each shard of the whole model, in the layer's own order.
        columns: in-features of the whole model.
        arrival: ids of the shards as they arrive; in the layer's order if empty. Anything else than each id once
            is a faulty file: ids may be missing, doubled, unknown or tuples.
        tp_size: ranks of the tensor-parallel group.
        tp_rank: the rank that is judged.
        disable_tp: the layer is whole on every rank.
        head_dim: rows of a head, for ``qkv``.
        tokens: rows of x.
        dtype: dtype of the activations and of the result.
        seed: seed of every drawn number.
    """

    layer: str = "merged"
    shards: tuple[tuple[str, int], ...] = (("Q8_0", 64), ("Q8_0", 32))
    columns: int = 256
    arrival: tuple[object, ...] = ()
    tp_size: int = 1
    tp_rank: int = 0
    disable_tp: bool = False
    head_dim: int = 16
    tokens: int = 3
    dtype: str = "float32"
    seed: int = 0

    operation: ClassVar[str] = "gguf_linear"

    def __post_init__(self) -> None:
        check_listed(self, layer=LAYERS, dtype=DTYPES)
        check_integers(self, columns=1, tp_size=1, tp_rank=0, head_dim=1, tokens=0)
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank={self.tp_rank} must be below tp_size={self.tp_size}")
        if not isinstance(self.disable_tp, bool):
            raise ValueError(f"disable_tp={self.disable_tp!r} must be True or False")
        if not isinstance(self.arrival, tuple):
            raise ValueError(f"arrival={self.arrival!r} must be a tuple of shard ids")
        count = 3 if self.layer == "qkv" else 1 if self.layer != "merged" else len(self.shards)
        if len(self.shards) != count or not self.shards:
            raise ValueError(f"shards={self.shards!r}: a {self.layer} layer has {count or 'some'}")
        for quant, rows in self.shards:
            if quant not in QUANTS or not is_integer(rows, 1):
                raise ValueError(f"shards={self.shards!r} must be pairs of a ggml type and a number of rows")
            if self.columns % FORMATS[quant].block_elements:
                raise ValueError(f"columns={self.columns} must be whole blocks of {quant}")

        if self.layer == "qkv" and (
            self.shards[1][1] != self.shards[2][1] or any(rows % self.head_dim for _, rows in self.shards)
        ):
            raise ValueError(f"shards={self.shards!r}: q, k and v have whole heads of {self.head_dim}, k as many as v")

    @property
    def arrivals(self) -> tuple[object, ...]:
        """Ids as they arrive."""
        return self.arrival or tuple(range(len(self.shards)))

    @property
    def degree(self) -> int:
        """Parts that the layer is cut into."""
        return 1 if self.disable_tp or self.layer == "replicated" else self.tp_size

    @property
    def rank(self) -> int:
        """Which of them this rank has."""
        return self.tp_rank if self.degree > 1 else 0

    @property
    def local_columns(self) -> int:
        """In-features of this rank."""
        return self.columns // self.degree if self.layer == "row" else self.columns

    @property
    def products(self) -> int:
        """Of the tiles that kernels work in, which have 16 tokens at least."""
        return max(16, self.tokens) * sum(rows for _, rows in self.shards) * self.columns

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype}


@dataclass(frozen=True, repr=False)
class GGUFKvBProblem(Problem):
    """Make MLA's absorbed ``W_UK`` [heads, nope, latent] and ``W_UV`` [heads, latent, v] from a GGUF file's tensors.

    Args:
        form: ``fused`` (``attn_kv_b``: per head, nope rows and then v rows) or ``split`` (``attn_k_b`` transposed,
            and ``attn_v_b``).
        quants: type of ``attn_kv_b``, or of ``attn_k_b`` and ``attn_v_b``.
        heads: attention heads.
        qk_nope_head_dim: width of a head's key part.
        v_head_dim: width of a head's value.
        kv_lora_rank: width of the latent.
        dtype: dtype of the result, rounded once.
        seed: seed of every drawn number.
    """

    form: str = "fused"
    quants: tuple[str, ...] = ("Q8_0",)
    heads: int = 3
    qk_nope_head_dim: int = 32
    v_head_dim: int = 64
    kv_lora_rank: int = 256
    dtype: str = "float32"
    seed: int = 0

    operation: ClassVar[str] = "gguf_kv_b"

    def __post_init__(self) -> None:
        check_listed(self, form=KV_B_FORMS, dtype=DTYPES)
        check_integers(self, heads=1, qk_nope_head_dim=1, v_head_dim=1, kv_lora_rank=1)
        widths = [self.kv_lora_rank] if self.form == "fused" else [self.qk_nope_head_dim, self.kv_lora_rank]
        if len(self.quants) != len(widths) or any(quant not in QUANTS for quant in self.quants):
            raise ValueError(f"quants={self.quants!r} must name {len(widths)} ggml type(s) for the {self.form} form")
        for quant, width in zip(self.quants, widths, strict=True):
            if width % FORMATS[quant].block_elements:
                raise ValueError(f"quants={self.quants!r}: rows of {width} are no whole blocks of {quant}")

    @property
    def products(self) -> int:
        """Some an element."""
        return 8 * math.prod((self.heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank))

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype}


@dataclass(frozen=True, repr=False)
class GGUFNamesProblem(Problem):
    """Say which parameter each tensor of a model's GGUF file fills; no data is needed.

    Args:
        model: a name of :data:`suites.gguf.models.MODELS`.
        split_kv_b: ``attn_k_b`` and ``attn_v_b``, or the older ``attn_kv_b``.
        mtp: the file holds the multi-token predictor, and it is to be filled.
        layers: the model has only its first so many layers; all if 0. A DeepSeek-V3 of three has no experts.
    """

    model: str = "GLM-5"
    split_kv_b: bool = True
    mtp: bool = False
    layers: int = 0

    operation: ClassVar[str] = "gguf_names"

    def __post_init__(self) -> None:
        check_integers(self, layers=0)
        check_listed(self, model=tuple(MODELS))
        for name in ("split_kv_b", "mtp"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    @property
    def products(self) -> int:
        """None: nothing is computed."""
        return 0

    @property
    def dtypes(self) -> set[str]:
        """None: nothing is computed."""
        return set()
