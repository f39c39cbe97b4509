"""What operators that write into their caller's buffers do while tracing."""

from __future__ import annotations


def nothing(*_arguments: object, **_options: object) -> None:
    """Nothing is returned and no shape depends on anything, so there is nothing to say."""
