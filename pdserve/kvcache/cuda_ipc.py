"""Device memory that other processes may map, through NVIDIA's ``cuda-bindings``. Never run on a GPU yet.

Implements ``transfer.cuda_ipc.memory.IpcMemory``. The memory is ``cudaMalloc``'s own, not out of torch's
allocator: a handle stands for a whole allocation, and with ``expandable_segments`` there is none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.errors import ConfigError, DeviceFault
from pdserve.kvcache.device import WORD_BYTES, Buffer, TorchBuffer, faults

HANDLE_BYTES = 64


class IpcUnavailable(ConfigError):
    """The binding is not there."""

    label = "cuda_ipc_unavailable"


def load() -> CudaIpcMemory:
    """Raises ``IpcUnavailable``. Needs no GPU."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise IpcUnavailable(f"cuda-bindings cannot be imported (extra `cuda`): {error}") from error
    return CudaIpcMemory(runtime)


class CudaIpcMemory:
    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def allocate(self, num_bytes: int) -> tuple[TorchBuffer, bytes]:
        (address,) = self._checked("cudaMalloc", self._runtime.cudaMalloc(_padded(num_bytes)))
        try:
            (handle,) = self._checked("cudaIpcGetMemHandle", self._runtime.cudaIpcGetMemHandle(address))
            return _buffer(int(address), num_bytes), ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        except DeviceFault:
            self._runtime.cudaFree(address)
            raise

    def free(self, buffer: Buffer) -> None:
        self._checked("cudaFree", self._runtime.cudaFree(_address(buffer)))

    def map(self, handle: bytes, num_bytes: int) -> TorchBuffer:
        if len(handle) != HANDLE_BYTES:
            raise DeviceFault(f"a handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        theirs = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, HANDLE_BYTES)
        flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
        (address,) = self._checked("cudaIpcOpenMemHandle", self._runtime.cudaIpcOpenMemHandle(theirs, flags))
        return _buffer(int(address), num_bytes)

    def unmap(self, buffer: Buffer) -> None:
        self._checked("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(_address(buffer)))

    def _checked(self, call: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = answer
        if int(status) != 0:
            _, text = self._runtime.cudaGetErrorString(status)
            raise DeviceFault(f"{call}: {text.decode()}")
        return tuple(values)


@dataclass(frozen=True, slots=True)
class _DeviceArray:
    """Memory at an address, in the form that torch takes without a copy."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _buffer(address: int, num_bytes: int) -> TorchBuffer:
    # Named with its index: then torch also takes another GPU's memory as it is, without a copy.
    with faults():
        device = torch.device("cuda", torch.cuda.current_device())
        content = torch.as_tensor(_DeviceArray(address, _padded(num_bytes)), device=device)
    if content.data_ptr() != address:
        raise DeviceFault("torch made a copy of the memory instead of using it")
    return TorchBuffer(content, num_bytes)


def _address(buffer: Buffer) -> int:
    assert isinstance(buffer, TorchBuffer), f"{buffer} is not of this memory"
    return buffer.content.data_ptr()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES
