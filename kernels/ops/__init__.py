"""The kernels as ``torch.library`` operators, ``torch.ops.mla_conformance.*``, for callers that compile.

Importing this package registers all of them. Most come twice: under their own name they allocate and return what they
compute, and with ``_out`` behind it they write into buffers of the caller and return nothing. A schema names what its
operator writes, so that ``torch.compile`` neither drops the call nor reads a buffer before it. None reads what lies on
the device, so a CUDA graph can capture each. What is computed, what is refused and how it is rounded: see the function
of the same name that each calls. The suite holds them to their word (requirements MLA-OPS, docs/contracts.md).
"""

from mla_conformance.kernels.ops import absorption, attention, cache, gguf, merges

__all__ = ["absorption", "attention", "cache", "gguf", "merges"]
