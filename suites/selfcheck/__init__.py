"""Tests of this project itself: the reference, the harness, the ledger, the report, and planted faults."""
