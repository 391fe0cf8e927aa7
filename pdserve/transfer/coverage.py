"""Exactly-once coverage: every (layer, head, token) cell that is owed, each written once. Pure."""

from __future__ import annotations

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.segment import Segment


class Coverage:
    """Rectangles of heads × tokens per layer. Overlaps are refused, so the area tells completeness."""

    def __init__(self, owed: Segment) -> None:
        self._owed = owed
        self._layers: list[list[Segment]] = [[] for _ in range(owed.num_layers)]
        self._missing_cells = owed.num_layers * owed.num_heads * owed.num_tokens

    @property
    def is_complete(self) -> bool:
        return self._missing_cells == 0

    @property
    def num_missing_cells(self) -> int:
        return self._missing_cells

    def check(self, segment: Segment) -> None:
        """Raises ``ProtocolViolation`` for a segment that is not owed or was written already."""
        if not _contains(self._owed, segment):
            raise ProtocolViolation(f"{segment} is outside what is owed: {self._owed}")
        for layer in range(segment.layer_begin, segment.layer_end):
            for written in self._layers[layer - self._owed.layer_begin]:
                if _overlap(written, segment):
                    raise ProtocolViolation(f"{segment} overlaps {written}, which was written already")

    def add(self, segment: Segment) -> None:
        self.check(segment)
        for layer in range(segment.layer_begin, segment.layer_end):
            self._layers[layer - self._owed.layer_begin].append(segment)
        self._missing_cells -= segment.num_layers * segment.num_heads * segment.num_tokens


def _contains(outer: Segment, inner: Segment) -> bool:
    return (
        inner.num_layers > 0
        and inner.num_heads > 0
        and inner.num_tokens > 0
        and outer.layer_begin <= inner.layer_begin
        and inner.layer_end <= outer.layer_end
        and outer.head_begin <= inner.head_begin
        and inner.head_begin + inner.num_heads <= outer.head_begin + outer.num_heads
        and outer.token_begin <= inner.token_begin
        and inner.token_end <= outer.token_end
    )


def _overlap(one: Segment, other: Segment) -> bool:
    """In heads and tokens; the layers are known to meet."""
    return (
        one.head_begin < other.head_begin + other.num_heads
        and other.head_begin < one.head_begin + one.num_heads
        and one.token_begin < other.token_end
        and other.token_begin < one.token_end
    )
