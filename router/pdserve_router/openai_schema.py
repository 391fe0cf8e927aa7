"""The JSON that clients send, as pydantic models. Wire types only: ``parse`` makes domain types.

Strict where a wrong type would be guessed at (a boolean is no number), open for fields we do
not know: they are accepted and logged, as other servers do. Fields that would change the
answer, and that we cannot honour, are listed so that they can be refused.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

MAX_STOP_CHARACTERS = 1000


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], BeforeValidator(_as_list), Field(max_length=4)]
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: StrictBool = False


class SamplingFields(BaseModel):
    """What both endpoints take. Bounds are OpenAI's; from ``top_k`` on they are extensions."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: StrictInt = Field(1, ge=1, le=128)
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: StrictFloat | None = Field(None, ge=0, le=100)
    top_p: StrictFloat | None = Field(None, gt=0, le=1)
    presence_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    logit_bias: dict[StrictStr, Bias] | None = Field(None, max_length=300)
    seed: StrictInt | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stops | None = None
    user: StrictStr | None = None
    top_k: StrictInt | None = Field(None, ge=-1, lt=1 << 31)
    min_p: StrictFloat | None = Field(None, ge=0, le=1)
    repetition_penalty: StrictFloat | None = Field(None, gt=0, le=100)
    min_tokens: StrictInt | None = Field(None, ge=0)
    stop_token_ids: list[StrictInt] | None = Field(None, max_length=64)
    ignore_eos: StrictBool = False
    timing: StrictBool = False  # adds a `pdserve` block to the answer

    # Refused unless null.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None


class CompletionRequest(SamplingFields):
    prompt: Any  # checked by `parse`: a union of lists would name every element's every fault
    echo: StrictBool = False
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    best_of: StrictInt | None = None

    suffix: Any = None


def _joined(content: object) -> object:
    """Text parts as one text: templates are written for that."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("only parts of type text are supported")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text part needs a text")
    return "".join(texts)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: StrictStr
    content: Annotated[StrictStr, BeforeValidator(_joined)] = ""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: StrictStr


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None

    functions: Any = None
    function_call: Any = None
    audio: Any = None


UNSUPPORTED_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "prompt_logprobs",
    "use_beam_search",
    "suffix",
    "functions",
    "function_call",
    "audio",
)
