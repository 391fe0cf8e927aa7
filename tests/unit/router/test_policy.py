"""Which worker is asked first."""

from __future__ import annotations

from pdserve_router.policy import Load, decode_order, prefill_order


def load(
    address: str,
    *,
    num_requests: int = 0,
    num_waiting_prefill_tokens: int = 0,
    num_free_blocks: int = 10,
    has_failed: bool = False,
) -> Load:
    return Load(address, num_requests, num_waiting_prefill_tokens, num_free_blocks, has_failed)


def test_decode_prefers_fewest_requests_then_most_room() -> None:
    loads = [
        load("busy", num_requests=2),
        load("tight", num_free_blocks=1),
        load("roomy", num_free_blocks=9),
    ]
    assert decode_order(loads) == ["roomy", "tight", "busy"]


def test_prefill_prefers_fewest_tokens_to_compute() -> None:
    loads = [
        load("a", num_waiting_prefill_tokens=900, num_requests=1),
        load("b", num_waiting_prefill_tokens=100, num_requests=4),
    ]
    assert prefill_order(loads) == ["b", "a"]


def test_a_decode_worker_that_failed_the_request_is_asked_last() -> None:
    assert decode_order([load("failed", has_failed=True), load("busy", num_requests=9)]) == ["busy", "failed"]


def test_a_prefill_worker_that_failed_the_request_is_not_asked() -> None:
    assert prefill_order([load("failed", has_failed=True)]) == []


def test_equals_are_ordered_alike_by_every_router() -> None:
    assert decode_order([load("b"), load("a")]) == ["a", "b"]


def test_nobody_is_an_empty_order() -> None:
    assert decode_order([]) == prefill_order([]) == []
