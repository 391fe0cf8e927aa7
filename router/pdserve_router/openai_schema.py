"""The JSON that clients send, as pydantic models. Wire types only: ``parse`` makes domain types.

Strict where a wrong type would be guessed at (a boolean is no token id), open for fields we do
not know: they are accepted and logged, as other servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

TokenId = Annotated[StrictInt, Field(ge=0)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=4)
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: StrictBool = False


class SamplingFields(BaseModel):
    """What both endpoints take. Bounds are OpenAI's; the last seven fields are extensions."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: StrictInt = Field(1, ge=1, le=128)
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=300)
    seed: StrictInt | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stops | None = None
    user: str | None = None
    top_k: StrictInt | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: StrictInt | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: StrictBool = False
    timing: StrictBool = False  # adds a `pdserve` block to the answer


Prompt = StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]


class CompletionRequest(SamplingFields):
    prompt: Prompt
    echo: StrictBool = False
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    best_of: StrictInt | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: StrictStr
    content: StrictStr | list[TextPart] | None = None

    def flat(self) -> dict[str, Any]:
        """For the chat template: content parts joined, the rest as it came."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: StrictStr


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
