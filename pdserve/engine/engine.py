"""The engine: three beats a step, and the operations the worker programs call.

One owner (the engine thread), no locks, no asyncio. Every operation may also be called from
``on_boundary``, between two layers of a running step: an abort gives its blocks back within
a layer's time, not a step's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.finish import finish_reason
from pdserve.engine.runner import Runner, StepAbandoned
from pdserve.engine.sampler import SampledToken, TokenLogprobs
from pdserve.engine.scheduler import Chunk, Scheduler, StepPlan
from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.errors import EngineFailure, PdserveError, RequestError
from pdserve.kvcache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did for one sequence; ``first_index`` counts output tokens from 0."""

    seq_id: str
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    num_cached_tokens: int = 0
    error: PdserveError | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the state, not a second copy of it; the last five are totals since start."""

    num_waiting: int
    num_running: int
    num_held: int
    num_kept: int
    num_waiting_prefill_tokens: int
    num_usable_blocks: int
    num_free_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


LayerWritten = list[tuple[Sequence, int]]


class Engine:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        runner: Runner,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_context_tokens: int,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_context_tokens = max_context_tokens
        self._sequences: dict[str, Sequence] = {}
        self._executing: StepPlan | None = None
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_generated_tokens = 0
        # Set by whoever listens; called on the engine thread in the middle of a step.
        self.on_boundary: Callable[[], None] = _nothing
        self.on_layer_written: Callable[[int, LayerWritten], None] = _nothing

    # ------------------------------------------------------------ operations

    def add(self, sequence: Sequence) -> None:
        """Queues it. Raises ``RequestError`` when it could never run."""
        self._check(sequence)
        self._scheduler.add(sequence)
        self._sequences[sequence.seq_id] = sequence

    def hold(self, sequence: Sequence) -> bool:
        """Reserves blocks for KV that will arrive from elsewhere. False: no room now. Raises like ``add``."""
        self._check(sequence)
        if not self._scheduler.hold(sequence):
            return False
        self._sequences[sequence.seq_id] = sequence
        return True

    def adopt(self, seq_id: str, token_id: int) -> None:
        """The KV of a held sequence is complete; ``token_id`` comes next, sampled where the KV came
        from. No output: whoever sampled it has told it, also if it ends the sequence."""
        sequence = self._scheduler.adopt(seq_id)
        sequence.output_token_ids.append(token_id)
        reason = finish_reason(sequence, self._eos_token_ids, self._max_context_tokens)
        if reason:
            self._end(sequence)

    def abort(self, seq_id: str) -> None:
        """Idempotent; the blocks are free when it returns."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        if self._executing is not None:
            self._runner.detach(seq_id)
        self._scheduler.remove(sequence)

    def free(self, seq_id: str) -> None:
        """Gives back the blocks of a finished sequence that kept them. Idempotent."""
        self._scheduler.free(seq_id)
        self._sequences.pop(seq_id, None)

    # ------------------------------------------------------------------ step

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Plans, executes and applies; an exception leaves the plan for ``fail_step``."""
        plan = self._scheduler.plan()
        if not plan.chunks:
            return []
        self._executing = plan
        try:
            sampled = self._runner.execute(
                plan, on_boundary=self._boundary, on_layer_written=self._layer_written
            )
        except StepAbandoned:
            sampled = None
        self._executing = None
        self._num_steps += 1
        return [] if sampled is None else self._apply(plan, sampled)

    def fail_step(self, cause: Exception) -> list[StepOutput]:
        """After ``step`` raised: its sequences end with ``EngineFailure``, the others go on."""
        plan, self._executing = self._executing, None
        error = EngineFailure(f"the step failed: {type(cause).__name__}: {cause}")
        failed = [chunk.sequence.seq_id for chunk in plan.chunks] if plan else list(self._sequences)
        outputs = [StepOutput(seq_id, error=error) for seq_id in failed if seq_id in self._sequences]
        for seq_id in failed:
            self.abort(seq_id)
        return outputs

    def _boundary(self) -> None:
        self.on_boundary()
        assert self._executing is not None, "a boundary outside a step"
        if not any(self._is_live(chunk) for chunk in self._executing.chunks):
            raise StepAbandoned

    def _layer_written(self, layer: int) -> None:
        assert self._executing is not None, "a layer was written outside a step"
        written = [(chunk.sequence, chunk.end) for chunk in self._executing.chunks if self._is_live(chunk)]
        self.on_layer_written(layer, written)

    def _apply(self, plan: StepPlan, sampled: list[SampledToken]) -> list[StepOutput]:
        tokens = iter(sampled)
        outputs = []
        for chunk in plan.chunks:
            token = next(tokens) if chunk.samples else None
            if not self._is_live(chunk):
                continue
            self._scheduler.computed(chunk)
            self._num_computed_tokens += chunk.num_tokens
            if token is not None:
                outputs.append(self._append(chunk.sequence, token))
        return outputs

    def _append(self, sequence: Sequence, token: SampledToken) -> StepOutput:
        index = len(sequence.output_token_ids)
        sequence.output_token_ids.append(token.token_id)
        self._num_generated_tokens += 1
        reason = finish_reason(sequence, self._eos_token_ids, self._max_context_tokens)
        if reason or sequence.keep_blocks:
            self._end(sequence)
        return StepOutput(
            seq_id=sequence.seq_id,
            first_index=index,
            token_ids=(token.token_id,),
            logprobs=() if token.logprobs is None else (token.logprobs,),
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        if not sequence.keep_blocks:
            del self._sequences[sequence.seq_id]

    def _is_live(self, chunk: Chunk) -> bool:
        """Whether the sequence is still the one that was planned."""
        sequence = chunk.sequence
        return sequence.status is SequenceStatus.RUNNING and self._sequences.get(sequence.seq_id) is sequence

    def _check(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sequences, f"{sequence.seq_id} is here already"
        beyond = max((*sequence.prompt_token_ids, *sequence.output_token_ids), default=0)
        if beyond >= self._vocab_size:
            raise RequestError(
                f"token id {beyond} is outside the vocabulary of {self._vocab_size}", param="prompt"
            )
        named = (*sequence.sampling.logit_bias, *sequence.sampling.stop_token_ids)
        if any(not 0 <= token_id < self._vocab_size for token_id in named):
            raise RequestError("logit_bias or stop_token_ids names a token outside the vocabulary")

    # ------------------------------------------------------------- reporting

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_held=scheduler.num_held,
            num_kept=scheduler.num_kept,
            num_waiting_prefill_tokens=scheduler.num_waiting_prefill_tokens,
            num_usable_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_owned_blocks=pool.num_owned_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_computed_tokens=self._num_computed_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()


def _nothing(*args: object) -> None:
    del args
