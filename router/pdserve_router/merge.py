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
    """Decode may be heard before prefill: what comes early waits for its predecessor."""

    def __init__(self, next_index: int = 0) -> None:
        self._next_index = next_index
        self._early: dict[int, pb.SequenceTokens] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._early)

    def add(self, message: pb.SequenceTokens) -> list[Tokens]:
        """What can be passed on now. Raises ``ProtocolViolation`` when indices overlap oddly."""
        if message.first_index < self._next_index:
            if message.first_index + len(message.token_ids) > self._next_index:
                raise ProtocolViolation(f"tokens from {message.first_index}, next is {self._next_index}")
            return []  # told by both workers
        self._early[message.first_index] = message
        ready = []
        while (following := self._early.pop(self._next_index, None)) is not None:
            self._next_index += len(following.token_ids)
            ready.append(
                Tokens(tuple(following.token_ids), tuple(following.logprobs), following.finish_reason)
            )
            if not following.token_ids:
                break
        return ready
