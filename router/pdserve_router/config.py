"""The router's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, SecretStr

from pdserve.config import CommaSeparated, ProgramSettings


class RouterSettings(ProgramSettings):
    """The router of pdserve: an OpenAI-style HTTP API over prefill and decode workers."""

    program: ClassVar[str] = "router"
    model: str | None = Field(None, description="model folder (tokenizer and chat template are read from it)")
    served_model_name: str | None = Field(
        None, description="name clients use; the folder's name if not given"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    announce_fd: int | None = Field(
        None, description="file descriptor to write the bound address to, as JSON"
    )
    secret: SecretStr | None = Field(None, description="shared by all parts")
    prefill_workers: CommaSeparated = Field(
        [],
        description="host:port, separated by commas; a name stands for all its addresses; none = aggregated",
    )
    decode_workers: CommaSeparated = Field(
        [], description="host:port, separated by commas; a name stands for all its addresses"
    )
    api_keys: CommaSeparated = Field([], description="accepted bearer keys; none = open")
    max_body_bytes: int = Field(10 << 20, ge=1, description="largest request body")
    max_queue: int = Field(256, ge=0, description="most requests that wait for room on the workers")
    queue_limit_s: float = Field(60.0, gt=0, description="longest wait for room")
    request_limit_s: float = Field(600.0, gt=0, description="longest time a request may take")
    drain_limit_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running requests")
    log_level: str = Field("info", description="debug, info, warning or error")
