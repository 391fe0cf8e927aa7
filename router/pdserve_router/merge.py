"""Joins the tokens of two workers into one sequence: contiguous, each exactly once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ProtocolViolation
from pdserve.rpc.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of a sequence, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    finish_reason: str = ""


class TokenMerge:
    """Decode may be heard before prefill: what comes early waits for its predecessor.

    A batch may be empty, to say that the tokens before it were the last.
    """

    def __init__(self, first_index: int) -> None:
        self._next_index = self._first_index = first_index
        self._early: dict[int, pb.SequenceTokens] = {}

    @property
    def has_begun(self) -> bool:
        return self._next_index > self._first_index

    def add(self, message: pb.SequenceTokens) -> list[Tokens]:
        """What can be passed on now. Raises ``ProtocolViolation`` for a batch that overlaps in part."""
        end = message.first_index + len(message.token_ids)
        if message.first_index < self._next_index:
            if end > self._next_index:
                raise ProtocolViolation(f"tokens {message.first_index} to {end}, next is {self._next_index}")
            return []  # told by both workers
        self._early[message.first_index] = message
        return self._ready()

    def _ready(self) -> list[Tokens]:
        ready = []
        while (following := self._early.pop(self._next_index, None)) is not None:
            self._next_index += len(following.token_ids)
            ready.append(
                Tokens(tuple(following.token_ids), tuple(following.logprobs), following.finish_reason)
            )
        return ready
