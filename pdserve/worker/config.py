"""The settings that both kinds of worker have."""

from __future__ import annotations

from pydantic import Field, SecretStr

from pdserve.config import ProgramSettings
from pdserve.engine.config import EngineConfig, KVCacheDtype, WeightDtype
from pdserve.worker.own_address import reachable_host


class WorkerSettings(ProgramSettings):
    model: str | None = Field(
        None, description="model folder, GGUF file or hub id; without it the embedded model"
    )
    host: str = Field("127.0.0.1", description="address to listen on; routers and peers must reach it")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port for Prometheus on the same address; 0 takes a free one"
    )
    advertise_host: str | None = Field(
        None, description="name or address that others reach this worker by; its own address if not given"
    )
    announce_fd: int | None = Field(
        None, description="file descriptor to write the bound address to, as JSON"
    )
    secret: SecretStr | None = Field(None, description="shared by all parts")
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N (never run on hardware yet)"
    )
    threads: int = Field(1, ge=1, description="CPU threads for the model")
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV block")
    num_blocks: int | None = Field(None, ge=2, description="KV blocks; overrides kv_cache_bytes")
    kv_cache_bytes: int = Field(1 << 30, ge=1, description="memory for the KV cache")
    kv_cache_dtype: KVCacheDtype = Field(
        "auto", description="KV as stored: auto (nothing is rounded), fp32, fp16, bf16, int8 or fp8"
    )
    weight_dtype: WeightDtype = Field(
        "fp16",
        description="weights as packed for the CPU: fp16, fp32, int8, or model (transformers' own layers)",
    )
    max_num_seqs: int = Field(64, ge=1, description="most sequences that run at once")
    max_num_batched_tokens: int = Field(512, ge=1, description="most tokens in one step")
    max_context_tokens: int | None = Field(None, ge=2, description="limit below the model's own")
    enable_prefix_cache: bool = Field(True, description="reuse KV of equal prefixes")
    max_num_requests: int = Field(256, ge=1, description="most requests accepted at once")
    lease_s: float = Field(5.0, gt=0, description="a router silent for this long loses its requests")
    drain_limit_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running requests")
    log_level: str = Field("info", description="debug, info, warning or error")

    @property
    def reachable_host(self) -> str:
        """Raises ``ConfigError`` when it is not set and cannot be told."""
        return reachable_host(self.host, self.advertise_host)

    def engine_config(self, *, prefill_chunk_tokens: int) -> EngineConfig:
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_context_tokens=self.max_context_tokens,
            enable_prefix_cache=self.enable_prefix_cache,
            num_threads=self.threads,
            device=self.device,
            weight_dtype=self.weight_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )
