"""Global memory: the storages of tensors, at far-apart virtual addresses.

A wild index cannot land in a neighbour: regions lie 64 GiB apart, farther than any 32-bit index times an element
reaches, and nothing else is mapped. Real host addresses hide such faults, because tensors are allocated side by side.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from mla_conformance.suites.emulator.findings import Findings, Kind
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, whole

GAP = 1 << 36
FIRST = 1 << 42
ALIGNMENT = 256
"""A storage keeps its real address modulo this, so that alignment is what the kernel was specialised for."""
NOBODY = 0
"""Who has written an element that no CTA wrote; CTA n is n + 1."""
MAP_NORESERVE = 0x4000
"""Linux: address space without a promise of memory (``mmap`` names it from Python 3.13 on)."""


class Region:
    """One mapped storage.

    Args:
        base: its virtual address.
        data: its bytes, in place.
        element: bytes of one element, the grain at which writers are told apart.
        name: for messages.
        owner: kept alive with the region.
    """

    def __init__(self, base: int, data: Array, element: int, name: str, owner: Any = None) -> None:
        self.base, self.end = base, base + len(data)
        self.data, self.name = data, name
        self.element = element
        self.writers: Array | None = None
        self._owner = owner
        self._views: dict[tuple[str, int], Array] = {}

    def rows(self, dtype: str, count: int) -> Array:
        """The bytes as rows of ``count`` elements; a last part row is left out."""
        key = dtype, count
        if key not in self._views:
            size = np.dtype(dtype).itemsize * count
            whole = len(self.data) // size * size
            self._views[key] = self.data[:whole].view(dtype).reshape(-1, count)
        return self._views[key]

    def note_writes(self, starts: Array, size: int, ctas: Array) -> Array:
        """Note which CTA writes ``size`` bytes at each offset; True where another CTA has written before."""
        if self.writers is None:
            self.writers = _untouched(-(-len(self.data) // self.element))
        if size < self.element:
            self.writers = np.repeat(self.writers, self.element // size)
            self.element = size
        per = size // self.element
        cells = (starts // self.element)[:, None] + np.arange(per)
        before = self.writers[cells]
        writer = ctas[:, None] + 1
        self.writers[cells] = writer
        foreign: Array = ((before != NOBODY) & (before != writer)).any(1)
        # Of two CTAs within this one instruction, the record keeps one; the other sees it here.
        foreign |= (self.writers[cells] != writer).any(1)
        return foreign


def _untouched(cells: int) -> Array:
    """NOBODY for each cell. Memory is taken where something is written: a tensor may be mostly address space."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 4 * cells, flags=flags), "i4")


class GlobalMemory:
    """The regions of one launch."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._bases: list[int] = []
        self._regions: list[Region] = []
        self._by_storage: dict[int, Region] = {}

    def map_tensor(self, tensor: Any) -> int:
        """Map the storage of a CPU torch tensor (once) and return the virtual address of its first element."""
        storage = tensor.untyped_storage()
        real = storage.data_ptr()
        if storage.nbytes() == 0:
            return 0
        if real not in self._by_storage:
            buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(real)
            name = f"tensor {len(self._by_storage)} ({tensor.dtype}, shape {tuple(tensor.shape)})"
            data = np.frombuffer(buffer, np.uint8)
            self._by_storage[real] = self._map(real % ALIGNMENT, data, tensor.element_size(), name, tensor)
        offset: int = tensor.data_ptr() - real
        return self._by_storage[real].base + offset

    def map_bytes(self, data: Array, name: str, element: int = 1) -> int:
        """Map bytes that belong to nobody's tensor, such as a module's constants; returns their address."""
        return self._map(0, data, element, name, None).base

    def __len__(self) -> int:
        return len(self._regions)

    def forget(self, kept: int) -> None:
        """Unmap all regions but the first ``kept``."""
        del self._bases[kept:], self._regions[kept:]
        self._by_storage.clear()

    def _map(self, skew: int, data: Array, element: int, name: str, owner: Any) -> Region:
        base = FIRST + GAP * len(self._regions) + skew
        region = Region(base, data, element, name, owner)
        self._bases.append(base)
        self._regions.append(region)
        return region

    def parts(
        self, instruction: Instruction, addresses: Array, size: int, lanes: Array
    ) -> Iterator[tuple[Region, Array | slice, Array]]:
        """Split one access by region.

        Args:
            instruction: for messages.
            addresses: [n] virtual addresses, uint64.
            size: bytes that each lane accesses.
            lanes: [n] the lanes, for messages.

        Yields:
            a region, which of the n lanes are in it (a slice for all), their byte offsets in it. Lanes that are out of
            bounds or misaligned are reported and left out.
        """
        if not len(addresses):
            return
        if size > 1 and int(np.bitwise_or.reduce(addresses)) & (size - 1):
            addresses, lanes, kept = self._aligned(instruction, addresses, size, lanes)
            for found, chosen, offsets in self.parts(instruction, addresses, size, lanes):
                yield found, kept[chosen], offsets
            return
        low, high = int(addresses.min()), int(addresses.max())
        region = self._at(low)
        if region is not None and region.base <= low and high + size <= region.end:
            yield region, slice(None), (addresses - np.uint64(region.base)).astype("i8")
            return
        yield from self._scattered(instruction, addresses, size, lanes)

    def region_at(self, address: int) -> Region | None:
        """The region that holds the byte at an address, or None."""
        region = self._at(address)
        return region if region is not None and address < region.end else None

    def _at(self, address: int) -> Region | None:
        place = bisect.bisect(self._bases, address) - 1
        return self._regions[place] if place >= 0 else None

    def _scattered(
        self, instruction: Instruction, addresses: Array, size: int, lanes: Array
    ) -> Iterator[tuple[Region, Array, Array]]:
        """Several regions, or none."""
        places = np.searchsorted(np.array(self._bases, "u8"), addresses, side="right").astype("i8") - 1
        for place in np.unique(places):
            chosen = np.flatnonzero(places == place)
            if place < 0:
                self._outside(instruction, addresses[chosen], size, lanes[chosen])
                continue
            region = self._regions[place]
            offsets = (addresses[chosen] - np.uint64(region.base)).astype("i8")
            inside = offsets + size <= len(region.data)
            if not inside.all():
                self._outside(instruction, addresses[chosen][~inside], size, lanes[chosen][~inside])
            if inside.any():
                yield region, chosen[inside], offsets[inside]

    def _outside(self, instruction: Instruction, addresses: Array, size: int, lanes: Array) -> None:
        address = int(addresses[0])
        if address < FIRST:
            where = f"address {address:#x} belongs to no tensor" + (
                " (a null pointer plus an offset)" if address < GAP else ""
            )
        else:
            # Signed offsets are told from the nearest storage: GAP is twice what any offset here can mean.
            place = min((address - FIRST + GAP // 2) // GAP, len(self._regions) - 1)
            region = self._regions[place]
            offset = address - region.base
            where = f"byte {offset} of {region.name}, which has {len(region.data)} bytes"
        self.findings.add(
            Kind.GLOBAL_BOUNDS,
            instruction,
            len(addresses),
            f"{self.findings.thread(int(lanes[0]))} accesses {size} byte(s) at {where}",
        )

    def _aligned(
        self, instruction: Instruction, addresses: Array, size: int, lanes: Array
    ) -> tuple[Array, Array, Array]:
        bad = (addresses & np.uint64(size - 1)) != 0
        first = int(np.flatnonzero(bad)[0])
        self.findings.add(
            Kind.MISALIGNED,
            instruction,
            int(bad.sum()),
            f"{self.findings.thread(int(lanes[first]))} accesses {size} bytes at {int(addresses[first]):#x}, "
            f"which is no multiple of {size}",
        )
        kept = np.flatnonzero(~bad)
        return addresses[kept], lanes[kept], kept


def gather(region: Region, offsets: Array, dtype: str, count: int) -> Array:
    """Rows [n, count] read at byte ``offsets`` of a region."""
    size = np.dtype(dtype).itemsize * count
    if region.base % size == 0:
        return region.rows(dtype, count).take(offsets // size, 0)
    spread = region.data[offsets[:, None] + np.arange(size)]
    return np.ascontiguousarray(spread).view(dtype).reshape(-1, count)


def scatter(region: Region, offsets: Array, values: Array) -> None:
    """Write rows [n, count] at byte ``offsets`` of a region."""
    size = values.dtype.itemsize * values.shape[1]
    if region.base % size == 0:
        region.rows(whole(size), 1)[offsets // size, 0] = np.ascontiguousarray(values).view(whole(size))[:, 0]
    else:
        region.data[offsets[:, None] + np.arange(size)] = np.ascontiguousarray(values).view("u1").reshape(-1, size)
