"""The engine's thread: commands, then a step, for as long as there is either.

Commands are posted from any thread and run here, between steps and at layer boundaries.
A worker's broad ``except`` are here: a step that raises fails its own sequences and the worker
goes on; anything else is a broken promise, after which no block can be trusted, so the owner
is told to end the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pdserve.clock import Clock
from pdserve.engine.engine import Engine, EngineStats, StepOutput

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class BrokenPromise(BaseException):
    """A command found a state that cannot be. Not an ``Exception``: no step may be blamed for it."""


class EngineLoop:
    def __init__(
        self,
        engine: Engine,
        *,
        on_outputs: Callable[[list[StepOutput]], None],
        on_broken: Callable[[], None],
        clock: Clock,
    ) -> None:
        """``on_broken`` is called, on the engine thread, when it ends by an error."""
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_broken = on_broken
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._waiting = False
        self._last_tick_s = clock.now_s()
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.on_boundary = self._run_commands

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, limit_s: float) -> bool:
        """Ends after the running step; False when it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def post(self, command: Callable[[], None]) -> None:
        """Thread-safe; in order."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Like ``post``, with an answer."""
        future: Future[Result] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except AssertionError as error:
                    future.set_exception(error)

        self.post(command)
        return future

    @property
    def last_tick_age_s(self) -> float:
        """How long the loop has shown no sign of life; 0 while it waits for work."""
        return 0.0 if self._waiting else self._clock.now_s() - self._last_tick_s

    @property
    def stats(self) -> EngineStats:
        """The engine's state as of the last step or command."""
        return self._stats

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._engine.has_work:
                    self._step()
                self._stats = self._engine.stats()
        except (Exception, BrokenPromise):  # the documented last resort: see the module
            logger.exception("engine_broken")
            self._on_broken()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._waiting = True
            self._wake.wait_for(lambda: self._commands or self._stopping or self._engine.has_work)
            self._waiting = False
            self._last_tick_s = self._clock.now_s()
            return not self._stopping

    def _run_commands(self) -> None:
        self._last_tick_s = self._clock.now_s()
        if not self._commands:
            return
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except AssertionError as error:
                raise BrokenPromise(f"{command}: {error}") from error
        self._stats = self._engine.stats()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # the documented last resort: see the module
            logger.exception("step_failed")
            outputs = self._engine.fail_step(error)
        if outputs:
            self._on_outputs(outputs)
