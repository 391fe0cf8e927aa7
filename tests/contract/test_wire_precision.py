"""KV that travels in fewer bytes than it lies in arrives rounded once, and only where that is allowed."""

from dataclasses import replace

import numpy as np
import pytest

from pdserve.kvcache.segment import Segment, WireDtype, WireOrder, wire_layout
from pdserve.transfer.frame import FrameKind, Header
from tests.support.links import (
    BACKENDS,
    BESIDE_THE_STREAM,
    LAYOUT,
    WAIT_S,
    landing_plan,
    open_decode,
    open_prefill,
    push_all,
    push_plan,
)

SOURCE, TARGET = (9, 3, 4, 17), (5, 6, 7, 21)


@pytest.mark.parametrize("target_block_size", [4, 3])
@pytest.mark.parametrize("num_cached", [0, 4])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in BESIDE_THE_STREAM])
def test_what_arrives_is_what_was_sent_rounded_once(
    backend: str, num_cached: int, target_block_size: int
) -> None:
    """Between GPUs nothing is rounded."""
    layout = replace(LAYOUT, block_size=target_block_size)
    num_cached = num_cached // target_block_size * target_block_size
    with (
        open_decode(backend, layout=layout) as decode,
        open_prefill(backend, decode.connect, wire_option="fp16") as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET, num_cached_tokens=num_cached)
        push = push_plan(plan, decode, blocks=SOURCE)
        decode.table.expect(plan)
        push_all(prefill, push)
        assert decode.sealed.get(timeout=WAIT_S) == (plan.reservation_id, 42)
        num_tokens = plan.num_tokens - num_cached
        outcome = prefill.done.get(timeout=WAIT_S)
        assert outcome.num_bytes == num_tokens * LAYOUT.token_bytes // 2
        sent = prefill.kv.tokens(SOURCE, num_cached, plan.num_tokens)
        arrived = decode.kv.tokens(TARGET, num_cached, plan.num_tokens)
        assert np.array_equal(arrived, sent.astype(np.float16).astype(np.float32))
        assert not np.array_equal(arrived, sent)


@pytest.mark.parametrize(("pool_dtype", "order"), [("float32", WireOrder.BLOCK), ("int8", WireOrder.TOKEN)])
def test_precision_that_this_pool_cannot_take_is_refused(pool_dtype: str, order: WireOrder) -> None:
    layout = replace(LAYOUT, dtype=pool_dtype)
    with open_decode("inproc", layout=layout) as decode:
        plan = landing_plan(decode, blocks=TARGET, num_tokens=4)
        decode.table.expect(plan)
        connection = object()
        header = Header(FrameKind.OPEN, plan.reservation_id, plan.fence)
        assert decode.table.open(header, b"good ticket", connection) == ""
        segment = Segment(0, 1, 0, LAYOUT.num_kv_heads, 0, 4)
        num_bytes = segment.payload_bytes(wire_layout(layout, WireDtype.FLOAT16), order)
        data = Header(
            FrameKind.DATA, plan.reservation_id, plan.fence, num_bytes, 0, segment, order, WireDtype.FLOAT16
        )
        assert decode.table.begin(data, connection) is None
        assert decode.aborted.get_nowait() == (plan.reservation_id, "wire_dtype")
