"""``pdserve doctor``: gathers facts, judges them, prints, and says by the exit status what it found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from pdserve.cli.doctor.deployment_checks import check_deployment
from pdserve.cli.doctor.deployment_facts import gather_deployment
from pdserve.cli.doctor.finding import Finding, exit_status
from pdserve.cli.doctor.host_checks import check_host
from pdserve.cli.doctor.host_facts import gather, weight_bytes
from pdserve.cli.doctor.pair_checks import check_pairs
from pdserve.cli.doctor.report import as_json, as_text
from pdserve.cli.doctor.settings import DoctorSettings
from pdserve.config import load
from pdserve.errors import ConfigError

ROUTER_PORT = 8000


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Raises ``ConfigError``."""
    settings = load(DoctorSettings, [flag for flag in argv if flag != "--json"], environment)
    findings = _host(settings.model) if settings.url is None else _deployment(settings, settings.url)
    print(as_json(findings) if "--json" in argv else as_text(findings))
    return exit_status(findings)


def _host(model: Path | None) -> list[Finding]:
    if model is not None and not weight_bytes(model):
        raise ConfigError(f"--model {model}: no folder with *.safetensors")
    return list(check_host(gather(model, ports=[ROUTER_PORT])))


def _deployment(settings: DoctorSettings, url: str) -> list[Finding]:
    if settings.model is not None:
        raise ConfigError("--model is for a host; with --url the workers say what they have")
    secret = _value(settings.secret) or ""
    facts = asyncio.run(gather_deployment(url, api_key=_value(settings.api_key), secret=secret.encode()))
    return [*check_deployment(facts), *check_pairs(facts.pairs)]


def _value(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
