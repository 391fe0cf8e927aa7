"""Who is at the two ends of a link, and whether they may exchange KV. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pdserve.errors import IncompatiblePeer, ProtocolViolation
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import WireOrder

PROTOCOL_VERSION = 1
# In this order: the first difference is the one that explains the others.
_MUST_AGREE = ("protocol_version", "model_fingerprint", "dtype", "num_layers", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class Hello:
    """``incarnation``: random per process start; a restart on the same address is another peer."""

    incarnation: int
    model_fingerprint: str
    layout: KVLayout
    protocol_version: int = PROTOCOL_VERSION

    def as_dict(self) -> dict[str, object]:
        return {
            "incarnation": str(self.incarnation),  # JSON numbers end at 53 bits
            "model_fingerprint": self.model_fingerprint,
            "protocol_version": self.protocol_version,
            **asdict(self.layout),
        }

    @classmethod
    def from_dict(cls, content: dict[str, object]) -> Hello:
        """Raises ``ProtocolViolation``."""
        try:
            layout = KVLayout(
                num_layers=_integer(content["num_layers"]),
                num_kv_heads=_integer(content["num_kv_heads"]),
                head_dim=_integer(content["head_dim"]),
                dtype=str(content["dtype"]),
                block_size=_integer(content["block_size"]),
                order=PoolOrder(str(content["order"])),
            )
            return cls(
                int(str(content["incarnation"])),
                str(content["model_fingerprint"]),
                layout,
                _integer(content["protocol_version"]),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolViolation(f"not a hello: {error!r}") from error


def check_compatible(ours: Hello, theirs: Hello) -> None:
    """Raises ``IncompatiblePeer`` with the first field that differs."""
    mine, peer = ours.as_dict(), theirs.as_dict()
    for field in _MUST_AGREE:
        if mine[field] != peer[field]:
            raise IncompatiblePeer(field, ours=mine[field], theirs=peer[field])


def wire_order(ours: Hello, theirs: Hello) -> WireOrder:
    """Whole blocks when both pools look alike, else token by token."""
    return WireOrder.BLOCK if ours.layout == theirs.layout else WireOrder.TOKEN


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not an integer")
    return value
