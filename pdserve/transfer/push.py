"""One request's KV on its way out: what is ready, and in which segments it goes. Pure.

Per layer, tokens move along::

    num_cached_tokens ──► sent ──► written ──► num_tokens
                          (on the link)  (final in the pool)

``layer_written`` moves *written*, ``next_segment`` moves *sent*. Consecutive layers in the same
position travel as one segment, up to ``COALESCED_BYTES``: the further the link is behind, the
larger its frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import xxhash

from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.segment import Segment, WireOrder
from pdserve.transfer.frame import MAX_DATA_BYTES, Commit, commit_digest

COALESCED_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a transport listens; decode lists its own in order of preference."""

    transport: str
    address: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushPlan:
    """KV of tokens [num_cached_tokens, num_tokens), out of the blocks of ``block_table``."""

    request_id: str
    reservation_id: int
    fence: int
    decode_incarnation: int
    ticket: bytes
    endpoints: tuple[Endpoint, ...]
    block_table: tuple[int, ...]
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class HandoffOutcome:
    """``transfer_s``: time spent sending; ``hidden_transfer_s``: of that, before token 1 was known."""

    request_id: str
    sealed: bool
    reason: str
    transport: str
    num_bytes: int
    transfer_s: float
    hidden_transfer_s: float


class Push:
    def __init__(self, plan: PushPlan, layout: KVLayout) -> None:
        self.plan = plan
        self._layout = layout
        self._written = [plan.num_cached_tokens] * layout.num_layers
        self._sent = [plan.num_cached_tokens] * layout.num_layers
        self._digest = xxhash.xxh3_64()
        self.num_segments = 0
        self.num_bytes = 0
        self.first_token_id: int | None = None
        self.committed_s = 0.0
        self._sends: list[tuple[float, float]] = []

    def layer_written(self, layer: int, num_tokens: int) -> None:
        """KV of all tokens before ``num_tokens`` is final; tokens that decode has are passed over."""
        self._written[layer] = max(self._written[layer], min(num_tokens, self.plan.num_tokens))

    def commit(self, first_token_id: int, now_s: float) -> None:
        """Everything is computed; what no layer call announced is ready now."""
        self.first_token_id = first_token_id
        self.committed_s = now_s
        self._written = [self.plan.num_tokens] * self._layout.num_layers

    @property
    def is_ready_to_commit(self) -> bool:
        return self.first_token_id is not None and min(self._sent) == self.plan.num_tokens

    def next_segment(self, wire_order: WireOrder, max_bytes: int = MAX_DATA_BYTES) -> Segment | None:
        """The next rectangle to send, counted as sent; None when nothing is ready.

        ``max_bytes``: room for one layer of a block at least.
        """
        most_tokens = self._most_tokens(max_bytes)
        for layer, begin in enumerate(self._sent):
            end = min(self._sendable_end(layer, wire_order), begin + most_tokens)
            if end > begin:
                return self._take(layer, begin, end, wire_order, max_bytes=max_bytes)
        return None

    def has_segment(self, wire_order: WireOrder) -> bool:
        return any(self._sendable_end(layer, wire_order) > begin for layer, begin in enumerate(self._sent))

    def sent(self, num_bytes: int, checksum: int, *, begin_s: float, end_s: float) -> None:
        self.num_segments += 1
        self.num_bytes += num_bytes
        self._digest.update(checksum.to_bytes(8, "little"))
        self._sends.append((begin_s, end_s))

    def commit_frame(self) -> Commit:
        assert self.first_token_id is not None, f"{self.plan.request_id} is not committed"
        digest = commit_digest(self._digest, self.first_token_id)
        return Commit(self.num_segments, self.first_token_id, self.num_bytes, digest)

    def outcome(self, *, sealed: bool, reason: str, transport: str) -> HandoffOutcome:
        committed_s = self.committed_s or float("inf")
        return HandoffOutcome(
            request_id=self.plan.request_id,
            sealed=sealed,
            reason=reason,
            transport=transport,
            num_bytes=self.num_bytes,
            transfer_s=sum(end - begin for begin, end in self._sends),
            hidden_transfer_s=sum(max(0.0, min(end, committed_s) - begin) for begin, end in self._sends),
        )

    def _sendable_end(self, layer: int, wire_order: WireOrder) -> int:
        """Whole blocks only where blocks travel whole, until the prompt's last, which may be part full."""
        written = self._written[layer]
        if wire_order is WireOrder.BLOCK and written < self.plan.num_tokens:
            written -= written % self._layout.block_size
        return written

    def _most_tokens(self, max_bytes: int) -> int:
        """Of one layer, in whole blocks."""
        block_bytes = self._layout.block_bytes // self._layout.num_layers
        assert max_bytes >= block_bytes, f"{block_bytes} bytes, a layer of a block, in {max_bytes}"
        return max_bytes // block_bytes * self._layout.block_size

    def _take(self, layer: int, begin: int, end: int, wire_order: WireOrder, *, max_bytes: int) -> Segment:
        segment = Segment(layer, 1, 0, self._layout.num_kv_heads, begin, end - begin)
        layer_bytes = segment.payload_bytes(self._layout, wire_order)
        most_layers = max(1, min(COALESCED_BYTES, max_bytes) // layer_bytes)
        last = layer
        while (
            last + 1 < len(self._sent)
            and last + 1 - layer < most_layers
            and self._sent[last + 1] == begin
            and self._sendable_end(last + 1, wire_order) == end
        ):
            last += 1
        self._sent[layer : last + 1] = [end] * (last + 1 - layer)
        return Segment(layer, last + 1 - layer, 0, self._layout.num_kv_heads, begin, end - begin)
