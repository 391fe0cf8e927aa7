"""Prometheus, the program, with the rules and queries of deploy/monitoring on a running system."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.monitoring import MONITORING, alert_rules, dashboard_queries
from tests.support.processes import Processes, eventually, free_port, open_processes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.prometheus,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no program prometheus"),
]
LIMIT_S = 60.0
PROMPT = " ".join(f"t{5 + index}" for index in range(60))


@dataclass
class Prometheus:
    port: int

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=params, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def has_data(self, query: str) -> bool:
        result = self.get("query", query=query)["result"]
        return any(sample["value"][1] != "NaN" for sample in result)

    def states(self) -> list[str]:
        return [target["health"] for target in self.get("targets")["activeTargets"]]

    def is_up(self) -> bool:
        with suppress(httpx.TransportError):
            ready = httpx.get(f"http://127.0.0.1:{self.port}/-/ready")
            return ready.status_code == httpx.codes.OK and self.states() == ["up"] * 3
        return False

    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture
def own(model_folder: Path, tmp_path: Path) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path) as processes:
        yield processes


@pytest.fixture
def prometheus(own: Processes, tmp_path: Path) -> Iterator[Prometheus]:
    port = free_port()
    flags = [f"--config.file={_config(own, tmp_path)}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    flags.append(f"--web.listen-address=127.0.0.1:{port}")
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(30)


def _config(own: Processes, folder: Path) -> Path:
    """The deployment's own, with addresses for names and seconds for minutes."""
    ports = {
        "router": own.router.port,
        "prefill": own.prefill[0].metrics_port,
        "decode": own.decode[0].metrics_port,
    }
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "1s"
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_targets_are_up_queries_have_data_and_an_alert_fires(own: Processes, prometheus: Prometheus) -> None:
    eventually(prometheus.is_up, LIMIT_S)
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in alert_rules()}
    for query in dashboard_queries():
        concrete = query.replace("$__rate_interval", "1m")

        def has_data(concrete: str = concrete) -> bool:
            own.complete(PROMPT, max_tokens=8)
            return prometheus.has_data(concrete)

        try:
            eventually(has_data, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"no data: {concrete}") from error
    assert "WorkerNotReady" not in prometheus.firing()
    own.decode[0].kill()
    eventually(lambda: "WorkerNotReady" in prometheus.firing(), LIMIT_S)
