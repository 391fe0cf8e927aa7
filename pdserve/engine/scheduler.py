"""Decides what the next step computes, and accounts for every block. Pure.

A plan takes one token of every running sequence that decodes, then prefill chunks in order
of arrival while the token budget lasts. While anything decodes, prefill gets at most
``prefill_chunk_tokens`` of a step, which bounds what a long prompt adds to their inter-token
latency. A prompt takes all its blocks when it is admitted; decoding grows block by block
and, when none is left, preempts the youngest: its blocks come back and it is recomputed.

Why this cannot lock up: a sequence is accepted only if it fits the pool alone, the oldest
running one is never preempted for another, and held ones either arrive or are aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.errors import RequestError
from pdserve.kvcache.block_pool import BlockPool
from pdserve.kvcache.block_table import ROOT, block_hashes


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_chunk_tokens: int = 128
    max_context_tokens: int = 8192
    enable_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute ``num_tokens`` of ``sequence`` from ``begin``; sample if that reaches its end."""

    sequence: Sequence
    begin: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.begin + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]


class Scheduler:
    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._held: dict[str, Sequence] = {}
        self._kept: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    # -------------------------------------------------------------- entering

    def add(self, sequence: Sequence) -> None:
        """Raises ``RequestError`` for a sequence that could never run."""
        self._check_fits(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.append(sequence)

    def hold(self, sequence: Sequence) -> bool:
        """Takes blocks for all its tokens, cached ones first; False when there is no room now."""
        self._check_fits(sequence)
        if len(self._running) + len(self._held) + len(self._waiting) >= self._limits.max_num_seqs:
            return False
        if not self._take_blocks(sequence, max_cached_tokens=sequence.num_tokens):
            return False
        sequence.status = SequenceStatus.HELD
        self._held[sequence.seq_id] = sequence
        return True

    def adopt(self, seq_id: str) -> Sequence:
        """All KV of a held sequence has arrived; it runs from here."""
        sequence = self._held.pop(seq_id)
        sequence.num_computed_tokens = sequence.num_tokens
        self._publish(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        return sequence

    # -------------------------------------------------------------- planning

    def plan(self) -> StepPlan:
        decoding = list(self._decode_chunks())
        budget = self._limits.max_num_batched_tokens - len(decoding)
        if decoding:
            budget = min(budget, self._limits.prefill_chunk_tokens)
        return StepPlan((*decoding, *self._prefill_chunks(budget)))

    def _decode_chunks(self) -> Iterator[Chunk]:
        for sequence in list(self._running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_uncomputed_tokens != 1:
                continue
            if self._grow(sequence):
                yield Chunk(sequence, sequence.num_computed_tokens, 1)

    def _grow(self, sequence: Sequence) -> bool:
        """A place for its newest token; False when it had to be preempted itself."""
        while len(sequence.block_table) * self._limits.block_size < sequence.num_tokens:
            block_ids = self._pool.allocate(1)
            if block_ids:
                sequence.block_table += block_ids
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _prefill_chunks(self, budget: int) -> Iterator[Chunk]:
        candidates = self._prefilling()
        while budget > 0 and (sequence := next(candidates, None)) is not None:
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            budget -= num_tokens
            yield Chunk(sequence, sequence.num_computed_tokens, num_tokens)

    def _prefilling(self) -> Iterator[Sequence]:
        """Those under way, then as many as are asked for from the queue: asking admits."""
        for sequence in list(self._running):
            if sequence.num_uncomputed_tokens > 1:
                yield sequence
        while self._waiting and len(self._running) + len(self._held) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            # At least one token must be computed, to have logits to sample from.
            if not self._take_blocks(sequence, max_cached_tokens=sequence.num_tokens - 1):
                return
            self._waiting.popleft()
            sequence.num_computed_tokens = sequence.num_cached_tokens
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            yield sequence

    # -------------------------------------------------------------- applying

    def computed(self, chunk: Chunk) -> None:
        """The KV of the chunk is in its blocks."""
        sequence = chunk.sequence
        assert sequence.num_computed_tokens == chunk.begin, (sequence, chunk)
        sequence.num_computed_tokens = chunk.end
        self._publish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        if sequence.keep_blocks:
            sequence.status = SequenceStatus.KEPT
            self._kept[sequence.seq_id] = sequence
        else:
            self._give_back(sequence)
            sequence.status = SequenceStatus.FINISHED

    def free(self, seq_id: str) -> None:
        """The blocks of a finished sequence that kept them; nothing for any other."""
        sequence = self._kept.pop(seq_id, None)
        if sequence is not None:
            self._give_back(sequence)
            sequence.status = SequenceStatus.FINISHED

    def remove(self, sequence: Sequence) -> None:
        """Wherever it is, it leaves, and its blocks with it."""
        match sequence.status:
            case SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            case SequenceStatus.RUNNING:
                self._running.remove(sequence)
            case SequenceStatus.HELD:
                del self._held[sequence.seq_id]
            case SequenceStatus.KEPT:
                del self._kept[sequence.seq_id]
            case SequenceStatus.FINISHED:
                return
        self._give_back(sequence)
        sequence.status = SequenceStatus.FINISHED

    # ------------------------------------------------------------- reporting

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_waiting_prefill_tokens(self) -> int:
        prefilling = (*self._waiting, *self._running)
        return sum(seq.num_uncomputed_tokens for seq in prefilling if seq.num_uncomputed_tokens > 1)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless the pool and the sequences agree on every reference."""
        self._pool.check_integrity()
        owners = (*self._running, *self._held.values(), *self._kept.values())
        held = {block_id for sequence in owners for block_id in sequence.block_table}
        assert len(held) == self._pool.num_owned_blocks, (len(held), self._pool.num_owned_blocks)
        assert not any(sequence.block_table for sequence in self._waiting), "a waiting sequence owns blocks"

    # ---------------------------------------------------------------- blocks

    def _check_fits(self, sequence: Sequence) -> None:
        limit = self._limits.max_context_tokens
        if sequence.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if sequence.num_tokens >= limit:
            raise RequestError(f"{sequence.num_tokens} tokens leave no room in a context of {limit}")
        # The newest token is never written, so the last one asked for needs no place.
        num_output = 1 if sequence.keep_blocks else sequence.sampling.max_tokens
        most = min(sequence.num_prompt_tokens + num_output, limit) - 1
        num_blocks = -(-most // self._limits.block_size)
        if num_blocks > self._pool.num_usable_blocks:
            raise RequestError(
                f"prompt and output of up to {most + 1} tokens need {num_blocks} KV blocks, "
                f"this worker has {self._pool.num_usable_blocks}"
            )

    def _take_blocks(self, sequence: Sequence, *, max_cached_tokens: int) -> bool:
        block_size = self._limits.block_size
        cached: list[int] = []
        if self._limits.enable_prefix_cache:
            self._extend_hashes(sequence)
            cached = self._pool.match(sequence.block_hashes[: max_cached_tokens // block_size])
        self._pool.share(cached)
        fresh = self._pool.allocate(-(-sequence.num_tokens // block_size) - len(cached))
        if fresh is None:
            self._pool.release(cached)
            return False
        sequence.block_table = cached + fresh
        sequence.num_cached_tokens = len(cached) * block_size
        sequence.num_published_blocks = len(cached)
        self.num_cached_tokens += sequence.num_cached_tokens
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0

    def _publish(self, sequence: Sequence) -> None:
        """Full, computed blocks become reusable, never one that is still being written."""
        if not self._limits.enable_prefix_cache:
            return
        num_full = sequence.num_computed_tokens // self._limits.block_size
        if num_full <= sequence.num_published_blocks:
            return
        self._extend_hashes(sequence)
        for index in range(sequence.num_published_blocks, num_full):
            self._pool.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_published_blocks = num_full

    def _extend_hashes(self, sequence: Sequence) -> None:
        begin = len(sequence.block_hashes) * self._limits.block_size
        if sequence.num_tokens - begin >= self._limits.block_size:
            parent = sequence.block_hashes[-1] if sequence.block_hashes else ROOT
            tokens = sequence.tokens_between(begin, sequence.num_tokens)
            sequence.block_hashes += block_hashes(tokens, self._limits.block_size, parent)
