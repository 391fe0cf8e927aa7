"""A worker without a model: real gRPC, real sessions and tickets, tokens from a script.

A ``FakeWorker`` keeps the protocol as the real ones do, including that a request is over on a
worker after its last message, so its leak check is meaningful: ``assert_idle``. Hand-offs go
from fake to fake by a call. What a test may break is in ``Faults``. Everything runs on one
event loop; a test may set faults from another thread before the request that meets them.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdserve.errors import PdserveError, ProtocolViolation
from pdserve.rpc.convert import sampling_from_proto, unpack_token_ids
from pdserve.rpc.session import RouterSession, SessionServer, failed
from pdserve.rpc.ticket import verify_ticket
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.sampling import SamplingParams

LEASE_S = 5.0
FOREVER = 10**9

Say = Callable[[list[int], int, SamplingParams], int]


def says(token_ids: Sequence[int]) -> Say:
    """The same output for every prompt; after its end, over again."""
    return lambda prompt, index, sampling: token_ids[index % len(token_ids)]


@dataclass
class Faults:
    """What goes wrong; counts are of output tokens over all attempts of a sequence."""

    pause_at: int = FOREVER  # waits here for `resume`
    fail_at: int = FOREVER  # sends Failed instead of this token
    fail_with: PdserveError = field(default_factory=PdserveError)
    refuse: str = ""  # answers every new request with this
    abort_handoff: str = ""  # prefill: after the first token
    max_requests: int = FOREVER  # decode: more are refused for want of blocks


@dataclass
class Live:
    """A request on this worker."""

    session: RouterSession
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    task: asyncio.Task[None] | None = None


class FakeWorker:
    def __init__(
        self,
        role: pb.WorkerRole,
        *,
        secret: bytes,
        say: Say,
        eos_token_id: int,
        decode_workers: Sequence[FakeWorker] = (),
        max_context_tokens: int = 256,
    ) -> None:
        """``decode_workers``: those a prefill worker can reach."""
        self.faults = Faults()
        self.handled: list[pb.ToWorker] = []
        self.num_generated = 0
        self.draining = False
        self.last_step_age_s = 0.0
        self.clock_ahead_s = 0.0
        self.address = ""
        self._role = role
        self._secret = secret
        self._say = say
        self._eos_token_id = eos_token_id
        self._decode_workers = decode_workers
        self._max_context_tokens = max_context_tokens
        self._incarnation = secrets.randbits(63)
        self._live: dict[str, Live] = {}
        self._reservations: dict[str, pb.Reservation] = {}
        self._resumed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.sessions = SessionServer(self, secret=secret, lease_s=LEASE_S)

    # ------------------------------------------------------------- life cycle

    async def start(self) -> None:
        """Again after ``kill``: on the same port, as another process."""
        self._incarnation = secrets.randbits(63)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_WorkerServicer_to_server(self.sessions, server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def kill(self) -> None:
        assert self._server is not None, "not started"
        await self._server.stop(None)

    def resume(self) -> None:
        """Lets every paused sequence go on."""
        self.faults.pause_at = FOREVER
        self._resumed.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def assert_idle(self, limit_s: float = 2.0) -> None:
        """The leak check; from a thread other than the loop's."""
        deadline_s = time.monotonic() + limit_s
        while self._live or self._reservations:
            assert time.monotonic() < deadline_s, f"still live: {[*self._live]} {[*self._reservations]}"
            threading.Event().wait(0.005)

    def requests(self, kind: str) -> list[pb.ToWorker]:
        """Of the messages so far, those of one kind."""
        return [message for message in self.handled if message.WhichOneof("message") == kind]

    # --------------------------------------------------------- WorkerService

    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(
            role=self._role,
            incarnation=self._incarnation,
            model_name="tiny",
            max_context_tokens=self._max_context_tokens,
            block_size=16,
            num_blocks=1000,
        )

    def status(self) -> pb.WorkerStatus:
        return pb.WorkerStatus(
            identity=self.identity(),
            num_running=len(self._live),
            num_free_blocks=1000 - len(self._live),
            draining=self.draining,
            last_step_age_s=self.last_step_age_s,
            counters={"generated_tokens": self.num_generated},
            wall_clock_unix_s=time.time() + self.clock_ahead_s,
        )

    async def check_integrity(self) -> None:
        assert self._reservations.keys() <= self._live.keys(), "a reservation without its request"

    def session_ended(self, session: RouterSession) -> None:
        for request_id in [key for key, live in self._live.items() if live.session is session]:
            self._release(request_id)

    def handle(self, message: pb.ToWorker, session: RouterSession) -> None:
        self.handled.append(message)
        match message.WhichOneof("message"):
            case "release":
                self._release(message.release.request_id)
            case "reserve":
                if self._admit(message.reserve.request_id, message.reserve.sequence, session):
                    self._reserve(message.reserve.request_id)
            case "generate":
                if self._admit(message.generate.request_id, message.generate.sequence, session):
                    self._spawn(message.generate.request_id, self._generate(message.generate.request_id))
            case "prefill":
                if self._admit(message.prefill.request_id, message.prefill.sequence, session):
                    self._spawn(message.prefill.request_id, self._prefill(message.prefill))
            case kind:
                raise ProtocolViolation(f"unexpected {kind}")

    def _admit(self, request_id: str, sequence: pb.Sequence, session: RouterSession) -> bool:
        assert request_id not in self._live, f"{request_id} is live already"
        refusal = self.faults.refuse or ("draining" if self.draining else "")
        if not refusal and len(self._live) >= self.faults.max_requests:
            refusal = "no_free_blocks"
        if refusal:
            session.send(pb.FromWorker(refused=pb.Refused(request_id=request_id, reason=refusal)))
            return False
        prompt, output = (
            unpack_token_ids(sequence.prompt_token_ids),
            unpack_token_ids(sequence.output_token_ids),
        )
        self._live[request_id] = Live(session, prompt, output, sampling_from_proto(sequence.sampling))
        return True

    def _release(self, request_id: str) -> None:
        self._reservations.pop(request_id, None)
        live = self._live.pop(request_id, None)
        if live is not None and live.task is not None:
            live.task.cancel()

    def _spawn(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._live[request_id].task = asyncio.ensure_future(work)

    # ----------------------------------------------------------------- decode

    def _reserve(self, request_id: str) -> None:
        live = self._live[request_id]
        reservation = pb.Reservation(
            reservation_id=secrets.randbits(63),
            fence=len(self.handled),
            decode_incarnation=self._incarnation,
            num_tokens=len(live.prompt) + len(live.output),
        )
        self._reservations[request_id] = reservation
        reserved = pb.Reserved(request_id=request_id, reservation=reservation, lease_ms=5000)
        live.session.send(pb.FromWorker(reserved=reserved))

    def seal(self, handoff: pb.Handoff, request_id: str, first_token_id: int) -> bool:
        """Called by the prefill worker; whether the KV was taken."""
        granted = self._reservations.get(request_id)
        if granted is None or granted != handoff.reservation:
            return False
        verify_ticket(
            handoff.ticket,
            secret=self._secret,
            request_id=request_id,
            reservation=granted,
            now_unix_s=time.time(),
        )
        del self._reservations[request_id]
        self._live[request_id].output.append(first_token_id)
        self._spawn(request_id, self._generate(request_id))
        return True

    async def _generate(self, request_id: str) -> None:
        is_finished = False
        while not is_finished:
            is_finished = await self._step(request_id)
            await asyncio.sleep(0)  # others' turn
        self._live.pop(request_id, None)

    # ---------------------------------------------------------------- prefill

    async def _prefill(self, message: pb.Prefill) -> None:
        request_id = message.request_id
        is_finished = await self._step(request_id)
        if message.HasField("handoff") and request_id in self._live:
            live = self._live[request_id]
            report = self._hand_off(message.handoff, request_id, live.output[-1], is_finished=is_finished)
            live.session.send(pb.FromWorker(handoff=report))
        self._live.pop(request_id, None)

    def _hand_off(
        self, handoff: pb.Handoff, request_id: str, first_token_id: int, *, is_finished: bool
    ) -> pb.HandoffReport:
        reason = "finished" if is_finished else self.faults.abort_handoff
        sealed = not reason and any(
            worker.seal(handoff, request_id, first_token_id) for worker in self._decode_workers
        )
        return pb.HandoffReport(
            request_id=request_id,
            sealed=sealed,
            abort_reason="" if sealed else reason or "no_reservation",
            transport="fake",
            num_bytes=1000 * sealed,
        )

    # ------------------------------------------------------------------ tokens

    async def _step(self, request_id: str) -> bool:
        """One token; whether it was the last message of this request here."""
        live = self._live[request_id]
        index = len(live.output)
        while index >= self.faults.pause_at:
            self._resumed.clear()
            await self._resumed.wait()
        if index >= self.faults.fail_at:
            live.session.send(failed(request_id, self.faults.fail_with))
            self._live.pop(request_id)
            return True
        token_id = self._say(live.prompt, index, live.sampling)
        live.output.append(token_id)
        self.num_generated += 1
        reason = self._finish_reason(live)
        live.session.send(pb.FromWorker(tokens=pb.TokenBatch(sequences=[self._tokens(request_id, reason)])))
        return bool(reason)

    def _finish_reason(self, live: Live) -> str:
        stops = {*live.sampling.stop_token_ids, *([] if live.sampling.ignore_eos else [self._eos_token_id])}
        if live.output[-1] in stops:
            return "stop"
        return "length" if len(live.output) >= live.sampling.max_tokens else ""

    def _tokens(self, request_id: str, reason: str) -> pb.SequenceTokens:
        live = self._live[request_id]
        top = live.sampling.num_logprobs
        entry = pb.TokenLogprobs(
            logprob=-0.5,
            top_token_ids=[(live.output[-1] + other) % 256 + 3 for other in range(top or 0)],
            top_logprobs=[-1.0 - other for other in range(top or 0)],
        )
        return pb.SequenceTokens(
            request_id=request_id,
            first_index=len(live.output) - 1,
            token_ids=live.output[-1:],
            logprobs=[] if top is None else [entry],
            finish_reason=reason,
            num_cached_tokens=2,
        )
