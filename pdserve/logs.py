"""One line per event on stderr: time, level, module, then ``event key=value``."""

from __future__ import annotations

import logging
import sys

from pdserve.errors import ConfigError


def configure(level: str) -> None:
    """For ``main`` functions. Raises ``ConfigError`` for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level {level!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for chatty in ("httpx", "urllib3", "filelock", "transformers", "asyncio"):
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
