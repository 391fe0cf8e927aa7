"""The engine's thread: commands in order, answers, and what happens when something breaks."""

import queue
import threading
from functools import partial

import pytest

from pdserve.clock import MonotonicClock
from pdserve.engine.engine import StepOutput
from pdserve.engine.loop import EngineLoop
from pdserve.engine.sequence import Sequence
from pdserve.sampling import SamplingParams
from tests.support.fake_runner import fake_engine

LIMIT_S = 5.0


class Running:
    def __init__(self) -> None:
        self.engine, self.runner = fake_engine()
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.broken = threading.Event()
        self.loop = EngineLoop(
            self.engine, on_outputs=self._take, on_broken=self.broken.set, clock=MonotonicClock()
        )
        self.loop.start()

    def _take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)


def sequence(name: str) -> Sequence:
    return Sequence(name, [2, 3, 4], SamplingParams(max_tokens=2))


def test_commands_run_in_order_and_work_wakes_the_thread() -> None:
    running = Running()
    running.loop.post(lambda: running.engine.add(sequence("a")))
    assert running.outputs.get(timeout=LIMIT_S).seq_id == "a"
    order: list[int] = []
    for number in range(50):
        running.loop.post(partial(order.append, number))
    assert running.loop.call(lambda: len(order)).result(LIMIT_S) == 50
    assert order == list(range(50))
    assert running.loop.stop(limit_s=LIMIT_S)


def test_a_command_runs_between_the_layers_of_a_step() -> None:
    running = Running()
    seen: list[str] = []
    run_commands = running.engine.on_boundary

    def boundary() -> None:
        if not seen:
            running.loop.post(lambda: seen.append("in the step"))
        run_commands()

    running.engine.on_boundary = boundary
    running.loop.post(lambda: running.engine.add(sequence("a")))
    running.outputs.get(timeout=LIMIT_S)
    assert seen == ["in the step"]
    running.loop.stop(limit_s=LIMIT_S)


def test_a_step_that_raises_costs_its_sequences_only() -> None:
    running = Running()
    running.runner.fail_next = True
    running.loop.post(lambda: running.engine.add(sequence("a")))
    assert running.outputs.get(timeout=LIMIT_S).error is not None
    running.loop.post(lambda: running.engine.add(sequence("b")))
    assert running.outputs.get(timeout=LIMIT_S).token_ids
    assert not running.broken.is_set()
    running.loop.stop(limit_s=LIMIT_S)


def test_a_broken_promise_is_told_and_ends_the_thread() -> None:
    running = Running()

    def break_it() -> None:
        raise AssertionError("a block in two places")

    running.loop.post(break_it)
    assert running.broken.wait(LIMIT_S)


def test_a_failing_check_is_the_askers_to_handle() -> None:
    running = Running()

    def check() -> None:
        raise AssertionError("told to whoever asked")

    with pytest.raises(AssertionError, match="whoever asked"):
        running.loop.call(check).result(LIMIT_S)
    assert not running.broken.is_set()
    assert running.loop.stop(limit_s=LIMIT_S)


def test_a_thread_that_waits_for_work_is_not_stuck() -> None:
    running = Running()
    running.loop.call(lambda: None).result(LIMIT_S)
    assert running.loop.last_tick_age_s < 1.0
    running.loop.stop(limit_s=LIMIT_S)
