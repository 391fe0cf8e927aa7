"""The workers of one role: a session with each address that the targets stand for.

Names are looked up every ``RESOLVE_PERIOD_S``. A new address gets a client at once. One that
its name no longer stands for keeps its client while the session lasts, since names forget a
worker that drains before its answers have ended; without a session it is dropped. While a
lookup fails nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from pdserve_router.resolve import LookupFailed, Resolve, Target, parse_target
from pdserve_router.worker_client import WorkerClient

logger = logging.getLogger(__name__)

RESOLVE_PERIOD_S = 2.0


class Pool:
    def __init__(
        self, targets: Sequence[str], *, new_client: Callable[[str], WorkerClient], resolve: Resolve
    ) -> None:
        """Raises ``ConfigError`` for a target that is none."""
        self._names: list[Target] = []
        self._named: dict[Target, list[str]] = {}
        self._clients: dict[str, WorkerClient] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._new_client = new_client
        self._resolve = resolve
        for target in map(parse_target, targets):
            if target.is_address:
                self._clients[str(target)] = new_client(str(target))
            else:
                self._names.append(target)
        self._fixed = frozenset(self._clients)

    def __bool__(self) -> bool:
        """Whether such workers are configured, be there any now or not."""
        return bool(self._fixed or self._names)

    def __iter__(self) -> Iterator[WorkerClient]:
        return iter([*self._clients.values()])

    @property
    def nameless(self) -> list[str]:
        """Targets that stand for nobody now."""
        return [str(name) for name in self._names if not self._named.get(name)]

    async def run(self) -> None:
        """Keeps sessions and lookups going for as long as the task lives."""
        async with asyncio.TaskGroup() as tasks:
            for client in self:
                self._start(tasks, client)
            while self._names:
                await self._look_up()
                self._follow(tasks)
                await asyncio.sleep(RESOLVE_PERIOD_S)

    async def _look_up(self) -> None:
        for name in self._names:
            try:
                self._named[name] = await self._resolve(name)
            except LookupFailed as error:
                logger.warning("lookup_failed reason=%s", error)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        wanted = self._fixed.union(*self._named.values())
        for address in sorted(wanted - self._clients.keys()):
            logger.info("worker_found address=%s", address)
            client = self._clients[address] = self._new_client(address)
            self._start(tasks, client)
        for address in self._clients.keys() - wanted:
            if self._clients[address].status is None:
                logger.info("worker_gone address=%s", address)
                del self._clients[address]
                self._running.pop(address).cancel()

    def _start(self, tasks: asyncio.TaskGroup, client: WorkerClient) -> None:
        self._running[client.address] = tasks.create_task(client.run())
