"""``pdserve up``, ``pdserve doctor``, ``pdserve fetch``: the subcommands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pdserve import logs
from pdserve.cli import up
from pdserve.errors import ConfigError
from pdserve.model.embedded import resolve_model
from pdserve.version import VERSION

USAGE = """\
usage: pdserve up [--help] [flags]    serve on this machine: one router, its prefill and decode workers
       pdserve doctor [--help] [flags]
                                      say what is wrong with this host, or with a deployment (--url)
       pdserve fetch [MODEL]          get a model (default: the embedded one) and print its folder
       pdserve --version

The programs can also be started one by one: pdserve-router, pdserve-prefill, pdserve-decode."""


def main() -> int:
    try:
        return _run(sys.argv[1:])
    except ConfigError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["up", *flags]:
            return up.main(flags, os.environ)
        case ["doctor", *flags]:
            from pdserve.cli.doctor import main as doctor

            return doctor.main(flags, os.environ)
        case ["fetch"]:
            _fetch(None)
        case ["fetch", model] if not model.startswith("-"):
            _fetch(model)
        case ["--version"]:
            print(f"pdserve {VERSION}")
        case ["--help"] | ["-h"]:
            print(USAGE)
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


def _fetch(model: str | None) -> None:
    logs.configure("info")
    print(resolve_model(model))
