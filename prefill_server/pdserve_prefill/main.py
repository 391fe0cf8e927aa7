"""``pdserve-prefill``: settings and errors. torch is loaded only once the settings are right."""

from __future__ import annotations

import os
import sys

from pdserve import logs
from pdserve.config import load
from pdserve.errors import ConfigError, UnsupportedModel
from pdserve_prefill.config import PrefillSettings


def main() -> int:
    try:
        settings = load(PrefillSettings, sys.argv[1:], os.environ)
        logs.configure(settings.log_level)
        from pdserve_prefill.run import run

        run(settings, os.environ)
    except (ConfigError, UnsupportedModel) as error:
        print(f"pdserve-prefill: {error}", file=sys.stderr)
        return 2
    return 0
