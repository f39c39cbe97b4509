"""The ``proxy`` lane: kernels lowered as for SM120, run on the GPU of this machine."""

from __future__ import annotations

from typing import ClassVar

from mla_conformance.suites.harness.lanes import cuda


class Lane(cuda.Lane):
    """As ``cuda``, with Triton's lowering decisions made as for sm_120 (mma.sync, no wgmma, no tcgen05).

    It shows that the code path an SM120 card would take computes rightly; not that it fits or runs on such a card.
    """

    name: ClassVar[str] = "proxy"
    # The card at hand may take what the one that it stands in for refuses.
    tells_refusals: ClassVar[bool] = False

    def environment(self) -> dict[str, str]:
        """Triton reads this when it compiles."""
        return super().environment() | {"TRITON_OVERRIDE_ARCH": "sm120"}
