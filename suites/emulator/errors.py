"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of this package's errors."""


class PTXError(EmulatorError):
    """A text that is not PTX, or a launch that does not fit it; says where and what to do."""


class UnsupportedInstruction(EmulatorError):
    """An instruction form that the emulator does not implement: nothing is guessed, the run stops. Names its text."""


class EmulationStopped(EmulatorError):
    """A run that cannot go on: a deadlock, or more instructions than its budget; the message says which."""
