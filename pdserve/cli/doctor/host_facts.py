"""Looks at this host: GPUs, shared memory, memory, ports, clock, model files. Judges nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_MEMORY_INFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_SMI_LIMIT_S = 20.0
_GPU_QUERY = "index,name,memory.total,memory.used"
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_TIME_ERROR = 5  # TIME_ERROR of linux/timex.h: the kernel clock is not synchronized
_TIMEX_BYTES = 208


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A file system's size and what of it is free."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """``gpu_problem``: why GPUs that may be there are not listed. ``shared_memory`` None: no such folder.

    ``nccl_version`` None: the library is not installed. ``is_clock_synchronized`` None: not told.
    ``model_bytes``: of the weights' files, None where no model was given.
    """

    num_cores: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_problem: str
    nccl_version: str | None
    shared_memory: SharedMemory | None
    taken_ports: tuple[int, ...]
    is_clock_synchronized: bool | None
    model_bytes: int | None


def gather(model: Path | None, *, ports: Iterable[int]) -> HostFacts:
    gpus, gpu_problem = _gpus()
    return HostFacts(
        num_cores=len(os.sched_getaffinity(0)),
        available_bytes=_available_bytes(),
        gpus=gpus,
        gpu_problem=gpu_problem,
        nccl_version=_nccl_version(),
        shared_memory=_shared_memory(SHARED_MEMORY),
        taken_ports=tuple(port for port in ports if _is_taken(port)),
        is_clock_synchronized=_is_clock_synchronized(),
        model_bytes=None if model is None else weight_bytes(model),
    )


def weight_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """``table``: what ``nvidia-smi --query-gpu`` prints; memory in MiB. Raises ``ValueError``."""
    return tuple(_gpu(line) for line in table.splitlines() if line.strip())


def _gpu(line: str) -> Gpu:
    index, name, total_mib, used_mib = (part.strip() for part in line.split(","))
    return Gpu(int(index), name, int(total_mib) << 20, int(used_mib) << 20)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "" if not Path("/proc/driver/nvidia").exists() else "nvidia-smi is not on the path"
    command = [program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=False
        )
        if done.returncode != 0:
            return (), (done.stderr or done.stdout).strip() or f"nvidia-smi ended with {done.returncode}"
        return parse_gpus(done.stdout), ""
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi gave no answer in {_NVIDIA_SMI_LIMIT_S:g} s"
    except (OSError, ValueError) as error:
        return (), f"nvidia-smi: {error}"


def _nccl_version() -> str | None:
    for package in _NCCL_PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _shared_memory(path: Path) -> SharedMemory | None:
    try:
        state = os.statvfs(path)
    except FileNotFoundError:
        return None
    return SharedMemory(state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize)


def _available_bytes() -> int:
    """What a new process can have: of the host, and within this container's limit."""
    lines = dict(line.split(":") for line in _MEMORY_INFO.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    return min(available, _cgroup_room_bytes(default=available))


def _cgroup_room_bytes(*, default: int) -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:  # the root of the hierarchy, or cgroups of version 1
        return default
    return default if limit == "max" else max(0, int(limit) - used)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _is_clock_synchronized() -> bool | None:
    """What the kernel says of its clock; reading it needs no rights."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR
