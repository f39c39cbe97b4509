"""The record of where a run took place: enough for somebody else to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mla_conformance import kernels, reference, suites
from mla_conformance.suites.harness.lanes import Lane

PACKAGES = ("mla-conformance", "torch", "triton", "vllm", "numpy", "hypothesis", "pytest")
VARIABLES = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH", "TRITON_DEFAULT_FP_FUSION", "CUDA_VISIBLE_DEVICES")


def device_name(lanes: list[Lane]) -> str:
    """The name of the device on which kernels execute, ``cpu`` where there is none."""
    on_gpu = any(lane.executes and lane.device == "cuda" for lane in lanes)
    return torch.cuda.get_device_name() if on_gpu else "cpu"


def record(lanes: list[Lane]) -> dict[str, Any]:
    """Versions, platform, and the device with its driver."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sources": sources_digest(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "lanes": [lane.name for lane in lanes],
        "device": device_name(lanes),
    }
    if found["device"] != "cpu":
        properties = torch.cuda.get_device_properties()
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def sources_digest() -> str:
    """A sha256 over the suite's own code and data, so that a record can be tied to what made it."""
    digest = hashlib.sha256()
    for package in (kernels, reference, suites):
        folder = Path(str(package.__file__)).parent
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".toml")):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown"
    query = [smi, "--query-gpu=driver_version,uuid", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    return "; ".join(listing.split("\n")).strip("; ")
