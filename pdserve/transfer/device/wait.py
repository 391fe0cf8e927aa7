"""Waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.transfer.stream import NO_PROGRESS_LIMIT_S, LinkLost

# A payload takes a few hundred of them at most.
POLL_S = 1e-4


def nothing() -> None:
    """To watch nothing else."""


def wait_until(
    is_done: Callable[[], bool],
    clock: Clock,
    *,
    what: str,
    watch: Callable[[], object] = nothing,
    limit_s: float = NO_PROGRESS_LIMIT_S,
) -> None:
    """Asks again and again; ``watch`` runs in between and may raise. Raises ``LinkLost`` at the limit.

    No event would do: a device does not wake a thread that has errors and aborts to look at as well.
    """
    deadline_s = clock.now_s() + limit_s
    while not is_done():
        watch()
        if clock.now_s() > deadline_s:
            raise LinkLost(f"{what}: no progress for {limit_s:g} s")
        time.sleep(POLL_S)
