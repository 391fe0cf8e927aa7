"""What the prefill worker keeps of one hand-off. Owned by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.sequence import Sequence
from pdserve.outcomes import SEALED, abort_label
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import Attributes
from pdserve.transfer.push import Endpoint, HandoffOutcome, PushPlan


@dataclass(slots=True)
class Handoff:
    """``is_open``: the outbox knows it, so the outbox decides when the blocks may go."""

    sequence: Sequence
    message: pb.Handoff
    received_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    is_open: bool = False

    def push_plan(self) -> PushPlan:
        reservation = self.message.reservation
        return PushPlan(
            request_id=self.sequence.seq_id,
            reservation_id=reservation.reservation_id,
            fence=reservation.fence,
            decode_incarnation=reservation.decode_incarnation,
            ticket=self.message.ticket,
            endpoints=tuple(
                Endpoint(endpoint.transport, endpoint.address, dict(endpoint.attributes))
                for endpoint in reservation.endpoints
            ),
            block_table=tuple(self.sequence.block_table),
            num_tokens=reservation.num_tokens,
            num_cached_tokens=reservation.num_cached_tokens,
        )

    def report(self, outcome: HandoffOutcome) -> pb.HandoffReport:
        return pb.HandoffReport(
            request_id=outcome.request_id,
            sealed=outcome.sealed,
            abort_reason=outcome.reason,
            transport=outcome.transport,
            num_bytes=outcome.num_bytes,
            transfer_ms=outcome.transfer_s * 1000,
            hidden_transfer_ms=outcome.hidden_transfer_s * 1000,
            queue_ms=(self.started_s - self.received_s) * 1000,
            prefill_ms=max(0.0, self.first_token_s - self.started_s) * 1000,
        )


def transfer_attributes(outcome: HandoffOutcome) -> Attributes:
    return {
        "outcome": SEALED if outcome.sealed else abort_label(outcome.reason),
        "transport": outcome.transport,
        "num_bytes": outcome.num_bytes,
        "sending_s": outcome.transfer_s,
        "hidden_s": outcome.hidden_transfer_s,
    }
