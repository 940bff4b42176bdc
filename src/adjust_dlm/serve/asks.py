"""From a checked body to work for the engine: prompts to ids, defaults, and what does not fit."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adjust_dlm.decoders import DECODERS
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.schemas import MOST, CanvasAsk, ChatAsk, CompletionAsk, Generation, InfillAsk, Sampling
from adjust_dlm.serve.work import RowSpec, Work
from adjust_dlm.types import DecodeConfig, InputError

MOST_COMPLETIONS = 16  # of `edlm`, each a canvas of its own


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What holds where a request says nothing.

    Attributes:
        decoder, options: and its own settings.
        config: all others; of it, max_new_tokens is the default of max_tokens.
    """

    decoder: str = "adjust"
    options: Mapping[str, Any] = field(default_factory=dict)
    config: DecodeConfig = field(default_factory=lambda: DecodeConfig(tokens_per_step=4))


@dataclass(frozen=True)
class Prompt:
    """A canvas to be: given ids, with masks in gaps, and masks behind them."""

    ids: list[int]
    new: int
    spans: tuple[tuple[int, int], ...] = ()  # of gaps: first position, and the one behind the last

    @property
    def given(self) -> int:
        """Tokens that are there already."""
        return len(self.ids) - sum(end - first for first, end in self.spans)


def generation(engine: Engine, defaults: Defaults, ask: CompletionAsk | ChatAsk) -> tuple[Work, list[Prompt]]:
    """Work of /v1/completions and /v1/chat/completions. Raises ApiError."""
    wanted = ask.max_tokens
    if isinstance(ask, ChatAsk):
        wanted = _one_limit(ask)
        listed, param = [_messages(engine, ask)], "messages"
    else:
        listed, param = _prompts(engine, ask), "prompt"
    prompts = [Prompt(ids, _room(engine, defaults, ids, wanted, param)) for ids in listed]
    return _work(engine, defaults, ask, prompts), prompts


def infill(engine: Engine, defaults: Defaults, ask: InfillAsk) -> tuple[Work, list[Prompt]]:
    """Work of /v1/infill. Raises ApiError."""
    prompts = [_gaps(engine, ask.parts, ask.gaps)]
    return _work(engine, defaults, ask, prompts, infilling=True), prompts


def canvas(engine: Engine, defaults: Defaults, ask: CanvasAsk) -> tuple[Work, list[Prompt]]:
    """Work of /v1/canvas. Raises ApiError."""
    given = [name for name in ("prompt", "messages", "parts") if getattr(ask, name) is not None]
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)}: give one", param=given[-1])
    if (ask.parts is None) != (ask.gaps is None):
        raise ApiError(400, "parts and gaps come together", param="gaps")
    if ask.nll and engine.partner is None:
        raise ApiError(400, "nll needs an autoregressive partner; start the server with --load-partner", param="nll")
    if ask.parts is not None and ask.gaps is not None:
        for name in ("max_tokens", "block_length", "stop"):
            if getattr(ask, name) is not None:
                raise ApiError(400, f"{name} makes no sense with gaps; leave it out", param=name)
        prompts = [_gaps(engine, ask.parts, ask.gaps)]
        return _work(engine, defaults, ask, prompts, infilling=True), prompts
    ids = _messages(engine, ask) if ask.messages else _prompts(engine, ask)[0]
    param = "messages" if ask.messages else "prompt"
    prompts = [Prompt(ids, _room(engine, defaults, ids, ask.max_tokens, param))]
    return _work(engine, defaults, ask, prompts), prompts


# Prompts ---------------------------------------------------------------------------------------------------------


def _messages(engine: Engine, ask: ChatAsk | CanvasAsk) -> list[int]:
    try:
        ids = engine.words.encode_messages([message.plain() for message in ask.messages or []])
    except InputError as error:
        raise ApiError(400, str(error), param="messages") from error
    return _checked(engine, ids, "messages")


def _prompts(engine: Engine, ask: CompletionAsk | CanvasAsk) -> list[list[int]]:
    """Ids of each prompt; a list of numbers is one prompt."""
    given: Any = ask.prompt
    if given is None:
        return [engine.words.start()]
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    try:
        listed = [engine.words.encode(one) if isinstance(one, str) else list(one) for one in given]
    except InputError as error:
        raise ApiError(400, str(error), param="prompt") from error
    return [_checked(engine, ids, "prompt") for ids in listed]


def _gaps(engine: Engine, parts: list[str], gaps: list[int]) -> Prompt:
    if len(parts) != len(gaps) + 1:
        raise ApiError(400, f"{len(parts)} parts and {len(gaps)} gaps; a gap stands between two parts", param="gaps")
    _check_fit(engine, 0, sum(gaps), "gaps")
    ids: list[int] = []
    spans = []
    for n, part in enumerate(parts):
        try:
            ids += _checked(engine, engine.words.encode(part, first=n == 0), "parts")
        except InputError as error:
            raise ApiError(400, str(error), param="parts") from error
        if n < len(gaps):
            spans.append((len(ids), len(ids) + gaps[n]))
            ids += [engine.base.spec.mask_id] * gaps[n]
    prompt = Prompt(ids, 0, tuple(spans))
    _check_fit(engine, prompt.given, sum(gaps), "parts")
    return prompt


def _checked(engine: Engine, ids: list[int], param: str) -> list[int]:
    """Ids that a client may give: no masks, which would be filled in without a word, and none that is not there."""
    spec = engine.base.spec
    if spec.mask_id in ids:
        raise ApiError(400, "the text holds the mask token; /v1/infill takes gaps", param=param)
    wrong = [i for i in ids if not 0 <= i < spec.token_limit]
    if wrong:
        raise ApiError(400, f"token id {wrong[0]}; ids run from 0 to {spec.token_limit - 1}", param=param)
    return ids


# Lengths ---------------------------------------------------------------------------------------------------------


def _one_limit(ask: ChatAsk) -> int | None:
    old, new = ask.max_tokens, ask.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, f"max_tokens is {old} and max_completion_tokens {new}; give one", param="max_tokens")
    return new if old is None else old


def _room(engine: Engine, defaults: Defaults, ids: list[int], wanted: int | None, param: str) -> int:
    """Masks behind a prompt: as asked for; by default what the server says, less where the context ends before."""
    if wanted is None:
        wanted = max(1, min(defaults.config.max_new_tokens, engine.base.spec.context - len(ids)))
    _check_fit(engine, len(ids), wanted, param)
    return wanted


def _check_fit(engine: Engine, given: int, new: int, param: str) -> None:
    context = engine.base.spec.context
    if given + new > context:
        message = (
            f"the context is {context} tokens; the prompt has {given} and max_tokens asks for {new} more, "
            f"together {given + new}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")


# Settings --------------------------------------------------------------------------------------------------------


def _work(engine: Engine, defaults: Defaults, ask: Sampling, prompts: list[Prompt], *, infilling: bool = False) -> Work:
    decoder, options = _decoder(engine, defaults, ask)
    given = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if ask.tokens_per_step is not None and DECODERS[decoder].takes_k:
        changes["tokens_per_step"] = ask.tokens_per_step
    if infilling:  # a gap has the length that was asked for, and text behind it
        changes |= {"suppress_eos": True, "block_length": None}
    elif isinstance(ask, Generation) and ask.block_length is not None:
        changes["block_length"] = ask.block_length
    seed, n = secrets.randbits(63) if ask.seed is None else ask.seed, ask.n or 1
    stop = ask.stop if isinstance(ask, Generation) else None
    specs = [RowSpec(ids=p.ids, new=p.new, seed=seed, row=i * n + j) for i, p in enumerate(prompts) for j in range(n)]
    work = Work(
        rows=tuple(specs), decoder=decoder, config=defaults.config.but(**changes), options=options,
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()), chance=isinstance(ask, CanvasAsk),
        quiet=isinstance(ask, InfillAsk) or (isinstance(ask, CompletionAsk | ChatAsk) and not ask.stream),
    )  # fmt: skip
    _check_plan(engine, work)
    return work


def _check_plan(engine: Engine, work: Work) -> None:
    rows, most = len(work.rows), engine.limits.queue
    if rows > most:
        raise ApiError(400, f"{rows} choices in one request; this server takes at most {most}", param="n")
    try:
        engine.plan(work)
    except (InputError, TypeError) as error:
        raise ApiError(400, str(error), param="decoder_options") from error


def _decoder(engine: Engine, defaults: Defaults, ask: Sampling) -> tuple[str, dict[str, Any]]:
    """The decoder and its own settings."""
    wants = ask.adaptive is not None and ask.adaptive is not False
    plain = "adjust" if ask.adaptive is False and defaults.decoder == "adaptive" else defaults.decoder
    decoder = ask.decoder or ("adaptive" if wants else plain)
    if wants and decoder != "adaptive":
        raise ApiError(400, f"adaptive rounds are a decoder of their own, not {decoder!r}", param="adaptive")
    if decoder not in engine.decoders:
        known = ", ".join(engine.decoders)
        raise ApiError(400, f"decoder {decoder!r} is not served here; served are {known}", param="decoder")
    options = {**(defaults.options if decoder == defaults.decoder else {}), **(ask.decoder_options or {})}
    if wants and ask.adaptive is not True:
        options["gamma"] = ask.adaptive
    for name, value in options.items():
        _check_size(name, value)
    step = ask.tokens_per_step
    if step is not None and not DECODERS[decoder].takes_k and not (decoder == "joint" and step == 1):
        if decoder != "adaptive":
            raise ApiError(
                400, f"decoder {decoder!r} decides itself how many tokens a pass commits", param="tokens_per_step"
            )
        options["most"] = step
    return decoder, options


def _check_size(name: str, value: Any) -> None:
    """Refuses numbers that no machine could work off."""
    numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int | float)]
    most = MOST_COMPLETIONS if name == "completions" else MOST
    if any(not math.isfinite(number) or abs(number) > most for number in numbers):
        raise ApiError(400, f"{name} is {value!r}; numbers here go up to {most}", param="decoder_options")
