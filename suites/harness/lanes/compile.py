"""The ``compile`` lane: what a launcher picks, compiled for GPUs that are absent."""

from __future__ import annotations

from typing import ClassVar

from mla_conformance.suites.harness.lanes import base


class Lane(base.Lane):
    """Compiles in a worker process of its own and launches nothing, so it goes with any lane that executes.

    It shows what a kernel needs of a card, not what it computes there.
    """

    name: ClassVar[str] = "compile"
    executes: ClassVar[bool] = False
