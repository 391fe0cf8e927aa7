from dataclasses import replace

import pytest

from pdserve.cli.doctor.finding import EXIT_FAULT, EXIT_FINE, Severity, exit_status
from pdserve.cli.doctor.host_checks import GIB, check_host
from pdserve.cli.doctor.host_facts import Gpu, HostFacts, SharedMemory, parse_gpus

GPU = Gpu(index=0, name="NVIDIA H200", total_bytes=140 * GIB, used_bytes=1 * GIB)
LAPTOP = HostFacts(
    num_cores=4,
    available_bytes=16 * GIB,
    gpus=(),
    gpu_problem="",
    nccl_version=None,
    shared_memory=SharedMemory(8 * GIB, 8 * GIB),
    taken_ports=(),
    is_clock_synchronized=True,
    model_bytes=None,
)
GPU_HOST = replace(LAPTOP, gpus=(GPU, replace(GPU, index=1)), nccl_version="2.28.3")
SMALL = SharedMemory(64 << 20, 60 << 20)


def of(facts: HostFacts, severity: Severity) -> str:
    return "\n".join(f"{f.what}: {f.why}" for f in check_host(facts) if f.severity is severity)


@pytest.mark.parametrize("facts", [LAPTOP, GPU_HOST])
def test_a_sound_host_has_no_fault_and_nothing_slow(facts: HostFacts) -> None:
    assert of(facts, Severity.FAULT) == of(facts, Severity.SLOW) == ""
    assert exit_status(check_host(facts)) == EXIT_FINE


@pytest.mark.parametrize("shared_memory", [SMALL, None, SharedMemory(8 * GIB, 1 << 20)])
def test_little_shared_memory_is_a_fault_with_gpus_and_a_note_without(
    shared_memory: SharedMemory | None,
) -> None:
    with_gpus = replace(GPU_HOST, shared_memory=shared_memory)
    assert "/dev/shm is too small" in of(with_gpus, Severity.FAULT)
    assert exit_status(check_host(with_gpus)) == EXIT_FAULT
    assert "/dev/shm is too small" in of(replace(LAPTOP, shared_memory=shared_memory), Severity.NOTE)


def test_gpus_that_do_not_answer_are_a_fault_with_the_drivers_words() -> None:
    broken = replace(LAPTOP, gpu_problem="Driver/library version mismatch")
    assert "Driver/library version mismatch" in of(broken, Severity.FAULT)


def test_gpus_without_nccl_will_be_slow() -> None:
    assert "NCCL is not installed" in of(replace(GPU_HOST, nccl_version=None), Severity.SLOW)


def test_gpus_of_two_kinds_come_with_advice_on_who_does_what() -> None:
    mixed = replace(GPU_HOST, gpus=(GPU, Gpu(1, "NVIDIA L40S", 48 * GIB, 0)))
    assert "different kinds" in of(mixed, Severity.NOTE)


def test_a_model_larger_than_memory_is_a_fault() -> None:
    assert "does not fit" in of(replace(LAPTOP, model_bytes=15 * GIB), Severity.FAULT)
    assert "does not fit" in of(replace(GPU_HOST, model_bytes=139 * GIB), Severity.FAULT)


def test_a_model_that_fits_once_will_not_do_for_two_workers() -> None:
    assert "memory for one worker" in of(replace(LAPTOP, model_bytes=10 * GIB), Severity.SLOW)
    assert "fits in memory" in of(replace(LAPTOP, model_bytes=2 * GIB), Severity.OK)


def test_a_single_core_will_be_slow() -> None:
    assert "one CPU core" in of(replace(LAPTOP, num_cores=1), Severity.SLOW)


def test_a_taken_port_and_a_free_running_clock_are_noted() -> None:
    notes = of(replace(LAPTOP, taken_ports=(8000,), is_clock_synchronized=False), Severity.NOTE)
    assert "port 8000 is taken" in notes
    assert "clock" in notes


def test_the_table_of_nvidia_smi_is_read() -> None:
    table = "0, NVIDIA H200, 143771, 1\n1, NVIDIA H200, 143771, 20\n"
    assert parse_gpus(table) == (
        Gpu(0, "NVIDIA H200", 143771 << 20, 1 << 20),
        Gpu(1, "NVIDIA H200", 143771 << 20, 20 << 20),
    )


def test_a_table_with_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        parse_gpus("0, NVIDIA H200\n")
