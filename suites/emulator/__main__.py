"""Run a script with its Triton launches emulated: ``python -m mla_conformance.suites.emulator file.py``.

The script needs no change: it makes CPU tensors, launches kernels and may compare the results itself. The exit status
is 1 if there was a finding, or nothing to check.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys


def main() -> int:
    """Parse the command line, run, report."""
    # Before Triton is imported: kernels are compiled, and no GPU of this machine is used.
    os.environ.update(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from mla_conformance.suites.emulator import emulate
    from mla_conformance.suites.harness.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m mla_conformance.suites.emulator", description=__doc__)
    parser.add_argument("script", help="a Python file that launches Triton kernels on CPU tensors")
    parser.add_argument("--target", default="sm_120", choices=list(TARGETS), help="(default: %(default)s)")
    options, sys.argv[1:] = parser.parse_known_args()
    sys.argv[0] = options.script
    with emulate(options.target) as run:
        runpy.run_path(options.script, run_name="__main__")
    for launch in run.launches:
        faults = f"{len(launch.findings)} finding(s)" if launch.findings else "no finding"
        print(f"{options.target}: {launch.function}{list(launch.grid)}: {faults}")
    if not run.launches:
        print(f"{options.script}: launched no Triton kernel, so nothing was checked")
    print(run.report())
    return 1 if run.findings or not run.launches else 0


if __name__ == "__main__":
    raise SystemExit(main())
