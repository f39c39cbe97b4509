"""Promises of an operator inside a CUDA graph."""

from __future__ import annotations

import torch

from mla_conformance.suites.contracts.arguments import a_tensor, prepared, results_of, same_bits, tensors_of, where
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.op_call import OpCall


def check_graph_replay(call: OpCall) -> None:
    """A captured call, replayed on other contents of the same tensors, gives what eager gives on them.

    Everything that a tensor holds changes between replays, lengths, tables and slots too: what the host read of it
    during capture would stay as it was.

    Args:
        call: the operator and its arguments, on a GPU.

    Raises:
        Mismatch: otherwise, or it cannot be captured.
    """
    captured, _ = prepared(call, call.arguments)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        call.op(**captured)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            returned = call.op(**captured)
    except RuntimeError as error:
        # A host that waits for the device during capture is what CUDA refuses.
        raise Mismatch(f"{call.name}: it cannot be captured: {error}") from error
    replayed = results_of(returned) | {name: a_tensor(name, captured[name]) for name in call.written}
    for seed in (1, 2, 0):
        fresh, _ = prepared(call, call.arguments, seed)
        for name, tensor in tensors_of(captured).items():
            tensor.copy_(a_tensor(name, fresh[name]))
        graph.replay()
        results = results_of(call.op(**fresh))
        expected = results | {name: a_tensor(name, fresh[name]) for name in call.written}
        for name, tensor in expected.items():
            if not same_bits(replayed[name], tensor):
                raise Mismatch(
                    f"{where(call, f'replay {seed}')}: phantom output: {name} of the captured call differs from "
                    "eager's: something that the host read while capturing stayed as it was"
                )
