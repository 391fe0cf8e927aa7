"""Prometheus text, and the table of all metrics in docs/metrics.md, as values to compare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TABLE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(?P<name>\w+)` \| (?P<type>\w+) \| (?P<labels>.*?) \| (?P<meaning>.*) \|")
# Belongs to the text format, not to the metric.
FORMAT_LABELS = {"le"}


@dataclass(frozen=True)
class Documented:
    name: str
    type: str
    labels: frozenset[str]
    meaning: str


class Exposition:
    """What one process shows."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        # When a counter began is the format's own, too.
        self.families: list[Metric] = [one for one in families if not one.name.endswith("_created")]

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Of the samples of that exact name, by their label values."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name
        }

    def total(self, name: str) -> float:
        return sum(self.values(name).values())


def shown_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels(family: Metric) -> frozenset[str]:
    return frozenset(label for sample in family.samples for label in sample.labels) - FORMAT_LABELS


def documented(section: str) -> dict[str, Documented]:
    """The rows below a heading of docs/metrics.md."""
    _, _, rest = TABLE.read_text().partition(f"## {section}\n")
    assert rest, f"docs/metrics.md has no section {section}"
    rows = [ROW.fullmatch(line) for line in rest.partition("\n## ")[0].splitlines()]
    return {
        row["name"]: Documented(
            row["name"], row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])), row["meaning"]
        )
        for row in rows
        if row
    }
