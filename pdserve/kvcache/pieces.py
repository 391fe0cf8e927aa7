"""A payload where it lies in memory: equal pieces, known by their addresses."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ProtocolViolation
from pdserve.kernels import pieces, xxh3
from pdserve.kernels.pieces import STRIPE_BYTES
from pdserve.kvcache.shared_memory import SharedMemory

# Copied in about 0.1 ms, after which it is asked whether to go on.
COPY_BYTES = 1 << 20


class Pieces:
    """In the order in which they travel. ``owner`` keeps their memory alive."""

    def __init__(
        self,
        addresses: NDArray[np.uint64],
        piece_bytes: int,
        owner: object,
        memory: SharedMemory | None = None,
    ) -> None:
        """``memory``: where all of them lie, if another process sees it."""
        self._addresses = addresses
        self._piece_bytes = piece_bytes
        self._owner = owner
        self._memory = memory
        self.num_bytes = len(addresses) * piece_bytes

    @classmethod
    def of_blocks(
        cls, pools: Sequence[NDArray[np.uint8]], block_ids: Sequence[int], memory: SharedMemory | None = None
    ) -> Pieces:
        """``pools``: [blocks, block_bytes] each; the blocks of the first pool come first."""
        bases = np.array([pool.ctypes.data for pool in pools], dtype=np.uint64)
        block_bytes = pools[0].shape[1]
        offsets = np.array(block_ids, dtype=np.uint64) * np.uint64(block_bytes)
        return cls((bases[:, None] + offsets).reshape(-1), block_bytes, pools, memory)

    @classmethod
    def of_arrays(cls, arrays: Sequence[NDArray[np.uint8]]) -> Pieces:
        """Equal in size."""
        addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
        return cls(addresses, arrays[0].nbytes, arrays)

    def gather(self, begin: int, out: memoryview) -> None:
        pieces.gather(self._addresses, self._piece_bytes, begin, np.frombuffer(out, np.uint8))

    def scatter(self, begin: int, content: memoryview) -> None:
        pieces.scatter(self._addresses, self._piece_bytes, begin, np.frombuffer(content, np.uint8))

    # ------------------------------------------------------ between processes

    def shared_offsets(self) -> bytes | None:
        """Of each piece in the shared memory, or None when they are not there or cannot be copied from it."""
        if self._memory is None or not self._can_be_hashed:
            return None
        return (self._addresses - _address(self._memory)).tobytes()

    def checksum(self) -> int:
        """Of pieces that have ``shared_offsets``."""
        sums = xxh3.first_sums()
        xxh3.hash_pieces(sums, self._addresses, self._piece_bytes)
        return xxh3.result(sums, self.num_bytes)

    def copy_from(self, memory: SharedMemory, offsets: bytes, may_go_on: Callable[[], bool]) -> int | None:
        begins = np.frombuffer(offsets, np.uint64)
        target = self._split(len(begins))
        piece_bytes = target._piece_bytes
        if piece_bytes > memory.num_bytes or begins.max() > memory.num_bytes - piece_bytes:
            raise ProtocolViolation("a piece lies outside the shared memory")
        sources = begins + _address(memory)
        sums = xxh3.first_sums()
        step = max(1, COPY_BYTES // piece_bytes)
        for begin in range(0, len(sources), step):
            if not may_go_on():
                return None
            end = min(begin + step, len(sources))
            xxh3.copy_and_hash(sums, sources, target._addresses, piece_bytes, begin, end)
        return xxh3.result(sums, self.num_bytes)

    def _split(self, count: int) -> Pieces:
        """The same memory in ``count`` pieces. Raises ``ProtocolViolation`` when that cannot be."""
        if not count or count % len(self._addresses) or self.num_bytes % count:
            raise ProtocolViolation(f"{count} pieces for {len(self._addresses)} of {self._piece_bytes} bytes")
        piece_bytes = self.num_bytes // count
        steps = np.arange(0, self._piece_bytes, piece_bytes, dtype=np.uint64)
        split = Pieces((self._addresses[:, None] + steps).reshape(-1), piece_bytes, self._owner)
        if not split._can_be_hashed or (split._addresses % np.uint64(STRIPE_BYTES)).any():
            raise ProtocolViolation(f"pieces of {piece_bytes} bytes are not copied from shared memory")
        return split

    @property
    def _can_be_hashed(self) -> bool:
        """At both ends alike: they have the same sizes."""
        return self._piece_bytes % STRIPE_BYTES == 0 and self.num_bytes >= xxh3.MIN_BYTES


def _address(memory: SharedMemory) -> np.uint64:
    return np.uint64(np.frombuffer(memory.content, np.uint8).ctypes.data)


def warm_up() -> None:
    """Compiles the kernels, or reads them from their cache, so that no link has to wait for that."""
    memory = SharedMemory.create(2 * mmap.PAGESIZE)
    pool = np.frombuffer(memory.content, np.uint8).reshape(2, -1)
    source, target = (Pieces.of_blocks([pool], [block], memory) for block in (0, 1))
    buffer = memoryview(bytearray(source.num_bytes))
    source.gather(0, buffer)
    target.scatter(0, buffer)
    offsets = source.shared_offsets()
    assert offsets is not None, "pieces of whole stripes in shared memory"
    assert target.copy_from(memory, offsets, lambda: True) == source.checksum()
