"""Renders the model's chat template, in a sandbox: templates come with models, not from us.

The names a template may use are those ``transformers`` gives it, since that is what the
template was written for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
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

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt, open for the assistant's answer. Raises ``RequestError``."""
        if self._template is None:
            raise RequestError(
                f"model {self._name} has no chat template: use /v1/completions", param="messages"
            )
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable in jinja's own class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, without HTML escapes: models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
