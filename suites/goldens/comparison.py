"""How a stored golden differs from one that was made again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor


def describe_differences(
    stored: Mapping[str, Tensor],
    stored_provenance: Mapping[str, Any],
    fresh: Mapping[str, Tensor],
    provenance: Mapping[str, Any],
    versions: Collection[str],
) -> list[str]:
    """Describe every way in which the two differ, bit by bit; ``versions`` are provenance that may differ."""
    found = []
    for key in sorted(provenance.keys() | stored_provenance.keys()):
        if key not in versions and provenance.get(key) != stored_provenance.get(key):
            found.append(f"metadata {key}: {stored_provenance.get(key)} stored, {provenance.get(key)} now")
    for name in sorted(fresh.keys() | stored.keys()):
        if name not in fresh or name not in stored:
            found.append(f"tensor {name}: {'only stored' if name in stored else 'not stored'}")
        elif stored[name].shape != fresh[name].shape or stored[name].dtype != fresh[name].dtype:
            found.append(f"tensor {name}: another shape or dtype")
        elif not torch.equal(_bytes(stored[name]), _bytes(fresh[name])):
            largest = (stored[name].double() - fresh[name].double()).abs().max().item()
            count = int((stored[name] != fresh[name]).sum())
            found.append(f"tensor {name}: {count} of {fresh[name].numel()} elements differ, at most {largest:.3e}")
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
