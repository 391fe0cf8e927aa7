"""One sequence of tokens and how far its KV has come. Owned by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.sampling import SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    KEPT = "kept"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """``output_token_ids`` is not empty at the start when a request is resumed.

    ::

        |<- num_cached_tokens ->|
        |<------- num_computed_tokens ------->|
        |<------------------- num_tokens: prompt + output ------------------->|
    """

    seq_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    keep_blocks: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def tokens_between(self, begin: int, end: int) -> list[int]:
        """Without building the whole list: a decode step asks for one token of thousands."""
        num_prompt = len(self.prompt_token_ids)
        if begin >= num_prompt:
            return self.output_token_ids[begin - num_prompt : end - num_prompt]
        return self.prompt_token_ids[begin:end] + self.output_token_ids[: max(0, end - num_prompt)]
