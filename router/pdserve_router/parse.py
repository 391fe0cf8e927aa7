"""Client JSON to a checked ``GenerationRequest``, once, at the edge.

Every refusal is a ``RequestError`` that names the field and says what would be right.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pdserve.errors import ContextTooLong, ModelNotFound, RequestError
from pdserve.model_card import ModelCard
from pdserve.sampling import SamplingParams
from pdserve_router.chat_template import ChatTemplate
from pdserve_router.openai_schema import ChatRequest, CompletionRequest, SamplingFields
from pdserve_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 256

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    echo_text: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Choice ``i * n + j`` is sample j of prompt i. ``num_logprobs`` is in the sampling."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    include_timing: bool


class RequestParser:
    def __init__(
        self, card: ModelCard, *, model_name: str, tokenizer: Tokenizer, chat_template: ChatTemplate
    ) -> None:
        self._card = card
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def completion(self, body: bytes, max_context_tokens: int) -> GenerationRequest:
        schema = _validate(CompletionRequest, body)
        self.check_model(schema.model)
        if schema.suffix is not None:
            raise RequestError("suffix is not supported", param="suffix")
        if schema.best_of is not None and schema.best_of != schema.n:
            raise RequestError("best_of is supported only when it equals n", param="best_of")
        if schema.echo and schema.logprobs is not None:
            raise RequestError("echo cannot be combined with logprobs", param="echo")
        prompts = self._prompts(schema)
        sampling = self._sampling(
            schema,
            prompts,
            max_context_tokens,
            max_tokens=schema.max_tokens or DEFAULT_COMPLETION_TOKENS,
            num_logprobs=schema.logprobs,
        )
        return self._request(schema, prompts, sampling, is_chat=False)

    def chat(self, body: bytes, max_context_tokens: int) -> GenerationRequest:
        schema = _validate(ChatRequest, body)
        self.check_model(schema.model)
        if schema.tools and schema.tool_choice != "none":
            raise RequestError("tools are not supported", param="tools")
        if schema.response_format is not None and schema.response_format.type != "text":
            raise RequestError("only response_format text is supported", param="response_format")
        if schema.top_logprobs is not None and not schema.logprobs:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        text = self._chat_template.render([message.flat() for message in schema.messages])
        prompts = (Prompt(self._tokenizer.encode(text, add_special_tokens=False)),)
        sampling = self._sampling(
            schema,
            prompts,
            max_context_tokens,
            max_tokens=schema.max_completion_tokens or schema.max_tokens,
            num_logprobs=(schema.top_logprobs or 0) if schema.logprobs else None,
        )
        return self._request(schema, prompts, sampling, is_chat=True)

    @staticmethod
    def _request(
        schema: SamplingFields, prompts: tuple[Prompt, ...], sampling: SamplingParams, *, is_chat: bool
    ) -> GenerationRequest:
        if schema.stream_options is not None and not schema.stream:
            raise RequestError("stream_options needs stream true", param="stream_options")
        if len(prompts) * schema.n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts × n {schema.n} is over {MAX_CHOICES} choices", param="n"
            )
        if schema.model_extra:
            logger.info("unknown_fields names=%s", sorted(schema.model_extra)[:20])
        return GenerationRequest(
            is_chat=is_chat,
            prompts=prompts,
            n=schema.n,
            sampling=sampling,
            stops=tuple(schema.stop or ()),
            is_stream=schema.stream,
            include_usage=bool(schema.stream_options and schema.stream_options.include_usage),
            include_timing=schema.timing,
        )

    def check_model(self, name: str) -> None:
        """Raises ``ModelNotFound``: answering under an asked name with another model would be a lie."""
        if name != self._model_name:
            raise ModelNotFound(
                f"the model {name[:200]!r} does not exist; this server has {self._model_name!r}",
                param="model",
            )

    def _prompts(self, schema: CompletionRequest) -> tuple[Prompt, ...]:
        prompt = schema.prompt
        if isinstance(prompt, str):
            return (self._text_prompt(prompt, echo=schema.echo),)
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if isinstance(prompt[0], int):
            return (self._token_prompt(prompt, echo=schema.echo),)
        return tuple(
            self._text_prompt(part, echo=schema.echo)
            if isinstance(part, str)
            else self._token_prompt(part, echo=schema.echo)
            for part in prompt
        )

    def _text_prompt(self, text: str, *, echo: bool) -> Prompt:
        token_ids = self._tokenizer.encode(text, add_special_tokens=True)
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        return Prompt(token_ids, text if echo else "")

    def _token_prompt(self, token_ids: Sequence[int], *, echo: bool) -> Prompt:
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        self._check_token_ids(token_ids, "prompt")
        return Prompt(list(token_ids), self._tokenizer.decode(token_ids) if echo else "")

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._card.vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {self._card.vocab_size}", param=param
                )

    def _sampling(
        self,
        schema: SamplingFields,
        prompts: tuple[Prompt, ...],
        max_context_tokens: int,
        *,
        max_tokens: int | None,
        num_logprobs: int | None,
    ) -> SamplingParams:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest >= max_context_tokens:
            raise ContextTooLong(
                f"the prompt has {longest} tokens, the context {max_context_tokens}, "
                "which must also hold the answer",
                param="messages" if isinstance(schema, ChatRequest) else "prompt",
            )
        room = max_context_tokens - longest
        wanted = room if max_tokens is None else min(max_tokens, room)
        if (schema.min_tokens or 0) > wanted:
            raise RequestError(
                f"min_tokens {schema.min_tokens} is over the {wanted} tokens that may be generated",
                param="min_tokens",
            )
        self._check_token_ids(schema.stop_token_ids or (), "stop_token_ids")
        return SamplingParams(
            max_tokens=wanted,
            min_tokens=schema.min_tokens or 0,
            temperature=_given(schema.temperature, 1.0),
            top_p=_given(schema.top_p, 1.0),
            top_k=max(0, schema.top_k or 0),
            min_p=_given(schema.min_p, 0.0),
            repetition_penalty=_given(schema.repetition_penalty, 1.0),
            presence_penalty=_given(schema.presence_penalty, 0.0),
            frequency_penalty=_given(schema.frequency_penalty, 0.0),
            logit_bias=self._logit_bias(schema.logit_bias or {}),
            seed=secrets.randbits(64) if schema.seed is None else schema.seed % (1 << 64),
            stop_token_ids=tuple(schema.stop_token_ids or ()),
            ignore_eos=schema.ignore_eos,
            num_logprobs=num_logprobs,
        )

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        checked = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit()):
                raise RequestError(f"logit_bias key {key[:50]!r} is not a token id", param="logit_bias")
            self._check_token_ids([int(key[:12])], "logit_bias")
            checked[int(key)] = value
        return checked


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _validate(schema: type[Schema], body: bytes) -> Schema:
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = str(problem["loc"][0]) if problem["loc"] else None
        place = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{place}: {problem['msg']}", param=field) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
