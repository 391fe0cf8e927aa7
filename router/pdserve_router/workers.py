"""The workers this router knows, and which of them a request goes to."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence

from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router.policy import Load, decode_order, prefill_order
from pdserve_router.pool import Pool
from pdserve_router.resolve import Resolve, resolve
from pdserve_router.worker_client import WorkerClient


class Workers:
    def __init__(
        self, *, prefill: Sequence[str], decode: Sequence[str], secret: bytes, resolve: Resolve = resolve
    ) -> None:
        """``prefill`` and ``decode``: see ``resolve``. Raises ``ConfigError`` for what is no target."""
        self.secret = secret
        self.router_id = secrets.token_hex(8)
        self._changed = asyncio.Event()
        self._out_since_s: float | None = None
        self.prefill = self._pool(prefill, pb.WORKER_ROLE_PREFILL, resolve)
        self.decode = self._pool(decode, pb.WORKER_ROLE_DECODE, resolve)

    def _pool(self, targets: Sequence[str], role: pb.WorkerRole, resolve: Resolve) -> Pool:
        def new_client(address: str) -> WorkerClient:
            return WorkerClient(
                address, role=role, router_id=self.router_id, secret=self.secret, on_change=self._notify
            )

        return Pool(targets, new_client=new_client, resolve=resolve)

    async def run(self) -> None:
        """Keeps a session with each for as long as the task lives."""
        self._notify()
        async with asyncio.TaskGroup() as tasks:
            for pool in (self.prefill, self.decode):
                tasks.create_task(pool.run())

    def ready_decode(self, failed: Collection[str]) -> list[WorkerClient]:
        """In the order to ask them. ``failed``: addresses that have failed this request."""
        return _ordered(self.decode, decode_order, failed)

    def ready_prefill(self, failed: Collection[str]) -> list[WorkerClient]:
        return _ordered(self.prefill, prefill_order, failed)

    @property
    def outage_s(self) -> float:
        """For how long no decode worker has been ready; 0 while one is."""
        return 0.0 if self._out_since_s is None else asyncio.get_running_loop().time() - self._out_since_s

    @property
    def max_context_tokens(self) -> int | None:
        """The least that any ready worker can hold; None while none is ready."""
        ready = [client.status for client in (*self.prefill, *self.decode) if client.is_ready]
        return min((status.identity.max_context_tokens for status in ready if status), default=None)

    def problems(self) -> list[str]:
        """Why a request cannot be served by a pair right now; empty when it can."""
        problems = []
        if not any(client.is_ready for client in self.decode):
            problems.append("no decode worker is ready: " + _states(self.decode))
        if self.prefill and not any(client.is_ready for client in self.prefill):
            problems.append("no prefill worker is ready: " + _states(self.prefill))
        return problems

    async def wait_for_change(self, limit_s: float) -> None:
        """Until a worker's state may have changed, or the time is up."""
        changed = self._changed
        try:
            async with asyncio.timeout(limit_s):
                await changed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        """Wakes all who wait now; those who wait later wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
        if any(client.is_ready for client in self.decode):
            self._out_since_s = None
        elif self._out_since_s is None:
            self._out_since_s = asyncio.get_running_loop().time()


def _ordered(
    clients: Iterable[WorkerClient],
    order: Callable[[Iterable[Load]], list[str]],
    failed: Collection[str],
) -> list[WorkerClient]:
    by_address = {client.address: client for client in _distinct(clients)}
    return [by_address[address] for address in order(_loads(by_address.values(), failed))]


def _distinct(clients: Iterable[WorkerClient]) -> Iterable[WorkerClient]:
    """Each worker that can be asked once, under however many addresses it is known."""
    ready = [client for client in clients if client.is_ready]
    return {client.incarnation: client for client in reversed(ready)}.values()


def _loads(clients: Iterable[WorkerClient], failed: Collection[str]) -> list[Load]:
    return [
        Load(
            address=client.address,
            num_requests=max(client.num_requests, status.num_running + status.num_waiting),
            num_waiting_prefill_tokens=status.num_waiting_prefill_tokens,
            num_free_blocks=status.num_free_blocks,
            has_failed=client.address in failed,
        )
        for client in clients
        if client.is_ready and (status := client.status) is not None
    ]


def _states(pool: Pool) -> str:
    if not pool:
        return "none is configured"
    states = [
        f"{client.address} is draining" if client.status else f"{client.address}: {client.problem}"
        for client in pool
    ]
    return "; ".join([*states, *(f"{target} has no address" for target in pool.nameless)])
