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
        self._held = ""
        self.matched = False

    def add(self, text: str) -> str:
        """What may be shown now. After a match ``matched`` is set and nothing more comes out."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        self._held += text
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            self.matched = True
            _, begin = min(matches)
            shown, self._held = self._held[:begin], ""
            return shown
        keep = self._open_prefix()
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def flush(self) -> str:
        """The held text when the stream ends another way."""
        shown, self._held = self._held, ""
        return shown

    def _open_prefix(self) -> int:
        """Where the earliest suffix begins that a stop string may continue from."""
        longest = max(map(len, self._stops)) - 1
        for begin in range(max(0, len(self._held) - longest), len(self._held)):
            suffix = self._held[begin:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return begin
        return len(self._held)
