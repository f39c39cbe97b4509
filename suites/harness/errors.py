"""What can go wrong, one class a status."""

from __future__ import annotations

import pytest

BadUse = pytest.UsageError
"""The command line, a data file or the installation is wrong: pytest prints one sentence and exits with code 4."""


class Unsupported(Exception):
    """The implementation or the lane declared, before any launch, that it does not do this. Status ``unsupported``."""


class NoResult(Exception):
    """Nothing can be said: out of memory, a lost device, a dead worker. Status ``no-result``."""


class Mismatch(AssertionError):
    """The implementation broke a requirement. Status ``fail``, or ``expected-fail`` if the ledger has it."""
