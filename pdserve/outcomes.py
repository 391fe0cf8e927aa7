"""How requests, reservations and hand-offs end: one set of labels for metrics, spans and logs. Pure.

A good end is ``ok`` (a hand-off: ``sealed``, or ``not_needed`` when the first token was the last).
Any other is a label of ``pdserve.errors`` or one of ``GIVEN_UP`` and ``REFUSED_BY_LINK``.
Reasons travel between processes as text with details behind a colon; a metric's label must come
from a known set, however creative a peer is.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.errors import PdserveError

OK = "ok"
OTHER = "other"
# Nothing was wrong with the work; somebody did not want it any more.
GIVEN_UP = frozenset({"cancelled", "disconnected", "retry", "lost", "session_ended", "shutdown"})
# What a landing table finds wrong with a hand-off, and what a sender does with its silence.
REFUSED_BY_LINK = frozenset(
    {
        "checksum",
        "coverage",
        "digest",
        "duplicate",
        "misaligned",
        "no_progress",
        "not_opened_here",
        "old_fence",
        "opened_twice",
        "payload_size",
        "segment_missing",
        "unknown_reservation",
    }
)
SEALED = "sealed"
NOT_NEEDED = "not_needed"
_KNOWN_OTHERWISE = frozenset({OK, SEALED, NOT_NEEDED})
_FINISHED = frozenset({"", "finished"})


def outcome_label(reason: str) -> str:
    """``ok`` for a good end, the known label that ``reason`` begins with, or ``other``."""
    label = reason.partition(":")[0]
    if label in _FINISHED:
        return OK
    return label if label in _KNOWN_OTHERWISE | GIVEN_UP | REFUSED_BY_LINK | error_labels() else OTHER


def abort_label(reason: str) -> str:
    """Of a hand-off that was not sealed: ``not_needed`` where token 1 was the last."""
    label = outcome_label(reason)
    return NOT_NEEDED if label == OK else label


def error_labels() -> frozenset[str]:
    return frozenset(error.label for error in _with_descendants(PdserveError))


def _with_descendants(error: type[PdserveError]) -> Iterator[type[PdserveError]]:
    yield error
    for child in error.__subclasses__():
        yield from _with_descendants(child)
