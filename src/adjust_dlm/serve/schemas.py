"""Bodies of requests, strict: a parameter that would change the answer and is not served is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from adjust_dlm.serve.errors import ApiError
from adjust_dlm.types import OrderRule

MOST_CHOICES = 128
MOST = 1_000_000  # of any count; far beyond every context
Count = Annotated[int, Field(ge=1, le=MOST)]
Id = Annotated[int, Field(ge=0, le=MOST)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(min_length=1)]

IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
# What else OpenAI's servers know, and the values that change nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,), "top_logprobs": (), "logit_bias": ({},), "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0), "echo": (False,), "suffix": ("",), "best_of": (1,), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none",), "verbosity": (), "web_search_options": (),
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(_Strict):
    """What every request may say about drawing."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MOST)
    order: OrderRule | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    decoder: str | None = None
    decoder_options: dict[str, bool | int | float | str | list[int] | None] | None = None
    tokens_per_step: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        out = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
        for name in _UNSERVED.keys() & out.keys():
            value = out.pop(name)
            if not any(type(value) is type(known) and value == known for known in _UNSERVED[name]):
                raise ApiError(400, f"{name} is not served; leave it out", param=name, code="unsupported_parameter")
        return out


class Generation(Sampling):
    """Text behind a prompt."""

    max_tokens: int | None = Field(None, ge=1)
    block_length: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionAsk(Generation):
    """Body of /v1/completions; without a prompt it is text from the start token alone."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
        | None
    ) = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, body: Any) -> Any:
        """Answers come back with empty fields in them; names are not part of any template."""
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if key != "name" and value not in (None, [])}

    def plain(self) -> dict[str, str]:
        """As a chat template wants it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatAsk(Generation):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class InfillAsk(Sampling):
    """Body of /v1/infill: parts of a text, and how many tokens go between each two of them."""

    parts: list[str] = Field(min_length=2)
    gaps: list[Count] = Field(min_length=1)


class CanvasAsk(Generation):
    """Body of /v1/canvas: a prompt, messages, or parts and gaps; the answer is always a stream."""

    prompt: Text | Annotated[list[Id], Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    parts: Annotated[list[str], Field(min_length=2)] | None = None
    gaps: Annotated[list[Count], Field(min_length=1)] | None = None
    nll: bool | None = None


class ErrorBody(BaseModel):
    """Body of every answer that is no success: OpenAI's error object, with message, type, param and code."""

    error: dict[Literal["message", "type", "param", "code"], str | None]
