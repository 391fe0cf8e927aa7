"""Prefill's side: takes note of what the engine wrote and sends it, on a thread per decode process.

``open``, ``layer_written``, ``commit`` and ``abort`` only take notes and return: they are called in
the middle of a step. ``on_done`` is called exactly once for each opened push, when no byte of
its blocks is needed any more, whatever the outcome.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.clock import Clock
from pdserve.kvcache.segment import KVBytes
from pdserve.transfer.hello import Hello
from pdserve.transfer.ladder import Ladder
from pdserve.transfer.payload import PayloadSender, SenderOpeners, StreamPayloadSender
from pdserve.transfer.push import Endpoint, HandoffOutcome, PushPlan
from pdserve.transfer.sender import LinkLimits, PeerSender
from pdserve.transfer.stream import ByteStream
from pdserve.transfer.wire_choice import WireChoice, WireOption, narrowed

logger = logging.getLogger(__name__)

# Opens a stream to an endpoint; raises PeerError. The second argument bounds the wait.
Connect = Callable[[Endpoint, float], ByteStream]


@dataclass(frozen=True, slots=True)
class Ways:
    """What a worker can send by, by transport name; ``payload_openers``: for payloads beside the stream."""

    connectors: Mapping[str, Connect]
    payload_openers: SenderOpeners = field(default_factory=dict)


class Outbox:
    def __init__(
        self,
        *,
        hello: Hello,
        kv: KVBytes,
        ways: Ways,
        clock: Clock,
        limits: LinkLimits | None = None,
        wire_option: WireOption = "same",
    ) -> None:
        """Raises ``ConfigError`` for a ``wire_option`` that the pool of ``kv`` cannot have."""
        self._hello = hello
        self._kv = kv
        self._ways = ways
        self._clock = clock
        self._limits = limits or LinkLimits()
        self._wire_option = wire_option
        narrowed(wire_option, kv.layout)
        self._lock = threading.Lock()
        self._peers: dict[int, PeerSender] = {}
        self._ladders: dict[int, Ladder] = {}
        self._peer_of: dict[str, PeerSender] = {}

    def open(self, plan: PushPlan, on_done: Callable[[HandoffOutcome], None]) -> None:
        def done(outcome: HandoffOutcome) -> None:
            with self._lock:
                self._peer_of.pop(plan.request_id, None)
            on_done(outcome)

        with self._lock:
            peer = self._peers.get(plan.decode_incarnation)
            if peer is None or peer.has_ended:
                peer = self._peers[plan.decode_incarnation] = self._new_peer(plan.decode_incarnation)
            self._peer_of[plan.request_id] = peer
        if not peer.open(plan, done):  # ended between the two lines above
            self.open(plan, on_done)

    def layer_written(self, request_id: str, layer: int, num_tokens: int) -> None:
        """KV of the tokens before ``num_tokens`` is final in this layer."""
        if peer := self._peer_of.get(request_id):
            peer.layer_written(request_id, layer, num_tokens)

    def commit(self, request_id: str, first_token_id: int) -> None:
        if peer := self._peer_of.get(request_id):
            peer.commit(request_id, first_token_id)

    def abort(self, request_id: str, reason: str) -> None:
        if peer := self._peer_of.get(request_id):
            peer.abort(request_id, reason)

    def close(self) -> None:
        """Aborts what is left and ends the threads."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    def _new_peer(self, incarnation: int) -> PeerSender:
        for gone in [key for key, peer in self._peers.items() if peer.has_ended]:
            del self._peers[gone]
        now_s = self._clock.now_s()
        self._ladders = {
            key: ladder
            for key, ladder in self._ladders.items()
            if key in self._peers or ladder.has_demoted(now_s)
        }
        peer = PeerSender(
            peer_incarnation=incarnation,
            hello=self._hello,
            kv=self._kv,
            connectors=self._ways.connectors,
            open_payloads=self._open_payloads,
            ladder=self._ladders.setdefault(incarnation, Ladder()),
            clock=self._clock,
            limits=self._limits,
        )
        peer.start()
        return peer

    def _open_payloads(self, transport: str, stream: ByteStream) -> PayloadSender:
        if open_beside := self._ways.payload_openers.get(transport):
            return open_beside(stream, self._limits.link_s)
        choice = WireChoice(self._wire_option, self._kv.layout)
        return StreamPayloadSender(stream, self._kv, self._clock, choice)
