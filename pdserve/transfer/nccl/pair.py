"""Communicators of two ranks: made against a deadline, watched, aborted. Never destroyed.

::

    init ──► in progress ──► ready ──► failed, or not needed any more
      │           │                        │
      └───────────┴────────────────────────┴──► aborting ──► over: its memory may go
                                                    └──► stuck: kept, and no new pair is made

``ncclCommDestroy`` waits for the peer, so a healthy pair is aborted as well, when nothing is in flight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from pdserve.clock import Clock
from pdserve.errors import PeerError
from pdserve.kvcache.layout import KVLayout
from pdserve.transfer.device.memory import DeviceBuffer, DeviceKV, Lane, staging_bytes
from pdserve.transfer.device.pairing import PairRefused
from pdserve.transfer.device.wait import wait_until
from pdserve.transfer.nccl.library import IN_PROGRESS, SUCCESS, NcclError, NcclLibrary
from pdserve.transfer.socket_stream import Tenancy

logger = logging.getLogger(__name__)

PREFILL_RANK, DECODE_RANK = 0, 1
# Each takes NCCL's buffers, some 50 MB, and while it moves something a few multiprocessors.
MAX_PAIRS = 16
# Ids that nobody has come to; each holds a thread and a socket, for good if nobody ever comes.
MAX_UNJOINED_IDS = 16
ABORT_LIMIT_S = 10.0


class NcclPair:
    """One communicator with the staging memory and the lane that it works on: they share a fate."""

    def __init__(
        self, pairs: NcclPairs, communicator: object, lane: Lane, staging: DeviceBuffer, *, peer: int
    ) -> None:
        self.communicator = communicator
        self.lane = lane
        self.staging = staging
        self._library = pairs.library
        self._peer = peer
        self._tenancy = Tenancy(lambda: pairs.begin_abort(self))

    def is_ready(self) -> bool:
        """Whether all that was started has been accepted. Raises ``NcclError``; ``LinkLost`` once closed."""
        with self.inside():
            status = self._library.status(self.communicator)
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclError("the pair", status, "failed")
        return status == SUCCESS

    def inside(self) -> AbstractContextManager[None]:
        """Work is put on the lane in here alone, so that an abort comes after all of it.

        Raises ``LinkLost`` once the pair is closed.
        """
        return self._tenancy.inside()

    def send(self, num_bytes: int) -> None:
        """Starts; the peer's ``receive`` of as many bytes ends it."""
        with self.inside():
            data = self.staging.head(num_bytes)
            self._library.send(self.communicator, data, peer=self._peer, stream=self.lane.handle)

    def receive(self, num_bytes: int) -> None:
        with self.inside():
            data = self.staging.head(num_bytes)
            self._library.receive(self.communicator, data, peer=self._peer, stream=self.lane.handle)

    def mark(self) -> Callable[[], bool]:
        """Whether the work up to here is done."""
        with self.inside():
            return self.lane.mark()

    def close(self) -> None:
        """Idempotent, from any thread. No abort while a thread is in a call: NCCL forbids it."""
        self._tenancy.end(wake=lambda: None)


class NcclPairs:
    """All communicators of this process. Thread-safe."""

    def __init__(self, library: NcclLibrary, kv: DeviceKV, clock: Clock) -> None:
        self.library = library
        self.staging_bytes = staging_bytes(kv.layout)
        self._kv = kv
        self._clock = clock
        self._lock = threading.Lock()
        self._num_open = 0
        self._num_unjoined_ids = 0
        self._aborting: dict[NcclPair, float] = {}

    @property
    def layout(self) -> KVLayout:
        return self._kv.layout

    @property
    def num_open(self) -> int:
        """Pairs that hold memory: in use, or being aborted."""
        return self._num_open

    @property
    def num_unjoined_ids(self) -> int:
        return self._num_unjoined_ids

    @property
    def num_stuck(self) -> int:
        """Pairs whose abort has not come back: their staging memory is in quarantine."""
        overdue_s = self._clock.now_s() - ABORT_LIMIT_S
        with self._lock:
            return sum(begun_s < overdue_s for begun_s in self._aborting.values())

    def unique_id(self) -> bytes:
        """Decode's, for a pair that both sides want. Raises ``PairRefused`` or ``NcclError``."""
        self.check_room()
        with self._lock:
            self._num_unjoined_ids += 1
        return self.library.unique_id()

    def open(self, unique_id: bytes, *, rank: int, limit_s: float) -> NcclPair:
        """Both ranks have joined. Raises ``PeerError``; whatever was begun is then aborted."""
        self.check_room()
        with self._lock:
            self._num_open += 1
        try:
            self._kv.use_device()
            lane = self._kv.new_lane()
            staging = self._kv.new_buffer(self.staging_bytes)
            communicator = self.library.init(unique_id, rank=rank)
        except PeerError:
            self._forget()
            raise
        pair = NcclPair(self, communicator, lane, staging, peer=1 - rank)
        try:
            wait_until(pair.is_ready, self._clock, what="nccl: init", limit_s=limit_s)
        except PeerError:
            pair.close()
            raise
        if rank == DECODE_RANK:
            with self._lock:
                self._num_unjoined_ids -= 1
        logger.info("nccl_pair_up rank=%d", rank)
        return pair

    def check_room(self) -> None:
        """Raises ``PairRefused``."""
        if num_stuck := self.num_stuck:
            raise PairRefused(f"{num_stuck} aborts hang; the process needs a restart to use NCCL again")
        if self._num_open >= MAX_PAIRS:
            raise PairRefused(f"{MAX_PAIRS} pairs are open")
        if self._num_unjoined_ids >= MAX_UNJOINED_IDS:
            raise PairRefused(f"nobody came to {MAX_UNJOINED_IDS} ids")

    def begin_abort(self, pair: NcclPair) -> None:
        """On a thread of its own: it may hang."""
        with self._lock:
            self._aborting[pair] = self._clock.now_s()
        threading.Thread(target=self._abort, args=(pair,), name="nccl-abort", daemon=True).start()

    def _abort(self, pair: NcclPair) -> None:
        try:
            self.library.abort(pair.communicator)
            # The abort ends what is in flight; the lane says when the device has noticed.
            wait_until(pair.lane.mark(), self._clock, what="nccl: abort", limit_s=ABORT_LIMIT_S)
        except PeerError as error:
            logger.error("nccl_abort_failed detail=%s", error)
            return  # it stays in the books, and its memory with it
        with self._lock:
            del self._aborting[pair]
        self._forget()
        logger.info("nccl_pair_over")

    def _forget(self) -> None:
        with self._lock:
            self._num_open -= 1
