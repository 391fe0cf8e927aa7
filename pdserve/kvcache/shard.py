"""Workers that each hold a part of the model: which rectangles of KV go from whom to whom. Pure.

A rank of tensor parallelism holds some KV heads of every layer of its stage, a stage of pipeline
parallelism some layers. With more ranks than KV heads each head is held by several ranks. Prefill and
decode may be cut differently; every cell that a decode rank lacks comes from exactly one prefill rank.

Segments on the wire count layers and heads of the whole model; ``Shard.local`` turns one into the rank's
own counting, which is that of its pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdserve.kvcache.segment import Segment


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers and KV heads of one rank."""

    layer_begin: int
    num_layers: int
    head_begin: int
    num_heads: int

    def local(self, segment: Segment) -> Segment:
        """``segment`` lies inside the shard."""
        layer, head = segment.layer_begin - self.layer_begin, segment.head_begin - self.head_begin
        assert 0 <= layer <= self.num_layers - segment.num_layers, (self, segment)
        assert 0 <= head <= self.num_heads - segment.num_heads, (self, segment)
        return replace(segment, layer_begin=layer, head_begin=head)


def shards(num_layers: int, num_kv_heads: int, *, stages: int, ranks: int) -> list[Shard]:
    """Stage by stage, rank by rank; where layers do not come out even, some stages have one more.

    One of ``ranks`` and ``num_kv_heads`` divides the other.
    """
    assert num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0, (num_kv_heads, ranks)
    num_heads = max(1, num_kv_heads // ranks)
    bounds = [num_layers * stage // stages for stage in range(stages + 1)]
    return [
        Shard(begin, end - begin, rank * num_kv_heads // ranks, num_heads)
        for begin, end in pairwise(bounds)
        for rank in range(ranks)
    ]


def deliveries(
    sources: Sequence[Shard], target: Shard, *, token_begin: int, num_tokens: int
) -> list[tuple[int, Segment]]:
    """(index of the source, what it sends): each cell of ``target`` once, from the first that holds it."""
    sent = []
    for index, source in enumerate(sources):
        if source in sources[:index]:  # shards of one cut are equal or apart
            continue
        layers = _common(source.layer_begin, source.num_layers, target.layer_begin, target.num_layers)
        heads = _common(source.head_begin, source.num_heads, target.head_begin, target.num_heads)
        if layers[1] and heads[1] and num_tokens:
            sent.append((index, Segment(*layers, *heads, token_begin, num_tokens)))
    return sent


def _common(begin: int, count: int, other_begin: int, other_count: int) -> tuple[int, int]:
    """Where two ranges overlap, as (begin, count)."""
    first = max(begin, other_begin)
    return first, max(0, min(begin + count, other_begin + other_count) - first)
