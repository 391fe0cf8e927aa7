"""A worker's status as numbers by state, as metrics show them on either side."""

from __future__ import annotations

from pdserve.rpc.v1 import worker_pb2 as pb


def blocks_by_state(status: pb.WorkerStatus) -> dict[str, int]:
    """Adds up to the usable blocks of the pool."""
    # Grants may share cached blocks, each counts them.
    num_quarantined = min(status.num_quarantined_blocks, status.num_owned_blocks)
    return {
        "free": status.num_free_blocks - status.num_cached_blocks,
        "cached": status.num_cached_blocks,
        "owned": status.num_owned_blocks - num_quarantined,
        "quarantined": num_quarantined,
    }


def sequences_by_state(status: pb.WorkerStatus) -> dict[str, int]:
    return {
        "waiting": status.num_waiting,
        "running": status.num_running,
        "reserved": status.num_reserved,
    }
