"""The process that compiles: Triton is set up once a process, and the pytest process may be interpreting.

:mod:`compiler` starts it without arguments and talks JSON with it, one line a request and one line an answer.
By hand it prints a table::

    python -m mla_conformance.suites.harness.compile_worker --impl vllm "MLADecodeProblem(heads=16)"
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_conformance.suites.harness.compiler import Request
    from mla_conformance.suites.harness.cubin import CompiledKernel
    from mla_conformance.suites.harness.implementation import Implementation


def serve() -> None:
    """Answer requests until standard input ends.

    An answer has one of the keys ``kernels`` (a list), ``declined`` (the adapter's reason) or ``error``
    (``launcher``, ``compile`` or ``worker``: who failed; with ``message``).
    """
    # Imported libraries print; whatever reaches descriptor 1 from here on goes to standard error instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: Request) -> dict[str, Any]:
    # Not at the top of the module: imports may print, and the command line below needs none of this.
    from mla_conformance.suites.harness.capture import capture
    from mla_conformance.suites.harness.cubin import measure
    from mla_conformance.suites.harness.operations import OPERATIONS
    from mla_conformance.suites.harness.problems import parse_problem
    from mla_conformance.suites.harness.targets import TARGETS

    try:
        implementation = _load(request["implementation"])
        problem = parse_problem(request["problem"])
        operation = OPERATIONS[problem.operation]
        case = operation.build(problem, "cpu")
    except Exception as error:
        return _error("worker", error)
    target = TARGETS[request["target"]]
    with capture(target, specialise=request["specialise"]) as launches:
        try:
            # Asked here, because an adapter may support one target and not another.
            declined = implementation.declines(problem)
            if declined is not None:
                return {"declined": declined}
            operation.call(implementation, case)
        except MemoryError as error:
            return _error("worker", error)
        except Exception as error:
            if error is launches.failure:
                return _error("compile", error, launches.failed_function)
            return _error("launcher", error)
    distinct = {launch.kernel.hash: launch for launch in launches}
    try:
        return {"kernels": [measure(launch, target).as_dict() for launch in distinct.values()]}
    except Exception as error:
        return _error("worker", error)


@functools.cache
def _load(spec: str) -> Implementation:
    from mla_conformance.suites.harness import implementation

    return implementation.load(spec)


def _error(who: str, error: Exception, function: str = "") -> dict[str, Any]:
    where = f"{function}: " if function else ""
    return {"error": who, "message": f"{where}{type(error).__name__}: {error}".strip()}


def main(arguments: list[str] | None = None) -> int:
    """Without arguments serve; else print what the launcher picks for one problem on each target."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        serve()
        return 0
    from mla_conformance.suites.harness.compiler import Request, shared_worker
    from mla_conformance.suites.harness.errors import NoResult
    from mla_conformance.suites.harness.targets import TARGETS

    parser = argparse.ArgumentParser(prog="compile_worker", description=main.__doc__)
    parser.add_argument("problem", metavar="LINE", help='such as "MLADecodeProblem(heads=16)"')
    parser.add_argument("--impl", required=True, metavar="NAME", help="built-in name, or package.module:Class")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; default: all")
    parser.add_argument("--unspecialised", action="store_true", help="without divisibility by 16, a control")
    given = parser.parse_args(arguments)

    from mla_conformance.suites.harness.cubin import CompiledKernel

    kernels: list[CompiledKernel] = []
    with shared_worker() as worker:
        for target in given.target or TARGETS:
            request = Request(
                implementation=given.impl,
                target=target,
                problem=given.problem,
                specialise=not given.unspecialised,
            )
            try:
                answer = worker.ask(request)
            except NoResult as error:
                answer = {"message": str(error)}
            if "kernels" not in answer:
                print(f"{target}: {answer.get('declined') or answer['message']}", file=sys.stderr)
                return 1
            kernels += [CompiledKernel(**kernel) for kernel in answer["kernels"]]
    print("\n".join(table(kernels)))
    return 0


def table(kernels: list[CompiledKernel]) -> list[str]:
    """Lines of a table of ``kernels``, one a line."""
    from mla_conformance.suites.harness.targets import TARGETS

    heads = "kernel target shared/limit registers stack LDL STL tensor_cores async_copies constants"
    rows = [heads.split()]
    for kernel in kernels:
        rows.append(
            [
                kernel.name,
                kernel.target,
                f"{kernel.shared_bytes}/{TARGETS[kernel.target].shared_bytes}",
                str(kernel.registers),
                str(kernel.stack_bytes),
                "?" if kernel.spill_loads is None else str(kernel.spill_loads),
                "?" if kernel.spill_stores is None else str(kernel.spill_stores),
                _counts(kernel.tensor_core_instructions),
                _counts(kernel.async_copies),
                str(kernel).removeprefix(kernel.name).strip(" ()"),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in counts.items() if count) or "-"


if __name__ == "__main__":
    sys.exit(main())
