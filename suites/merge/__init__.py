"""Conformance tests of merging attention states."""
