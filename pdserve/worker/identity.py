"""Who this process is: a new incarnation at every start, so nothing outlives a restart unnoticed."""

from __future__ import annotations

import secrets
from pathlib import Path


def new_incarnation() -> int:
    """A random non-zero 64-bit number."""
    return secrets.randbits(64) or 1


def boot_id() -> str:
    """Equal for two processes exactly when they run on one booted host (containers included)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
