"""``pdserve-decode``: settings and errors. torch is loaded only once the settings are right."""

from __future__ import annotations

import os
import sys

from pdserve import logs
from pdserve.config import load
from pdserve.errors import ConfigError, UnsupportedModel
from pdserve_decode.config import DecodeSettings


def main() -> int:
    try:
        settings = load(DecodeSettings, sys.argv[1:], os.environ)
        logs.configure(settings.log_level)
        from pdserve_decode.run import run

        run(settings, os.environ)
    except (ConfigError, UnsupportedModel) as error:
        print(f"pdserve-decode: {error}", file=sys.stderr)
        return 2
    return 0
