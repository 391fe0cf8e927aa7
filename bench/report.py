"""Results of a benchmark: rows of (metric, value, unit, labels), as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

Labels = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Row:
    metric: str
    value: float
    unit: str
    labels: Labels = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    benchmark: str
    rows: list[Row] = field(default_factory=list)

    def add(self, metric: str, value: float, unit: str, **labels: str | int | float | bool) -> None:
        self.rows.append(Row(metric, value, unit, labels))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, object]:
        return {
            "benchmark": self.benchmark,
            "commit": _commit(),
            "machine": _machine(),
            "command": " ".join([f"scripts/bench {self.benchmark}", *sys.argv[1:]]),
            "rows": [
                {"metric": row.metric, "value": row.value, "unit": row.unit, **row.labels}
                for row in self.rows
            ],
        }

    def print_table(self, *label_names: str) -> None:
        """One line per combination of labels, one column per metric."""
        metrics = list(dict.fromkeys(row.metric for row in self.rows))
        units = {row.metric: row.unit for row in self.rows}
        lines: dict[tuple[object, ...], dict[str, float]] = {}
        for row in self.rows:
            key = tuple(row.labels.get(name, "") for name in label_names)
            lines.setdefault(key, {})[row.metric] = row.value
        header = [*label_names, *(f"{metric} [{units[metric]}]" for metric in metrics)]
        body = [
            [*map(str, key), *(_short(values.get(metric)) for metric in metrics)]
            for key, values in lines.items()
        ]
        print_columns([header, *body])


def print_columns(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    return parser


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def _machine() -> dict[str, str | int]:
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown"
    )
    return {
        "cpu": cpu,
        "num_cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
