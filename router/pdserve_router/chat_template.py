"""Renders the model's chat template, in a sandbox: templates come with models, not from us."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError, RequestError
from pdserve.model_card import ModelCard


class ChatTemplate:
    def __init__(self, card: ModelCard) -> None:
        """Raises ``ConfigError`` when the template itself is broken."""
        self._special_tokens = card.special_tokens
        self._name = card.name
        self._template = None
        if card.chat_template is not None:
            try:
                self._template = _environment().from_string(card.chat_template)
            except TemplateSyntaxError as error:
                raise ConfigError(f"the chat template of {card.name} is broken: {error}") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, open for the assistant's answer. Raises ``RequestError``."""
        if self._template is None:
            raise RequestError(
                f"model {self._name} has no chat template: use /v1/completions", param="messages"
            )
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now(UTC).strftime(pattern)
    return environment


def _tojson(value: object, indent: int | None = None) -> str:
    """Unlike jinja's own, without HTML escapes: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
