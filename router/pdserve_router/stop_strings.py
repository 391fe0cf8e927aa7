"""Finds stop strings in text that comes in pieces. Pure.

Text is held back only while it may be the beginning of a stop string. The match that is
complete first wins (of those, the one that begins first): that does not depend on how the
text was cut into pieces, and nothing is generated in vain.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched = False

    def add(self, text: str) -> str:
        """What may be shown now. After a match ``matched`` is set and nothing more comes out."""
        if self.matched:
            return ""
        self._held += text
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            self.matched = True
            _, end = min(matches)
        else:
            end = self._open_prefix()
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def flush(self) -> str:
        """The held text when the stream ends another way."""
        shown, self._held = self._held, ""
        return "" if self.matched else shown

    def _open_prefix(self) -> int:
        """Where the earliest suffix begins that a stop string may continue from."""
        length = len(self._held)
        begins = range(max(0, length - self._longest + 1), length) if self._longest else range(0)
        return next((begin for begin in begins if self._is_open(self._held[begin:])), length)

    def _is_open(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)
