"""Which worker gets a request. Pure: snapshots in, a choice out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A worker as last heard of, plus what this router has sent it since."""

    address: str
    num_requests: int
    num_waiting_prefill_tokens: int
    num_free_blocks: int


def least_loaded_decode(loads: Iterable[Load]) -> str | None:
    """Fewest requests; of equals, the one with most room. None when there is no worker."""
    return _first(loads, lambda load: (load.num_requests, -load.num_free_blocks))


def least_loaded_prefill(loads: Iterable[Load]) -> str | None:
    """Fewest prompt tokens still to compute, since that is what a new prompt waits for."""
    return _first(loads, lambda load: (load.num_waiting_prefill_tokens, load.num_requests))


def _first(loads: Iterable[Load], key: Callable[[Load], tuple[int, int]]) -> str | None:
    best = min(loads, key=lambda load: (*key(load), load.address), default=None)
    return None if best is None else best.address
