"""NVIDIA's binding as far as it goes without a GPU."""

import sys

import pytest
import torch

from pdserve.errors import DeviceFault
from pdserve.kvcache import cuda_ipc
from pdserve.kvcache.cuda_ipc import HANDLE_BYTES, CudaIpcMemory, IpcUnavailable


@pytest.fixture
def memory() -> CudaIpcMemory:
    try:
        return cuda_ipc.load()
    except IpcUnavailable as error:
        pytest.skip(f"{error}; the extra `test-nccl` has it")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: tests/gpu goes further")
def test_without_a_gpu_every_call_fails_with_our_error(memory: CudaIpcMemory) -> None:
    with pytest.raises(DeviceFault, match="cudaMalloc: CUDA driver"):
        memory.allocate(1 << 20)
    with pytest.raises(DeviceFault, match="cudaIpcOpenMemHandle: CUDA driver"):
        memory.map(bytes(HANDLE_BYTES), 1 << 20)


def test_a_handle_of_another_size_is_refused(memory: CudaIpcMemory) -> None:
    with pytest.raises(DeviceFault, match="64 bytes"):
        memory.map(b"short", 1 << 20)


def test_without_the_binding_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(IpcUnavailable, match="cuda-bindings cannot be imported"):
        cuda_ipc.load()
