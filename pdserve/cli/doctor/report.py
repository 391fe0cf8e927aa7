"""Findings as text for people and as JSON for scripts. Pure."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from pdserve.cli.doctor.finding import Finding, Severity, exit_status

_WIDTH = 100
_INDENT = " " * 7


def as_text(findings: Sequence[Finding]) -> str:
    """Worst first; of one severity, in the order of the checks."""
    ranked = sorted(findings, key=lambda finding: list(Severity).index(finding.severity))
    return "\n".join([*map(_paragraph, ranked), "", _summary(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    content = {"exit_status": exit_status(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False)


def _paragraph(finding: Finding) -> str:
    lines = [f"{finding.severity.upper():<{len(_INDENT)}}{finding.what}", _wrapped(finding.why)]
    if finding.what_to_do:
        lines.append(_wrapped(f"→ {finding.what_to_do}"))
    return "\n".join(line for line in lines if line)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    faults, slow = counts[Severity.FAULT], counts[Severity.SLOW]
    if not faults and not slow:
        return "No fault found."
    return f"{faults} fault{'' if faults == 1 else 's'}, {slow} that will be slow."
