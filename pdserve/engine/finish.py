"""Why a sequence ends: the one place that says so. Pure."""

from __future__ import annotations

from collections.abc import Set

from pdserve.engine.sequence import Sequence


def stop_token_ids(sequence: Sequence, eos_token_ids: Set[int]) -> Set[int]:
    """The tokens that end this sequence."""
    own = frozenset(sequence.sampling.stop_token_ids)
    return own if sequence.sampling.ignore_eos else own | eos_token_ids


def finish_reason(sequence: Sequence, eos_token_ids: Set[int], max_context_tokens: int) -> str:
    """``""`` while it goes on; judged after the newest token was appended."""
    sampling = sequence.sampling
    num_output = len(sequence.output_token_ids)
    is_stop = sequence.output_token_ids[-1] in stop_token_ids(sequence, eos_token_ids)
    if is_stop and num_output > sampling.min_tokens:
        return "stop"
    if num_output >= sampling.max_tokens or sequence.num_tokens >= max_context_tokens:
        return "length"
    return ""
