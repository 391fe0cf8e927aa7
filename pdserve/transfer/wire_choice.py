"""In how many bytes KV travels: as the operator says, or as this link has turned out to be. Pure.

Rounding costs time at both ends and saves time on the link. With a link of ``L`` bytes/s, a converter of
``C`` bytes/s and payloads that shrink to a share ``s``, a byte takes ``1/L`` as it is and ``s/L + 1/C``
rounded. Both rates are what past pushes to this peer took.
"""

from __future__ import annotations

from typing import Literal

from pdserve.errors import ConfigError
from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.segment import WireDtype, wire_layout

WireOption = Literal["same", "fp16", "bf16", "int8", "fp8", "auto"]
_DTYPES: dict[WireOption, WireDtype] = {
    "same": WireDtype.SAME,
    "fp16": WireDtype.FLOAT16,
    "bf16": WireDtype.BFLOAT16,
    "int8": WireDtype.INT8,
    "fp8": WireDtype.FLOAT8,
    "auto": WireDtype.INT8,
}
# Until the first push that is converted has been timed: high enough to try it on a slow link.
UNTRIED_CONVERTER_BYTES_PER_S = 1e9
# The weight of the newest push in a rate.
NEWEST = 0.3


class WireChoice:
    """One for each peer; not thread-safe."""

    def __init__(self, option: WireOption, layout: KVLayout) -> None:
        self._rounded = narrowed(option, layout)
        self._is_auto = option == "auto"
        self._share = wire_layout(layout, self._rounded).cell_bytes / layout.cell_bytes
        self._link_bytes_per_s: float | None = None
        self._converter_bytes_per_s: float = UNTRIED_CONVERTER_BYTES_PER_S

    def next(self) -> WireDtype:
        """For the next push."""
        if not self._is_auto:
            return self._rounded
        if self._link_bytes_per_s is None:
            return WireDtype.SAME
        as_it_is = 1 / self._link_bytes_per_s
        rounded = self._share / self._link_bytes_per_s + 1 / self._converter_bytes_per_s
        return self._rounded if rounded < as_it_is else WireDtype.SAME

    def sent(self, wire_bytes: int, sending_s: float) -> None:
        if wire_bytes and sending_s > 0:
            self._link_bytes_per_s = _blend(self._link_bytes_per_s, wire_bytes / sending_s)

    def converted(self, pool_bytes: int, converting_s: float) -> None:
        if pool_bytes and converting_s > 0:
            self._converter_bytes_per_s = _blend(self._converter_bytes_per_s, pool_bytes / converting_s)


def narrowed(option: WireOption, layout: KVLayout) -> WireDtype:
    """What ``option`` means for this pool: ``SAME`` where nothing would be saved.

    Raises ``ConfigError`` for a pool that is quantized already.
    """
    dtype = _DTYPES[option]
    if dtype is WireDtype.SAME:
        return dtype
    if layout.is_quantized:
        raise ConfigError(f"--wire-dtype {option}: KV of {layout.dtype} travels as it is")
    saves = wire_layout(layout, dtype).cell_bytes < layout.cell_bytes
    return dtype if saves else WireDtype.SAME


def _blend(rate: float | None, newest: float) -> float:
    return newest if rate is None else (1 - NEWEST) * rate + NEWEST * newest
