"""Conformance tests of writing into the paged cache."""
