"""A KV pool on a GPU as the transfer uses it: lanes and buffers, and bytes for ways that know no GPU.

``DeviceKV`` implements ``transfer.device.memory.DeviceKV`` and ``segment.KVBytes``. On a CPU it does the
same without streams, which is how most of it is tested. **Never run on a GPU yet.**
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.errors import DeviceFault
from pdserve.kvcache.cells import as_cells, states_of
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.pieces import Pieces
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder, wire_layout
from pdserve.kvcache.storage import KVStorage

WORD_BYTES = 8
# Odd 64-bit numbers without a pattern, as signed ones.
PLACE_FACTOR = -0x61C8864680B583EB
MIX_FACTOR = -0x40A7B892E31B1A47
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Buffer(Protocol):
    def head(self, num_bytes: int) -> object: ...


@dataclass(frozen=True, slots=True)
class TorchBuffer:
    """``content``: bytes, as many as whole words need; the last word may be part padding."""

    content: Tensor
    num_bytes: int

    def head(self, num_bytes: int) -> Tensor:
        return self.content[:num_bytes]


@dataclass(slots=True)
class _Landing:
    payload: Pieces
    finish: Callable[[], None]


class DeviceKV:
    shared_memory = None

    def __init__(self, storage: KVStorage) -> None:
        self.layout: KVLayout = storage.layout
        self._payloads = _Payloads(storage)
        self._device = storage.k[0].device

    def use_device(self) -> None:
        """Makes it the calling thread's current one. Raises ``DeviceFault``."""
        if self._device.type == "cuda":
            with faults():
                torch.cuda.set_device(self._device)

    def new_lane(self) -> TorchLane:
        """Raises ``DeviceFault``."""
        with faults():
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            return TorchLane(self._payloads, stream)

    def new_buffer(self, num_bytes: int) -> TorchBuffer:
        """Raises ``DeviceFault``, also when the memory is full."""
        with faults():
            padded = -(-num_bytes // WORD_BYTES) * WORD_BYTES
            return TorchBuffer(torch.empty(padded, dtype=torch.uint8, device=self._device), num_bytes)

    # -------------------------------------------------- for ways through the host's memory

    def outgoing(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> Pieces:
        content = self._scratch(segment, wire_order, self._device)
        with faults():
            self._payloads.gather(segment, block_table, wire_order, content)
            return Pieces.of_arrays([content.cpu().numpy()])

    def incoming(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> _Landing:
        staged = self._scratch(segment, wire_order, torch.device("cpu"))

        def finish() -> None:
            with faults():
                self._payloads.scatter(segment, block_table, wire_order, staged.to(self._device))
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()

        return _Landing(Pieces.of_arrays([staged.numpy()]), finish)

    def outgoing_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> Pieces:
        content = self._scratch(segment, WireOrder.TOKEN, self._device)
        with faults():
            self._payloads.gather(segment, block_table, WireOrder.TOKEN, content)
            cells = as_cells(_cells_of(content, self.layout), wire_layout(self.layout, wire_dtype))
            return Pieces.of_arrays([_bytes_of(cells).cpu().numpy()])

    def incoming_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> _Landing:
        layout = wire_layout(self.layout, wire_dtype)
        staged = torch.empty(segment.payload_bytes(layout, WireOrder.TOKEN), dtype=torch.uint8)

        def finish() -> None:
            with faults():
                states = states_of(_cells_of(staged.to(self._device), layout), layout)
                content = _bytes_of(as_cells(states, self.layout))
                self._payloads.scatter(segment, block_table, WireOrder.TOKEN, content)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()

        return _Landing(Pieces.of_arrays([staged.numpy()]), finish)

    def _scratch(self, segment: Segment, wire_order: WireOrder, device: torch.device) -> Tensor:
        num_bytes = segment.payload_bytes(self.layout, wire_order)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _cells_of(content: Tensor, layout: KVLayout) -> Tensor:
    """Bytes as [cells, cell_elements]."""
    return content.view(-1, layout.cell_bytes).view(getattr(torch, layout.dtype))


def _bytes_of(cells: Tensor) -> Tensor:
    return cells.contiguous().view(-1).view(torch.uint8)


class TorchLane:
    """A CUDA stream with the copies of one link on it; None: a CPU, where all is done at once."""

    def __init__(self, payloads: _Payloads, stream: torch.cuda.Stream | None) -> None:
        self._payloads = payloads
        self._stream = stream
        self._places: Tensor | None = None

    @property
    def handle(self) -> int:
        return 0 if self._stream is None else self._stream.cuda_stream

    def gather(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, into: Buffer
    ) -> None:
        with self._enqueueing():
            self._wait_for_engine()
            self._payloads.gather(
                segment, block_table, wire_order, _tensor(into, self._size(segment, wire_order))
            )

    def scatter(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, source: Buffer
    ) -> None:
        with self._enqueueing():
            self._wait_for_engine()
            self._payloads.scatter(
                segment, block_table, wire_order, _tensor(source, self._size(segment, wire_order))
            )

    def copy(self, source: Buffer, target: Buffer, num_bytes: int) -> None:
        with self._enqueueing():
            _tensor(target, num_bytes).copy_(_tensor(source, num_bytes), non_blocking=True)

    def checksum(self, buffer: Buffer, num_bytes: int) -> Callable[[], int]:
        """The sum of all words, each mixed with its place; the padding counts as zeros."""
        with self._enqueueing():
            num_words = -(-num_bytes // WORD_BYTES)
            whole = _tensor(buffer, num_words * WORD_BYTES)
            whole[num_bytes:] = 0
            words = whole.view(torch.int64)
            result = torch.empty((), dtype=torch.int64, pin_memory=self._stream is not None)
            result.copy_(_mixed(words, self._places_of(words)).sum(), non_blocking=True)
        return lambda: int(result.item()) % 2**64

    def mark(self) -> Callable[[], bool]:
        if self._stream is None:
            return lambda: True
        with faults():
            event = torch.cuda.Event()
            event.record(self._stream)

        def is_done() -> bool:
            with faults():
                return bool(event.query())

        return is_done

    def _places_of(self, words: Tensor) -> Tensor:
        if self._places is None or len(self._places) < len(words):
            places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
            self._places = places * PLACE_FACTOR
        return self._places[: len(words)]

    def _size(self, segment: Segment, wire_order: WireOrder) -> int:
        return segment.payload_bytes(self._payloads.layout, wire_order)

    def _wait_for_engine(self) -> None:
        """The engine works on the device's default stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))

    @contextmanager
    def _enqueueing(self) -> Iterator[None]:
        on_stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        with faults(), on_stream:
            yield


class _Payloads:
    """Segments of a pool as the bytes of a payload, in the order of the wire; all on the pool's device."""

    def __init__(self, storage: KVStorage) -> None:
        self.layout = layout = storage.layout
        self._device = storage.k[0].device
        # Cells are copied, not computed with: as the widest integers that fit, whatever their type.
        self._word = next(word for word in _WORDS if layout.cell_bytes % word.itemsize == 0)
        self._pools = [
            pool.view(self._word) for pair in zip(storage.k, storage.v, strict=True) for pool in pair
        ]

    def gather(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, into: Tensor
    ) -> None:
        if wire_order is WireOrder.BLOCK:
            index = self._blocks(segment, block_table)
            for pool, part in self._parts(segment, into):
                torch.index_select(pool, 0, index, out=part.view(len(index), *pool.shape[1:]))
        else:
            cells = self._cells(segment, block_table)
            for pool, part in self._parts(segment, into):
                content = self._tokens_first(pool, segment)[cells]
                part.view(content.shape).copy_(content)

    def scatter(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, source: Tensor
    ) -> None:
        if wire_order is WireOrder.BLOCK:
            index = self._blocks(segment, block_table)
            for pool, part in self._parts(segment, source):
                pool.index_copy_(0, index, part.view(len(index), *pool.shape[1:]))
        else:
            cells = self._cells(segment, block_table)
            shape = (segment.num_tokens, segment.num_heads, self._pools[0].shape[-1])
            for pool, part in self._parts(segment, source):
                self._tokens_first(pool, segment)[cells] = part.view(shape)

    def _parts(self, segment: Segment, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of each layer: the pool, and its part of the payload."""
        pools = self._pools[2 * segment.layer_begin : 2 * segment.layer_end]
        yield from zip(pools, payload.view(self._word).chunk(len(pools)), strict=True)

    def _blocks(self, segment: Segment, block_table: Sequence[int]) -> Tensor:
        first = segment.token_begin // self.layout.block_size
        last = self.layout.num_blocks_for(segment.token_end)
        return self._index(block_table[first:last])

    def _cells(self, segment: Segment, block_table: Sequence[int]) -> tuple[Tensor, Tensor]:
        positions = range(segment.token_begin, segment.token_end)
        size = self.layout.block_size
        return (
            self._index([block_table[position // size] for position in positions]),
            self._index([position % size for position in positions]),
        )

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device)

    def _tokens_first(self, pool: Tensor, segment: Segment) -> Tensor:
        """A view [block, token, head, dim] of the segment's heads."""
        if self.layout.order is PoolOrder.HEAD_MAJOR:
            pool = pool.transpose(1, 2)
        return pool[:, :, segment.head_begin : segment.head_begin + segment.num_heads]


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """One to one for each place, and every bit bears on others: a plain sum would let pairs of errors by."""
    mixed = words + places
    mixed ^= (mixed >> 32) & 0xFFFF_FFFF
    mixed *= MIX_FACTOR
    mixed ^= (mixed >> 29) & 0x7_FFFF_FFFF
    return mixed


def _tensor(buffer: Buffer, num_bytes: int) -> Tensor:
    content = buffer.head(num_bytes)
    assert isinstance(content, Tensor), f"{buffer} is not of this device"
    return content


@contextmanager
def faults() -> Iterator[None]:
    """Torch reports the driver's errors, also those of work begun long before, as RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFault(str(error)) from error
