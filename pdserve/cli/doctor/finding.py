"""What a check found, and what all findings together mean for a script. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

EXIT_FINE = 0
EXIT_FAULT = 1


class Severity(StrEnum):
    """``FAULT``: something does not work. ``SLOW``: it works, worse than it could."""

    FAULT = "fault"
    SLOW = "slow"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """``why``: how it is known, or what it does. ``what_to_do`` is empty when there is nothing to do."""

    severity: Severity
    what: str
    why: str = ""
    what_to_do: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    has_fault = any(finding.severity is Severity.FAULT for finding in findings)
    return EXIT_FAULT if has_fault else EXIT_FINE
