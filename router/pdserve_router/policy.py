"""In which order workers are asked to take a request. Pure: snapshots in, an order out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A worker as last heard of, plus what this router has sent it since.

    ``has_failed``: it has failed the very request that is to be placed.
    """

    address: str
    num_requests: int
    num_waiting_prefill_tokens: int
    num_free_blocks: int
    has_failed: bool = False


def decode_order(loads: Iterable[Load]) -> list[str]:
    """Fewest requests first; of equals, most room. Who failed comes last: better than nobody."""
    ranked = sorted(
        loads, key=lambda load: (load.has_failed, load.num_requests, -load.num_free_blocks, load.address)
    )
    return [load.address for load in ranked]


def prefill_order(loads: Iterable[Load]) -> list[str]:
    """Fewest prompt tokens still to compute first: a new prompt waits for those. Not who failed:
    decode can do without.
    """
    ranked = sorted(
        (load for load in loads if not load.has_failed),
        key=lambda load: (load.num_waiting_prefill_tokens, load.num_requests, load.address),
    )
    return [load.address for load in ranked]
