"""The decode worker's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from pdserve.config import CommaSeparated
from pdserve.worker.config import WorkerSettings

TRANSPORTS = ("cuda-ipc", "nccl", "shm", "tcp", "grpc")


class DecodeSettings(WorkerSettings):
    """A decode worker of pdserve: receives KV and streams tokens; prefills too when asked."""

    program: ClassVar[str] = "decode"
    transports: CommaSeparated = Field(
        list(TRANSPORTS),
        description="ways in for KV, in order of preference; cuda-ipc and nccl are left out without a GPU",
    )
    data_port: int = Field(0, ge=0, le=65535, description="tcp port for KV; 0 takes a free one")
    prefill_chunk_tokens: int = Field(
        64, ge=1, description="most prompt tokens computed in a step while anything decodes"
    )

    @field_validator("transports")
    @classmethod
    def _known(cls, transports: list[str]) -> list[str]:
        unknown = [name for name in transports if name not in TRANSPORTS]
        if unknown or not transports:
            raise ValueError(f"{unknown or 'none given'}: choose from {', '.join(TRANSPORTS)}")
        return transports
