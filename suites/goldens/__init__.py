"""Golden tensors made by other people's code, and the one way to load them.

Each `<name>.safetensors` holds the inputs, the weights and the results of somebody else's attention layer.
`provenance.toml` says what made it and gives its sha256; `generate.py` makes it again, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

FOLDER = Path(__file__).parent
PROVENANCE = FOLDER / "provenance.toml"


class GoldenError(Exception):
    """A golden is unknown, missing, or not the file that its provenance describes."""


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all goldens that have a provenance, sorted."""
    return sorted(_provenance(folder))


def load(name: str, folder: Path = FOLDER) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read one golden after checking that it is the file that its provenance describes.

    Args:
        name: file name without `.safetensors`.
        folder: where the files and their `provenance.toml` lie.

    Returns:
        The tensors by name (layer weights are called `weights.` and their Hugging Face name), and the
        provenance stored inside the file: generator, versions, seed and config.

    Raises:
        GoldenError: if the golden is not listed, its file is missing, or the sha256 differs.

    """
    provenance = _provenance(folder)
    if name not in provenance:
        raise GoldenError(f"golden {name!r} is not in provenance.toml, which lists {sorted(provenance)}")
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise GoldenError(f"{path.name} is listed in provenance.toml and is not there; run generate.py --write")
    content = path.read_bytes()
    found, expected = hashlib.sha256(content).hexdigest(), provenance[name]["sha256"]
    if found != expected:
        raise GoldenError(
            f"{path.name} has sha256 {found} and provenance.toml says {expected}; "
            "restore the file from version control, or regenerate both with generate.py --write"
        )
    with safe_open(path, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["provenance"])
    return tensors_from_bytes(content), metadata


def _provenance(folder: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads((folder / PROVENANCE.name).read_text(encoding="utf-8"))
