"""Operators that ``--op`` names, as an implementation that offers nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from mla_conformance.suites.harness.errors import BadUse
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.op_call import OpCall
from mla_conformance.suites.harness.problems import Problem


class GivenOp(Implementation):
    """One operator of the user's; it is called by the text that named it."""

    option = "--op"

    def __init__(self, spec: str, call: OpCall) -> None:
        self.name = spec  # type: ignore[misc]
        self._call = call

    def version(self) -> str:
        """Nothing is known of it."""
        return "given"

    def declines(self, problem: Problem) -> str | None:
        """It has no operation that would be asked."""
        return None

    def registered_ops(self) -> Sequence[OpCall]:
        """The one."""
        return (self._call,)


def load(spec: str) -> GivenOp:
    """The operator that ``package.module:NAME`` names, an :class:`OpCall`.

    Raises:
        BadUse: there is none.
    """
    module_name, _, name = spec.partition(":")
    if not name:
        raise BadUse(f"--op {spec}: name an OpCall as package.module:NAME")
    try:
        call = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise BadUse(f"--op {spec}: cannot be imported: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise BadUse(f"--op {spec}: {error}") from error
    if not isinstance(call, OpCall):
        raise BadUse(f"--op {spec}: is a {type(call).__name__}; make it an OpCall (docs/contracts.md)")
    return GivenOp(spec, call)
