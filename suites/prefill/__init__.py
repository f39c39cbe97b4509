"""Conformance tests of MLA prefill in the expanded form."""
