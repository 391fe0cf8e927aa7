"""One prefill and one decode process with a way between GPUs, and one by tcp below it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pdserve.transfer.landing import LandingPlan
from pdserve.transfer.push import Endpoint, HandoffOutcome
from tests.support.links import WAIT_S, Decode, Prefill, landing_plan, push_all, push_plan

SOURCE = (9, 3, 4)
TARGET = (5, 6, 7)
POISON = -1.0


class Fleet:
    def __init__(self, decode: Decode, prefill: Prefill) -> None:
        self.decode = decode
        self.prefill = prefill
        self._last_id = 0

    def begin_push(self) -> LandingPlan:
        self._last_id += 1
        number = self._last_id
        plan = landing_plan(
            self.decode, blocks=TARGET, request_id=f"r{number}", reservation_id=number, fence=number
        )
        ways = (self.decode.endpoint, Endpoint("tcp", self.decode.endpoint.address))
        self.decode.table.expect(plan)
        push_all(self.prefill, replace(push_plan(plan, self.decode, blocks=SOURCE), endpoints=ways))
        return plan

    def outcome(self) -> HandoffOutcome:
        return self.prefill.done.get(timeout=WAIT_S)

    def push(self) -> HandoffOutcome:
        plan = self.begin_push()
        outcome = self.outcome()
        if outcome.sealed:
            sent = self.prefill.kv.tokens(SOURCE, 0, plan.num_tokens)
            assert np.array_equal(self.decode.kv.tokens(TARGET, 0, plan.num_tokens), sent)
        return outcome

    def drain(self, plan: LandingPlan, limit_s: float = 1.0) -> None:
        quiet = threading.Event()
        self.decode.table.withdraw(plan.reservation_id, quiet.set)
        assert quiet.wait(limit_s), "decode's blocks are not quiet"

    def poison(self) -> None:
        for pool in self.decode.kv.pools:
            pool[:] = POISON

    def assert_still_poisoned(self) -> None:
        assert all((pool == POISON).all() for pool in self.decode.kv.pools), "a late write landed"


def wait_for(condition: Callable[[], bool], problem: str) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(problem)
