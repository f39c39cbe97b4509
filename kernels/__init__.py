"""Fixed Triton kernels for Multi-head Latent Attention, released only while the conformance suite passes on them."""

from mla_conformance.kernels.mla_decode import mla_decode

__all__ = ["mla_decode"]
