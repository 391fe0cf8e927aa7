"""A request of the doctor's own through a chosen pair of workers, beside the router.

::

    Reserve ─► decode      Prefill ─► prefill ─► token 1, hand-off report
                                             KV ─► decode ─► token 2

Two tokens are the least that needs both: one from each. Prompts are random, so that no prefix
cache has them; their token ids are below any model's vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from pdserve.cli.doctor.worker_session import Heard, Inbox, WorkerSession, open_session
from pdserve.errors import PeerError
from pdserve.rpc.convert import pack_token_ids, sampling_to_proto
from pdserve.rpc.ticket import sign_ticket
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import SamplingParams

PROBE_LIMIT_S = 30.0
TICKET_LIFETIME_S = 900
_NUM_KNOWN_TOKENS = 64  # ids below this exist in every vocabulary


@dataclass(frozen=True, slots=True)
class Measured:
    """``gap_ms``: from the first token to the second."""

    num_prompt_tokens: int
    ttft_ms: float
    gap_ms: float
    prefill_ms: float
    transport: str
    num_bytes: int
    transfer_ms: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / (self.transfer_ms / 1000) if self.transfer_ms else 0.0


class Busy(Exception):
    """A worker has no room for a probe, which says nothing about its health."""


async def probe_pair(prefill: str, decode: str, *, secret: bytes, num_prompt_tokens: int) -> Measured:
    """Raises ``Busy``, ``Unauthorized`` or ``PeerError`` with what is wrong."""
    inbox: Inbox = asyncio.Queue()
    try:
        async with (
            asyncio.timeout(PROBE_LIMIT_S),
            open_session(decode, secret=secret, inbox=inbox) as decode_session,
            open_session(prefill, secret=secret, inbox=inbox) as prefill_session,
        ):
            probe = _PairProbe(prefill_session, decode_session, inbox, num_prompt_tokens)
            return await probe.run(secret)
    except TimeoutError:
        raise PeerError(f"no answer within {PROBE_LIMIT_S:g} s") from None


class _PairProbe:
    def __init__(
        self, prefill: WorkerSession, decode: WorkerSession, inbox: Inbox, num_prompt_tokens: int
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._inbox = inbox
        self._num_prompt_tokens = num_prompt_tokens
        self._request_id = f"doctor-{secrets.token_hex(12)}"
        self._token_times_s: dict[int, float] = {}
        self._report: pb.HandoffReport | None = None

    async def run(self, secret: bytes) -> Measured:
        sequence = _sequence(self._num_prompt_tokens)
        try:
            reservation = await self._reserve(sequence)
            began_s = time.monotonic()
            await self._start_prefill(sequence, reservation, secret)
            while self._report is None or len(self._token_times_s) < 2:
                self._note(await self._inbox.get())
            return self._measured(began_s, self._report)
        finally:
            await self._release()

    async def _reserve(self, sequence: pb.Sequence) -> pb.Reservation:
        reserve = pb.Reserve(request_id=self._request_id, sequence=sequence)
        await self._decode.send(pb.ToWorker(reserve=reserve))
        while True:
            message = _sound(await self._inbox.get())
            if message.HasField("reserved"):
                return message.reserved.reservation

    async def _start_prefill(self, sequence: pb.Sequence, reservation: pb.Reservation, secret: bytes) -> None:
        ticket = sign_ticket(
            secret,
            request_id=self._request_id,
            reservation=reservation,
            expires_unix_s=int(time.time()) + TICKET_LIFETIME_S,
        )
        handoff = pb.Handoff(reservation=reservation, ticket=ticket)
        prefill = pb.Prefill(request_id=self._request_id, sequence=sequence, handoff=handoff)
        await self._prefill.send(pb.ToWorker(prefill=prefill))

    def _note(self, heard: Heard) -> None:
        message = _sound(heard)
        for tokens in message.tokens.sequences:
            for offset in range(len(tokens.token_ids)):
                self._token_times_s.setdefault(tokens.first_index + offset, time.monotonic())
        if message.HasField("handoff") and heard.address == self._prefill.address:
            self._report = message.handoff

    def _measured(self, began_s: float, report: pb.HandoffReport) -> Measured:
        first_s, second_s = (self._token_times_s[index] for index in (0, 1))
        return Measured(
            num_prompt_tokens=self._num_prompt_tokens,
            ttft_ms=(first_s - began_s) * 1000,
            gap_ms=(second_s - first_s) * 1000,
            prefill_ms=report.prefill_ms,
            transport=report.transport,
            num_bytes=report.num_bytes,
            transfer_ms=report.transfer_ms,
        )

    async def _release(self) -> None:
        """Best effort: the end of the sessions releases it too."""
        release = pb.ToWorker(release=pb.Release(request_id=self._request_id, reason="finished"))
        for session in (self._prefill, self._decode):
            try:
                await session.send(release)
            except (TimeoutError, asyncio.InvalidStateError):
                continue


def _sound(heard: Heard) -> pb.FromWorker:
    """Raises when the message says that the probe has failed."""
    message = heard.message
    if isinstance(message, str):
        raise PeerError(f"{heard.address}: {message}")
    match message.WhichOneof("message"):
        case "refused":
            raise Busy(f"{heard.address} refused it: {message.refused.reason}")
        case "failed":
            raise PeerError(f"{heard.address}: {message.failed.error}: {message.failed.message}")
        case "handoff" if not message.handoff.sealed:
            raise PeerError(f"the hand-off was aborted: {message.handoff.abort_reason}")
    return message


def _sequence(num_prompt_tokens: int) -> pb.Sequence:
    prompt = [secrets.randbelow(_NUM_KNOWN_TOKENS) for _ in range(num_prompt_tokens)]
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    return pb.Sequence(prompt_token_ids=pack_token_ids(prompt), sampling=sampling_to_proto(sampling))
