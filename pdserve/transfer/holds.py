"""Which blocks are still what they were when they were offered: a page of numbers that peers may read.

::

    prefill                                decode
    take: slot ← a number never used       copy out of the blocks
    offer the blocks, slot and number      slot still has the number?  yes: what was copied is right
    let go: slot ← 0, then reuse them                                  no: forget what was copied

A peer that is stopped in the middle of a copy for however long finds the slot changed when it wakes.
"""

from __future__ import annotations

import threading

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.shared_memory import SharedMemory

NUM_SLOTS = 4096
_SLOT_BYTES = 8


class Holds:
    """Prefill's side, one for a pool."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create(NUM_SLOTS * _SLOT_BYTES)
        self._slots = memoryview(self.memory.content).cast("Q")
        self._free = list(range(NUM_SLOTS))
        self._last_number = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[int, int] | None:
        """A slot and its number; None when all are taken."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._last_number += 1
            self._slots[slot] = self._last_number
            return slot, self._last_number

    def let_go(self, slot: int) -> None:
        with self._lock:
            self._slots[slot] = 0
            self._free.append(slot)


class PeerHolds:
    """Decode's side."""

    def __init__(self, memory: SharedMemory) -> None:
        """Raises ``ProtocolViolation``."""
        if memory.num_bytes != NUM_SLOTS * _SLOT_BYTES:
            raise ProtocolViolation(f"a page of holds has {memory.num_bytes} bytes")
        self._slots = memoryview(memory.content).cast("Q")

    def is_held(self, slot: int, number: int) -> bool:
        """Raises ``ProtocolViolation`` for a slot that is none."""
        if slot >= NUM_SLOTS:
            raise ProtocolViolation(f"no slot {slot}")
        return self._slots[slot] == number
