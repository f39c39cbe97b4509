"""The conformance suites: requirements, expectations, and the harness that runs and judges them."""
