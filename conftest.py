"""Loads the suite's pytest plugin; everything else is in ``suites/harness/``."""

pytest_plugins = ["mla_conformance.suites.harness.plugin"]
