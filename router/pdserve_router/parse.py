"""Client JSON to a checked ``GenerationRequest``, once, at the edge.

Every refusal is a ``RequestError`` that names the field and says what would be right.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from pdserve.errors import ContextTooLong, ModelNotFound, RequestError
from pdserve.model_card import ModelCard
from pdserve.sampling import SamplingParams
from pdserve_router.chat_template import ChatTemplate
from pdserve_router.openai_schema import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest, SamplingFields
from pdserve_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 256
MAX_TOKEN_ID_DIGITS = 10

Schema = TypeVar("Schema", bound=SamplingFields)


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
        self._check_common(schema)
        if schema.best_of is not None and schema.best_of != schema.n:
            raise RequestError("best_of is supported only when it equals n", param="best_of")
        if schema.echo and schema.logprobs is not None:
            raise RequestError("echo cannot be combined with logprobs", param="echo")
        prompts = self._prompts(schema)
        sampling = self._sampling(
            schema,
            max_tokens=_output_budget(
                prompts,
                schema.max_tokens or DEFAULT_COMPLETION_TOKENS,
                max_context_tokens,
                param="prompt",
            ),
            num_logprobs=schema.logprobs,
        )
        return _request(schema, prompts, sampling, is_chat=False)

    def chat(self, body: bytes, max_context_tokens: int) -> GenerationRequest:
        schema = _validate(ChatRequest, body)
        self._check_common(schema)
        _check_chat_fields(schema)
        text = self._chat_template.render([message.model_dump() for message in schema.messages])
        prompts = (Prompt(self._encode(text, param="messages", add_special_tokens=False)),)
        sampling = self._sampling(
            schema,
            max_tokens=_output_budget(
                prompts,
                schema.max_completion_tokens or schema.max_tokens,
                max_context_tokens,
                param="messages",
            ),
            num_logprobs=(schema.top_logprobs or 0) if schema.logprobs else None,
        )
        return _request(schema, prompts, sampling, is_chat=True)

    def check_model(self, name: str) -> None:
        """Raises ``ModelNotFound``: answering under an asked name with another model would be a lie."""
        if name != self._model_name:
            raise ModelNotFound(
                f"the model {name[:200]!r} does not exist; this server has {self._model_name!r}",
                param="model",
            )

    def _check_common(self, schema: SamplingFields) -> None:
        self.check_model(schema.model)
        values = dict(schema)
        for name in UNSUPPORTED_FIELDS:
            if values.get(name) is not None:
                raise RequestError(f"{name} is not supported", param=name)
        if schema.stream_options is not None and not schema.stream:
            raise RequestError("stream_options needs stream true", param="stream_options")
        if schema.model_extra:
            logger.info("unknown_fields names=%s", [name[:40] for name in sorted(schema.model_extra)[:20]])

    # --------------------------------------------------------------- prompts

    def _prompts(self, schema: CompletionRequest) -> tuple[Prompt, ...]:
        parts = _prompt_parts(schema.prompt)
        if len(parts) * schema.n > MAX_CHOICES:
            raise RequestError(
                f"{len(parts)} prompts times n {schema.n} is over {MAX_CHOICES} choices", param="n"
            )
        return tuple(self._prompt(part, echo=schema.echo) for part in parts)

    def _prompt(self, part: str | list[int], *, echo: bool) -> Prompt:
        if isinstance(part, str):
            return Prompt(self._encode(part, param="prompt", add_special_tokens=True), part if echo else "")
        self._check_token_ids(part, param="prompt")
        return Prompt(part, self._tokenizer.decode(part) if echo else "")

    def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        if not _is_unicode(text):
            raise RequestError("the text has half of a surrogate pair", param=param)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty", param=param)
        return token_ids

    def _check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        wrong = next((it for it in token_ids if not 0 <= it < self._card.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} is outside the vocabulary of {self._card.vocab_size}", param=param
            )

    # -------------------------------------------------------------- sampling

    def _sampling(
        self, schema: SamplingFields, *, max_tokens: int, num_logprobs: int | None
    ) -> SamplingParams:
        min_tokens = schema.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens {min_tokens} is over the {max_tokens} tokens that may be generated",
                param="min_tokens",
            )
        self._check_token_ids(schema.stop_token_ids or (), param="stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
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
        for key in bias:
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_ID_DIGITS):
                raise RequestError(f"logit_bias key {key[:50]!r} is not a token id", param="logit_bias")
        checked = {int(key): value for key, value in bias.items()}
        self._check_token_ids(list(checked), param="logit_bias")
        return checked


def _is_unicode(text: str) -> bool:
    """JSON can spell what no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prompt_parts(prompt: Any) -> list[str] | list[list[int]]:
    """One text or list of token ids per prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_prompt()
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if all(isinstance(part, str) for part in prompt):
        return prompt
    lists = [prompt] if type(prompt[0]) is int else prompt
    for part in lists:
        # By exact type: a boolean is an int to isinstance.
        if not isinstance(part, list) or any(type(token_id) is not int for token_id in part):
            raise _wrong_prompt()
        if not part:
            raise RequestError("the prompt is empty", param="prompt")
    return lists


def _wrong_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )


def _output_budget(
    prompts: Sequence[Prompt], max_tokens: int | None, max_context_tokens: int, *, param: str
) -> int:
    """Output tokens that are wanted and fit; None wants all that fit."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest >= max_context_tokens:
        raise ContextTooLong(
            f"the prompt has {longest} tokens, the context {max_context_tokens}, "
            "which must also hold the answer",
            param=param,
        )
    room = max_context_tokens - longest
    return room if max_tokens is None else min(max_tokens, room)


def _check_chat_fields(schema: ChatRequest) -> None:
    if schema.tool_choice not in (None, "none"):
        raise RequestError("tools are not supported", param="tool_choice")
    if schema.tools and schema.tool_choice != "none":
        raise RequestError("tools are not supported", param="tools")
    if schema.response_format is not None and schema.response_format.type != "text":
        raise RequestError("only response_format text is supported", param="response_format")
    if schema.top_logprobs is not None and not schema.logprobs:
        raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")


def _request(
    schema: SamplingFields, prompts: tuple[Prompt, ...], sampling: SamplingParams, *, is_chat: bool
) -> GenerationRequest:
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
        place = ".".join(str(part)[:80] for part in problem["loc"])
        raise RequestError(f"{place}: {problem['msg']}", param=field) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
