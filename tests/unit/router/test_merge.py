"""Two workers tell of one sequence: every token comes out once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ProtocolViolation
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router.merge import TokenMerge


def batch(first_index: int, *token_ids: int, finish_reason: str = "") -> pb.SequenceTokens:
    return pb.SequenceTokens(first_index=first_index, token_ids=token_ids, finish_reason=finish_reason)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    start=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
    repeats=st.integers(0, 3),
)
def test_any_order_and_any_repeats_give_each_token_once(
    sizes: list[int], start: int, order: object, repeats: int
) -> None:
    batches, index = [], start
    for size in sizes:
        batches.append(batch(index, *range(index, index + size)))
        index += size
    arriving = batches + batches[:repeats]
    order.shuffle(arriving)  # type: ignore[attr-defined]
    merge = TokenMerge(start)
    heard = [
        token_id for arrived in arriving for tokens in merge.add(arrived) for token_id in tokens.token_ids
    ]
    assert heard == list(range(start, index))


def test_a_token_of_decode_waits_for_the_first_of_prefill() -> None:
    merge = TokenMerge(0)
    assert merge.add(batch(1, 11)) == []
    assert not merge.has_begun
    assert [tokens.token_ids for tokens in merge.add(batch(0, 10))] == [(10,), (11,)]
    assert merge.has_begun


def test_a_batch_that_overlaps_in_part_is_a_violation() -> None:
    merge = TokenMerge(0)
    merge.add(batch(0, 10, 11))
    with pytest.raises(ProtocolViolation, match="next is 2"):
        merge.add(batch(1, 11, 12))


def test_an_empty_batch_can_say_that_it_was_the_last() -> None:
    merge = TokenMerge(0)
    merge.add(batch(0, 10))
    assert [tokens.finish_reason for tokens in merge.add(batch(1, finish_reason="stop"))] == ["stop"]
