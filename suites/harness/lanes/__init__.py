"""Lanes: where a case runs. One module a lane, each with a class ``Lane``; adding a lane is adding a module."""

from __future__ import annotations

import importlib
import pkgutil

from mla_conformance.suites.harness.errors import BadUse
from mla_conformance.suites.harness.lanes.base import Lane

__all__ = ["Lane", "choose", "names"]


def names() -> list[str]:
    """The lanes that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def choose(requested: list[str], devices: list[str]) -> list[Lane]:
    """Return the lanes that ``--lane`` asks for on a machine with these visible GPUs.

    ``auto`` means every lane that needs nothing said: ``cuda`` with a GPU, ``emulate`` without, and ``compile``.

    Raises:
        BadUse: a lane is unknown, cannot run here, or cannot share a process with another one.
    """
    wanted: list[str] = []
    for name in requested:
        wanted += ["cuda" if devices else "emulate", "compile"] if name == "auto" else [name]
    lanes = []
    for name in dict.fromkeys(wanted):
        if name not in names():
            raise BadUse(f"--lane {name}: unknown; use auto, {', '.join(names())}")
        lane: Lane = importlib.import_module(f"{__name__}.{name}").Lane()
        missing = lane.missing(devices)
        if missing is not None:
            raise BadUse(f"--lane {name}: {missing}")
        lanes.append(lane)
    executing = [lane.name for lane in lanes if lane.executes]
    if len(executing) > 1:
        raise BadUse(f"--lane {' and '.join(executing)} need separate runs: Triton is set up once a process")
    return lanes
