"""The settings of ``pdserve up``; all others the programs read from the environment and TOML themselves."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from pdserve.config import CommaSeparated, ProgramSettings


class UpSettings(ProgramSettings):
    """Serves a model on this machine: starts a router, prefill workers and decode workers."""

    program: ClassVar[str] = "up"
    model: str | None = Field(
        None, description="model folder, GGUF file or hub id; without it the embedded model"
    )
    prefill: int = Field(1, ge=0, description="prefill workers; 0: decode workers run the prompts too")
    decode: int = Field(1, ge=1, description="decode workers")
    host: str = Field("127.0.0.1", description="address the router listens on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port of the router; 0 takes a free one")
    threads: int | None = Field(
        None, ge=1, description="CPU threads per worker; without it the cores are shared out"
    )
    transports: CommaSeparated = Field([], description="ways for KV in order of preference, e.g. grpc,tcp")
    start_limit_s: float = Field(180.0, gt=0, description="longest wait until everything serves")
    drain_limit_s: float = Field(5.0, ge=0, description="how long Ctrl-C waits for running requests")
    log_level: str = Field("info", description="debug, info, warning or error")

    @classmethod
    def command(cls) -> str:
        return "pdserve up"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode
