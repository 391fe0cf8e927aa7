"""The prefill worker's settings."""

from __future__ import annotations

from typing import ClassVar

from pdserve.worker.config import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker of pdserve: runs prompts and pushes their KV to decode workers."""

    program: ClassVar[str] = "prefill"
