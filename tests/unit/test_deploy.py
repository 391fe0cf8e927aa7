"""The files in deploy/ agree with each other and with the tables in docs/."""

import re
from typing import Any

import pytest
import yaml

from tests.support.exposition import documented
from tests.support.monitoring import DEPLOY, MONITORING, alert_rules, dashboard_queries

SECTIONS = ("Router", "Both kinds of worker", "Prefill workers", "Decode workers")
QUERIES = [*dashboard_queries(), *(rule["expr"] for rule in alert_rules())]
COMPOSE_FILES = sorted(DEPLOY.glob("docker-compose*.yml"))


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())["services"]
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_documented_metrics(query: str) -> None:
    known = {
        name + suffix
        for section in SECTIONS
        for name, metric in documented(section).items()
        for suffix in (("_bucket", "_count", "_sum") if metric.type == "histogram" else ("",))
    }
    asked = set(re.findall(r"pdserve_\w+", query))
    assert asked or "up{" in query
    assert asked <= known


def test_each_gpu_service_has_devices_of_its_own_and_the_hosts_shared_memory() -> None:
    gpu = services("docker-compose.gpu.yml")
    assert set(gpu) == {"prefill", "decode"}
    assigned = []
    for service in gpu.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert service["ipc"] == "host"
        assigned += device["device_ids"]
    assert len(assigned) == len(set(assigned)) == 2


def test_prometheus_looks_for_every_part_at_the_port_it_shows() -> None:
    parts = services("docker-compose.yml")
    for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]:
        (lookup,) = job["dns_sd_configs"]
        (name,) = lookup["names"]
        command = parts[name]["command"]
        shown = command[command.index("--metrics-port") + 1] if "--metrics-port" in command else "8000"
        assert str(lookup["port"]) == shown


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_every_variable_of_a_compose_file_is_in_the_example(file: Any) -> None:
    example = (DEPLOY / ".env.example").read_text()
    named = set(re.findall(r"\$\{(\w+)", file.read_text()))
    assert named
    assert named <= set(re.findall(r"^(\w+)=", example, re.MULTILINE))
