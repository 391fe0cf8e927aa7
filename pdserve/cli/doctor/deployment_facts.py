"""Looks at a running deployment: its router, each worker, each pair. Judges nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdserve.cli.doctor.probe import Busy, Measured, probe_pair
from pdserve.cli.doctor.router_facts import RouterFacts, gather_router
from pdserve.cli.doctor.worker_facts import Answer, WorkerFacts, gather_worker
from pdserve.errors import PeerError, Unauthorized

# Long enough for bytes to outweigh latency, short enough for a slow CPU.
MEASURED_PROMPT_TOKENS = 512
_SHORT_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What a probe through both gave. ``problem``: it failed; ``not_probed``: it could not be tried."""

    prefill: WorkerFacts
    decode: WorkerFacts
    measured: Measured | None = None
    problem: str = ""
    not_probed: str = ""
    is_secret_refused: bool = False

    @property
    def name(self) -> str:
        return f"prefill {self.prefill.address} → decode {self.decode.address}"


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    router: RouterFacts
    workers: tuple[WorkerFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = field(default=())

    def of_role(self, role: str) -> list[WorkerFacts]:
        return [worker for worker in self.workers if worker.listed.role == role]


async def gather_deployment(url: str, *, api_key: str | None, secret: bytes) -> DeploymentFacts:
    router = await gather_router(url.rstrip("/"), api_key)
    workers = tuple(await asyncio.gather(*map(gather_worker, router.workers)))
    facts = DeploymentFacts(router, workers)
    # One after the other: together they would measure each other.
    pairs = [
        await _probe(prefill, decode, secret)
        for prefill in facts.of_role("prefill")
        for decode in facts.of_role("decode")
        if prefill.answer is not None and decode.answer is not None
    ]
    return DeploymentFacts(router, workers, tuple(pairs))


async def _probe(prefill: WorkerFacts, decode: WorkerFacts, secret: bytes) -> PairFacts:
    assert prefill.answer is not None, prefill
    assert decode.answer is not None, decode
    measured = None
    try:
        # The first opens the link and says whether it works at all, the second is measured.
        for num_prompt_tokens in (_SHORT_PROMPT_TOKENS, _prompt_tokens(prefill.answer, decode.answer)):
            measured = await probe_pair(
                prefill.address, decode.address, secret=secret, num_prompt_tokens=num_prompt_tokens
            )
    except Busy as busy:
        return PairFacts(prefill, decode, measured, not_probed=str(busy))
    except Unauthorized as error:
        return PairFacts(prefill, decode, not_probed=str(error), is_secret_refused=True)
    except PeerError as error:
        return PairFacts(prefill, decode, problem=str(error))
    return PairFacts(prefill, decode, measured)


def _prompt_tokens(prefill: Answer, decode: Answer) -> int:
    """What both can hold together with the two tokens of a probe, at half their pools at most."""
    room = min(min(answer.max_context_tokens, answer.room_tokens // 2) for answer in (prefill, decode))
    return max(1, min(MEASURED_PROMPT_TOKENS, room - 2))
