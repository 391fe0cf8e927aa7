"""The prefill worker's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from pdserve.transfer.wire_choice import WireOption
from pdserve.worker.config import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker of pdserve: runs prompts and pushes their KV to decode workers."""

    program: ClassVar[str] = "prefill"

    wire_dtype: WireOption = Field(
        "same",
        description="KV on its way to decode: same (bit for bit), fp16, bf16, int8 or fp8, or auto "
        "(int8 where the link turns out so slow that rounding pays)",
    )
