"""Fetch vLLM 0.16.0's Python files: ``python -m mla_conformance.suites.harness.shipped.history_install FOLDER``.

The wheel is 508 MB, nearly all of it compiled for GPUs; only its Python files and ``dist-info`` are kept, and a folder
that has them already is left alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mla_conformance.suites.harness.shipped.vllm_0_16 import VERSION


def install(folder: Path) -> int:
    """Fill ``folder``; return the number of files that were written, 0 if it was complete.

    Raises:
        subprocess.CalledProcessError: pip cannot download the wheel; its own words are on standard error.
    """
    marker = folder / f"vllm-{VERSION}.dist-info" / "METADATA"
    if marker.is_file():
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        subprocess.run([*command, f"vllm=={VERSION}"], check=True)
        with zipfile.ZipFile(next(Path(temporary).glob("vllm-*.whl"))) as wheel:
            kept = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
            # What says that the folder is complete is written last.
            kept.sort(key=lambda name: name.endswith(".dist-info/METADATA"))
            for name in kept:
                wheel.extract(name, folder)
    return len(kept)


def main() -> int:
    """Install into the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="history_install", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"vLLM {VERSION}: {install(folder)} files written to {folder.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
