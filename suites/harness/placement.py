"""Which GPU a pytest-xdist worker uses. Runs before torch is imported: CUDA reads the variable once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA would show this process, as CUDA_VISIBLE_DEVICES names them; empty without a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    listing = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
    present = re.findall(r"^GPU (\d+):", listing.stdout, flags=re.MULTILINE)
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    devices = []
    for name in (part.strip() for part in chosen.split(",")):
        # As CUDA does: the list ends at the first entry that names no device.
        if not name or (name.isdigit() and name not in present) or name.startswith("-"):
            break
        devices.append(name)
    return devices


def device_of_worker(worker: str | None, devices: list[str]) -> str | None:
    """Return the device of worker ``gw<i>``: round robin over the visible list, so that workers may share one.

    None means leave the variable alone: there is no GPU, or no worker.
    """
    if worker is None or not devices:
        return None
    match = re.fullmatch(r"gw(\d+)", worker)
    if match is None:
        raise ValueError(f"worker={worker!r} is not of the form gw<number>")
    return devices[int(match.group(1)) % len(devices)]
