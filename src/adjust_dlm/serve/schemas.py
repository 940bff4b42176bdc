"""Bodies of requests, strict: a parameter that would change the answer and is not served is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

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


def _is(*values: Any) -> Callable[[Any], bool]:
    """Equal to one of the values, and of its type (0 is not false)."""
    return lambda value: any(type(value) is type(known) and value == known for known in values)


# What else OpenAI's servers know: the values that change nothing, and what to do instead.
_UNSERVED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": (_is(False), "a position's distribution changes from pass to pass; see certainty in /v1/canvas"),
    "top_logprobs": (_is(), "a position's distribution changes from pass to pass; see certainty in /v1/canvas"),
    "logit_bias": (_is({}), "leave it out"),
    "presence_penalty": (_is(0, 0.0), "leave it out or 0"),
    "frequency_penalty": (_is(0, 0.0), "leave it out or 0"),
    "echo": (_is(False), "put the prompt in front yourself"),
    "suffix": (_is(""), "use /v1/infill, which fills gaps in a text"),
    "tools": (_is([]), "leave it out"),
    "tool_choice": (_is("none", "auto"), "leave it out"),
    "functions": (_is([]), "leave it out"),
    "function_call": (_is("none", "auto"), "leave it out"),
    "response_format": (_is({"type": "text"}), "only text is served"),
    "modalities": (_is(["text"]), "only text is served"),
    "audio": (_is(), "only text is served"),
    "prediction": (_is(), "leave it out"),
    "reasoning_effort": (_is("none"), "leave it out"),
    "verbosity": (_is(), "leave it out"),
    "web_search_options": (_is(), "leave it out"),
}


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
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    decoder: str | None = None
    decoder_options: dict[str, Any] | None = None
    tokens_per_step: Count | None = None
    adaptive: bool | Annotated[float, Field(ge=0, le=MOST)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        _check_characters(body)
        out = {key: value for key, value in body.items() if key not in IGNORED}
        for name, (changes_nothing, instead) in _UNSERVED.items():
            if name in out:
                value = out.pop(name)
                if value is not None and not changes_nothing(value):
                    _refuse(name, f"{name} is not served: {instead}")
        best_of = out.pop("best_of", None)
        if best_of is not None and best_of != (out.get("n") or 1):
            _refuse("best_of", f"best_of is {best_of!r}; only n is served, so best_of must equal it")
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
        kept = ("role", "content")
        return {key: value for key, value in body.items() if key in kept or (value not in (None, []) and key != "name")}

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


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is no success."""

    error: ErrorObject


def _check_characters(body: dict[str, Any]) -> None:
    """JSON can spell half a character (a lone surrogate), which no tokenizer takes and no answer can repeat."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise PydanticCustomError("bad_body", "the body holds {half}, half a character", {"half": half}) from None
    except RecursionError:
        raise PydanticCustomError("bad_body", "the body is nested too deeply") from None


def _refuse(param: str, message: str) -> None:
    raise PydanticCustomError("not_served", "{message}", {"message": message, "param": param})
