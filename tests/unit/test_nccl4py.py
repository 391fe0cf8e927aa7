"""The real binding and library, as far as they go without a GPU."""

import sys

import pytest

from pdserve.transfer.nccl import nccl4py
from pdserve.transfer.nccl.library import NcclError
from pdserve.transfer.nccl.nccl4py import Nccl4Py, NcclUnavailable

HAS_GPU_REASON = "there is a GPU here: tests/gpu goes further"


@pytest.fixture
def library() -> Nccl4Py:
    try:
        return nccl4py.load()
    except NcclUnavailable as error:
        pytest.skip(f"{error}; the extra `test-nccl` has both")


def test_it_says_its_version(library: Nccl4Py) -> None:
    assert [int(part) for part in library.version().split(".")] >= [2, 23, 0]


def test_a_unique_id_has_128_bytes_and_is_unique(library: Nccl4Py) -> None:
    one, other = library.unique_id(), library.unique_id()
    assert len(one) == len(other) == 128
    assert one != other


def test_without_a_gpu_joining_fails_with_our_error(library: Nccl4Py) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip(HAS_GPU_REASON)
    with pytest.raises(NcclError, match="init") as caught:
        library.init(library.unique_id(), rank=0)
    assert caught.value.status == 1  # ncclUnhandledCudaError


def test_without_the_binding_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(NcclUnavailable, match="nccl4py cannot be imported"):
        nccl4py.load()
