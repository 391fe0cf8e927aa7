"""The settings of ``pdserve doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr

from pdserve.config import ProgramSettings


class DoctorSettings(ProgramSettings):
    """Checks this host, or with --url a running deployment; with --json in a form for scripts.

    Exit status: 0 fine, 1 faults, 2 wrong usage.
    """

    program: ClassVar[str] = "doctor"
    url: str | None = Field(
        None,
        pattern="^https?://",
        description="router of the deployment to check, e.g. http://127.0.0.1:8000",
    )
    api_key: SecretStr | None = Field(None, description="of the router; PDSERVE_API_KEY")
    secret: SecretStr | None = Field(None, description="shared by all parts")
    model: Path | None = Field(None, description="model folder: does it fit in this host's memory?")

    @classmethod
    def command(cls) -> str:
        return "pdserve doctor"
