"""Which programs make up a server on one machine, and the flags each gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.settings import UpSettings

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # in a log every redraw would be a line


@dataclass(frozen=True, slots=True)
class Program:
    """``name`` is what people see; ``module`` is run as ``python -m`` would."""

    name: str
    module: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def prefill_workers(settings: UpSettings, model: Path, *, num_cores: int) -> list[Program]:
    return [
        _worker(settings, "prefill", index, model=model, num_cores=num_cores)
        for index in range(settings.prefill)
    ]


def decode_workers(settings: UpSettings, model: Path, *, num_cores: int) -> list[Program]:
    flags = ["--transports", ",".join(settings.transports)] if settings.transports else []
    return [
        _worker(settings, "decode", index, *flags, model=model, num_cores=num_cores)
        for index in range(settings.decode)
    ]


def router(
    settings: UpSettings, model: Path, *, prefill_addresses: Sequence[str], decode_addresses: Sequence[str]
) -> Program:
    flags = (
        *_common_flags(settings, model),
        *("--host", settings.host, "--port", str(settings.port)),
        *("--prefill-workers", ",".join(prefill_addresses)),
        *("--decode-workers", ",".join(decode_addresses)),
    )
    return Program("router", "pdserve_router", flags, {})


def _worker(settings: UpSettings, role: str, index: int, *flags: str, model: Path, num_cores: int) -> Program:
    threads = str(settings.threads or max(1, num_cores // settings.num_workers))
    return Program(
        name=f"{role}-{index}",
        module=f"pdserve_{role}",
        flags=(*_common_flags(settings, model), "--port", "0", "--threads", threads, *flags),
        environment={**dict.fromkeys(_THREAD_VARIABLES, threads), **_NO_PROGRESS_BARS},
    )


def _common_flags(settings: UpSettings, model: Path) -> tuple[str, ...]:
    return (
        *(("--config", str(settings.config)) if settings.config else ()),
        *("--model", str(model)),
        *("--drain-limit-s", f"{settings.drain_limit_s:g}"),
        *("--log-level", settings.log_level),
    )
