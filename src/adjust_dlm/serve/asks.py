"""From a checked body to work for the engine: prompts to ids, defaults, and what does not fit."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adjust_dlm.data.prompts import unconditional
from adjust_dlm.options import CANVASES
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.schemas import CanvasAsk, Sampling
from adjust_dlm.serve.text import ordinary
from adjust_dlm.serve.work import RowSpec, Work
from adjust_dlm.types import DecodeConfig
from adjust_dlm.variants import DECODERS

MOST_CANVASES = 16  # that a client may have one pass look at for each row
Said = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """How a server answers, and what holds where a request says nothing.

    Attributes:
        model: its name for clients.
        decoder, options: by default, and its own settings.
        config: all other settings by default; of it, max_new_tokens is that of max_tokens.
        api_key: what clients must send as a bearer token; None lets everyone in.
        max_body: bytes.
        rate_limit: requests a minute of one address; 0 is no limit.
    """

    model: str
    decoder: str = "adjust"
    options: Mapping[str, Any] = field(default_factory=dict)
    config: DecodeConfig = field(default_factory=lambda: DecodeConfig(tokens_per_step=4))
    api_key: str | None = None
    max_body: int = 1 << 20
    rate_limit: int = 0


@dataclass(frozen=True)
class Prompt:
    """A canvas to be: given ids, with masks in gaps, and masks behind them."""

    ids: list[int]
    new: int
    spans: tuple[tuple[int, int], ...] = ()  # of gaps: first position, and the one behind the last

    @property
    def gaps(self) -> int:
        """Tokens that gaps ask for."""
        return sum(end - first for first, end in self.spans)

    @property
    def given(self) -> int:
        """Tokens that are there already."""
        return len(self.ids) - self.gaps


@ordinary()
def work_of(engine: Engine, defaults: AppConfig, ask: Sampling) -> tuple[Work, list[Prompt]]:
    """The work that a request asks for, and its prompts.

    Raises:
        ApiError: a parameter that does not fit the others, or this server.
        InputError: a prompt that the tokenizer or the chat template does not take.
    """
    said = {name: value for name, value in ask if value is not None}
    if said.get("nll") and engine.partner is None:
        raise ApiError(400, "nll needs an autoregressive partner; start the server with --load-partner", param="nll")
    decoder, options = _decoder(engine, defaults, said)
    prompts = [_gaps(engine, said)] if "parts" in said or "gaps" in said else _prompts(engine, defaults, said)
    names = ("temperature", "top_p", "top_k", "order", "block_length")
    changes: Said = {name: said[name] for name in names if name in said}
    if "tokens_per_step" in said and DECODERS[decoder].takes_k:
        changes["tokens_per_step"] = said["tokens_per_step"]
    if prompts[0].spans:  # a gap has the length that was asked for, and text behind it
        changes |= {"suppress_eos": True, "block_length": None}
    seed, n, stop = said.get("seed", secrets.randbits(53)), said.get("n", 1), said.get("stop", ())  # a double keeps 53
    rows = [RowSpec(ids=p.ids, new=p.new, seed=seed, row=i * n + j) for i, p in enumerate(prompts) for j in range(n)]
    watched = isinstance(ask, CanvasAsk)
    work = Work(
        rows=tuple(rows), decoder=decoder, config=defaults.config.but(**changes), options=options,
        stops=(stop,) if isinstance(stop, str) else tuple(stop), chance=watched,
        quiet=not (watched or said.get("stream")),
    )  # fmt: skip
    return work, prompts


# Prompts ---------------------------------------------------------------------------------------------------------


def _prompts(engine: Engine, defaults: AppConfig, said: Said) -> list[Prompt]:
    """One for each text or list of ids; a list of numbers is one prompt."""
    given, messages = said.get("prompt"), said.get("messages")
    if given is not None and messages is not None:
        raise ApiError(400, "prompt and messages: give one", param="messages")
    if messages is not None:
        listed = [engine.words.encode_messages([message.plain() for message in messages])]
    elif given is None:
        listed = [unconditional(engine.base)]
    else:
        given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        listed = [engine.words.encode(one) if isinstance(one, str) else one for one in given]
    param = "prompt" if messages is None else "messages"
    wanted = said.get("max_completion_tokens", said.get("max_tokens"))
    prompts = []
    for ids in listed:  # by default what the server says, less where the context ends before
        room = max(1, min(defaults.config.max_new_tokens, engine.base.spec.context - len(ids)))
        prompts.append(Prompt(_checked(engine, ids, param), wanted or room))
        _check_fit(engine, prompts[-1], param)
    return prompts


def _gaps(engine: Engine, said: Said) -> Prompt:
    parts, gaps = said.get("parts", []), said.get("gaps", [])
    for name in ("prompt", "messages", "max_tokens", "block_length", "stop"):
        if name in said:
            raise ApiError(400, f"{name} makes no sense with gaps; leave it out", param=name)
    if len(parts) != len(gaps) + 1:
        raise ApiError(400, f"{len(parts)} parts and {len(gaps)} gaps; a gap stands between two parts", param="gaps")
    ids: list[int] = []
    spans = []
    _check_fit(engine, Prompt([], sum(gaps)), "gaps")
    for n, part in enumerate(parts):
        ids += _checked(engine, engine.words.encode(part, first=n == 0), "parts")
        if n < len(gaps):
            spans.append((len(ids), len(ids) + gaps[n]))
            ids += [engine.base.spec.mask_id] * gaps[n]
    prompt = Prompt(ids, 0, tuple(spans))
    _check_fit(engine, prompt, "parts")
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


def _check_fit(engine: Engine, prompt: Prompt, param: str) -> None:
    context, new = engine.base.spec.context, prompt.new + prompt.gaps
    if prompt.given + new > context:
        message = (
            f"the context is {context} tokens; the prompt has {prompt.given} and max_tokens asks for {new} more, "
            f"together {prompt.given + new}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")


# Settings --------------------------------------------------------------------------------------------------------


def _decoder(engine: Engine, defaults: AppConfig, said: Said) -> tuple[str, Said]:
    """The decoder and its own settings."""
    decoder, step = said.get("decoder", defaults.decoder), said.get("tokens_per_step")
    if decoder not in engine.decoders:
        known = ", ".join(engine.decoders)
        raise ApiError(400, f"decoder {decoder!r} is not served here; served are {known}", param="decoder")
    options = {**(defaults.options if decoder == defaults.decoder else {}), **said.get("decoder_options", {})}
    if decoder == "adaptive" and step is not None:
        options["most"] = step
    elif step is not None and not DECODERS[decoder].takes_k and (decoder, step) != ("joint", 1):
        message = f"decoder {decoder!r} decides itself how many tokens a pass commits"
        raise ApiError(400, message, param="tokens_per_step")
    for name, many in said.get("decoder_options", {}).items():
        its_own = name in CANVASES and hasattr(DECODERS[decoder].options, name)
        if its_own and isinstance(many, int | float) and many > MOST_CANVASES:
            raise ApiError(400, f"{name} is {many}; it goes up to {MOST_CANVASES} here", param="decoder_options")
    return decoder, options
