"""What a model folder says about itself, read as JSON: no torch, no transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """``max_context_tokens``: prompt and output together."""

    path: Path
    name: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    tokenizer_path: Path
    chat_template: str | None
    special_tokens: dict[str, str]


def read_model_card(path: Path) -> ModelCard:
    """Raises ``ConfigError`` that names the file that is missing or wrong."""
    config = _read_json(path / "config.json")
    config = config.get("text_config", config)
    tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
    generation_config = _read_json(path / "generation_config.json", optional=True)
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ConfigError(f"{tokenizer_path} is missing: the router needs a fast tokenizer's file")
    eos = generation_config.get("eos_token_id", config.get("eos_token_id"))
    return ModelCard(
        path=path,
        name=path.name,
        vocab_size=_integer(config, "vocab_size", path),
        max_context_tokens=_integer(config, "max_position_embeddings", path),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
        bos_token_id=config.get("bos_token_id"),
        tokenizer_path=tokenizer_path,
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A file of its own, a string, or a list of named templates of which ``default`` counts."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    values = {name: tokenizer_config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _integer(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"{path / 'config.json'} has no {key}")
    return value


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: is {file.parent} a model folder?") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return content
