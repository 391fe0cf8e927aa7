"""Judges a host: can workers run here, and will they be slow? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.cli.doctor.finding import Finding, Severity
from pdserve.cli.doctor.host_facts import Gpu, HostFacts

GIB = 1 << 30
# NCCL's buffers between the GPUs of one host; containers get 64 MiB unless told otherwise.
MIN_SHARED_MEMORY_BYTES = 1 * GIB
# The workers' default for the KV cache, and what a process with torch takes besides.
KV_CACHE_BYTES = 1 * GIB
PROCESS_BYTES = GIB // 2


def check_host(facts: HostFacts) -> Iterator[Finding]:
    yield from _gpus(facts)
    yield from _nccl(facts)
    yield from _shared_memory(facts)
    yield from _cores(facts)
    yield from _model_fits(facts)
    yield from _ports(facts)
    yield from _clock(facts)


def _gpus(facts: HostFacts) -> Iterator[Finding]:
    if facts.gpu_problem:
        yield Finding(
            Severity.FAULT,
            "the GPUs of this host cannot be used",
            facts.gpu_problem,
            "mend the NVIDIA driver, or start the container with GPUs",
        )
    elif not facts.gpus:
        yield Finding(
            Severity.NOTE, "no GPU", "workers run on the CPU here: fine for small models and trials"
        )
    else:
        names = "; ".join(f"{gpu.index}: {gpu.name}, {_gib(gpu.total_bytes)}" for gpu in facts.gpus)
        yield Finding(Severity.OK, f"{len(facts.gpus)} GPU{'s' * (len(facts.gpus) > 1)}", names)
    if len({gpu.name for gpu in facts.gpus}) > 1:
        yield Finding(
            Severity.NOTE,
            "GPUs of different kinds",
            "give prefill those that compute faster, decode those with more memory bandwidth",
        )


def _nccl(facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if facts.nccl_version is None:
        yield Finding(
            Severity.SLOW,
            "NCCL is not installed",
            "GPUs cannot pass KV to one another directly, it goes through the hosts' memory",
            "install the extra `cuda`",
        )
    else:
        yield Finding(Severity.OK, f"NCCL {facts.nccl_version}")


def _shared_memory(facts: HostFacts) -> Iterator[Finding]:
    shared = facts.shared_memory
    size = "missing" if shared is None else f"{_mib(shared.total_bytes)}, {_mib(shared.free_bytes)} free"
    if shared is not None and shared.free_bytes >= MIN_SHARED_MEMORY_BYTES:
        yield Finding(Severity.OK, f"/dev/shm: {size}")
        return
    yield Finding(
        Severity.FAULT if facts.gpus else Severity.NOTE,
        f"/dev/shm is too small for NCCL: {size}",
        "NCCL keeps its buffers between GPUs of one host there and does not start, or dies, when it is full"
        + (
            ""
            if facts.gpus
            else "; without GPUs nothing here needs it: pdserve's own shared memory is elsewhere"
        ),
        f"give it {_gib(MIN_SHARED_MEMORY_BYTES)} or more: shm_size in a compose file, `--shm-size` or "
        "`--ipc=host` for a container, an emptyDir with medium Memory in Kubernetes",
    )


def _cores(facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus and facts.num_cores < 2:
        yield Finding(
            Severity.SLOW,
            "one CPU core",
            "prefill and decode take turns on it, so a long prompt slows every stream",
            "use two or more cores",
        )


def _model_fits(facts: HostFacts) -> Iterator[Finding]:
    if facts.model_bytes is None:
        return
    needed = facts.model_bytes + KV_CACHE_BYTES + PROCESS_BYTES * (not facts.gpus)
    room, where = _largest_room(facts)
    sizes = (
        f"a worker takes {_gib(needed)} ({_gib(facts.model_bytes)} of weights, the rest KV cache at its "
        f"default and the process); {where} has {_gib(room)} free"
    )
    if needed > room:
        yield Finding(
            Severity.FAULT,
            "the model does not fit in memory",
            sizes,
            "take a smaller model, fewer bits per weight, or a smaller --kv-cache-bytes",
        )
    elif not facts.gpus and 2 * needed > room:
        yield Finding(
            Severity.SLOW,
            "memory for one worker, not for two",
            f"{sizes}; a prefill and a decode worker each hold the weights",
            "serve aggregated (`--prefill 0`), or use another host for the second worker",
        )
    else:
        yield Finding(Severity.OK, "the model fits in memory", sizes)


def _largest_room(facts: HostFacts) -> tuple[int, str]:
    if not facts.gpus:
        return facts.available_bytes, "this host"
    gpu = max(facts.gpus, key=_free_bytes)
    return _free_bytes(gpu), f"GPU {gpu.index}"


def _free_bytes(gpu: Gpu) -> int:
    return gpu.total_bytes - gpu.used_bytes


def _ports(facts: HostFacts) -> Iterator[Finding]:
    for port in facts.taken_ports:
        yield Finding(
            Severity.NOTE,
            f"port {port} is taken",
            "a router cannot be started on its default port; fine if that is yours: check it with --url",
            "choose another with --port",
        )


def _clock(facts: HostFacts) -> Iterator[Finding]:
    if facts.is_clock_synchronized is False:
        yield Finding(
            Severity.NOTE,
            "the kernel does not count this host's clock as synchronized",
            "tickets for a hand-off have an expiry, so hosts far apart in time refuse each other",
            "run chrony or systemd-timesyncd on the host if there is more than one",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
