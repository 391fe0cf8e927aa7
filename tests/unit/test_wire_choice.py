"""How KV travels is what the operator says, or what a link's speed makes sensible."""

from dataclasses import replace

import pytest

from pdserve.errors import ConfigError
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import WireDtype
from pdserve.transfer.wire_choice import WireChoice, WireOption, narrowed

LAYOUT = KVLayout(30, 3, 64, "float32", 16, PoolOrder.HEAD_MAJOR)
HALF = replace(LAYOUT, dtype="float16")


@pytest.mark.parametrize(
    ("option", "layout", "expected"),
    [
        ("same", LAYOUT, WireDtype.SAME),
        ("fp16", LAYOUT, WireDtype.FLOAT16),
        ("fp16", HALF, WireDtype.SAME),
        ("bf16", HALF, WireDtype.SAME),
        ("int8", HALF, WireDtype.INT8),
        ("fp8", LAYOUT, WireDtype.FLOAT8),
        ("same", replace(LAYOUT, dtype="int8"), WireDtype.SAME),
    ],
)
def test_an_option_means_what_saves_bytes(option: WireOption, layout: KVLayout, expected: WireDtype) -> None:
    assert narrowed(option, layout) is expected
    assert WireChoice(option, layout).next() is expected


def test_a_quantized_pool_is_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match="--wire-dtype fp8: KV of int8 travels as it is"):
        narrowed("fp8", replace(LAYOUT, dtype="int8"))


def test_auto_rounds_on_a_slow_link_and_only_there() -> None:
    fast, slow = WireChoice("auto", LAYOUT), WireChoice("auto", LAYOUT)
    assert slow.next() is WireDtype.SAME, "nothing is known of the link yet"
    fast.sent(1 << 20, (1 << 20) / 3e9)
    slow.sent(1 << 20, (1 << 20) / 50e6)
    assert fast.next() is WireDtype.SAME
    assert slow.next() is WireDtype.INT8


def test_auto_gives_up_on_a_converter_that_is_slower_than_the_link() -> None:
    choice = WireChoice("auto", LAYOUT)
    choice.sent(1 << 20, (1 << 20) / 300e6)
    assert choice.next() is WireDtype.INT8
    for _ in range(20):
        choice.converted(1 << 20, (1 << 20) / 100e6)
    assert choice.next() is WireDtype.SAME


def test_auto_notices_that_a_link_has_become_fast() -> None:
    choice = WireChoice("auto", LAYOUT)
    choice.sent(1 << 20, (1 << 20) / 50e6)
    assert choice.next() is WireDtype.INT8
    for _ in range(20):
        choice.sent(1 << 20, (1 << 20) / 5e9)
    assert choice.next() is WireDtype.SAME
