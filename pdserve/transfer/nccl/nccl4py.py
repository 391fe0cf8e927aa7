"""NCCL through NVIDIA's binding ``nccl4py``, see decision record 3. Imported when it is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.errors import ConfigError
from pdserve.transfer.nccl.library import NcclError

# Of the streaming multiprocessors each pair may take this many while a payload moves.
MAX_CTAS = 2


class NcclUnavailable(ConfigError):
    """There is no binding, or no library under it; ``str`` says which."""

    label = "nccl_unavailable"


def load() -> Nccl4Py:
    """Raises ``NcclUnavailable``. Needs no GPU."""
    try:
        from nccl import core
        from nccl.bindings.nccl import NCCLError
    except ImportError as error:
        raise NcclUnavailable(f"nccl4py cannot be imported (extra `cuda`): {error}") from error
    library = core.get_version().libnccl
    if library is None:
        raise NcclUnavailable("nccl4py finds no libnccl (packages nvidia-nccl-cu12, nvidia-nccl-cu13)")
    return Nccl4Py(core, NCCLError, version=str(library.version))


class Nccl4Py:
    """``NcclLibrary`` for real."""

    def __init__(self, core: Any, error_type: type[Exception], *, version: str) -> None:
        self._core = core
        self._error_type = error_type
        self._version = version

    def version(self) -> str:
        return self._version

    def unique_id(self) -> bytes:
        with self._call("get_unique_id"):
            return bytes(self._core.get_unique_id())

    def init(self, unique_id: bytes, *, rank: int) -> object:
        config = self._core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS)
        with self._call("init"):
            return self._core.Communicator.init(2, rank, self._core.UniqueId.from_bytes(unique_id), config)

    def status(self, communicator: Any) -> int:
        with self._call("get_async_error"):
            return int(communicator.get_async_error())

    def send(self, communicator: Any, data: object, *, peer: int, stream: int) -> None:
        with self._call("send"):
            communicator.send(data, peer, stream=stream)

    def receive(self, communicator: Any, data: object, *, peer: int, stream: int) -> None:
        with self._call("recv"):
            communicator.recv(data, peer, stream=stream)

    def abort(self, communicator: Any) -> None:
        with self._call("abort"):
            communicator.abort()

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        try:
            yield
        except self._error_type as error:
            raise NcclError(name, error.status, str(error)) from error  # type: ignore[attr-defined]
        except (self._core.NcclInvalid, RuntimeError) as error:
            # The binding's own checks, and what it cannot load.
            raise NcclError(name, -1, str(error)) from error
