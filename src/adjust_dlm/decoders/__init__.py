"""Every decoder behind one call. A new one is a line of `variants.DECODERS`, and a function in a file of its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from adjust_dlm.bases import Base, Partner
from adjust_dlm.checks import Count, require, require_value
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.machinery.cache import no_further, with_cache, with_sampler_cache
from adjust_dlm.decoders.machinery.canvas import Canvas as Canvas
from adjust_dlm.sampler import Sampler, require_same_base
from adjust_dlm.types import DecodeConfig, DecodeResult
from adjust_dlm.variants import DECODERS as DECODERS
from adjust_dlm.variants import Decoder as Decoder
from adjust_dlm.variants import build_options, split_settings
from adjust_dlm.variants import read_variant as read_variant

_BATCHES = 8  # rows of a group of `decode_many`, in batches
_NEAR = 0.8  # length of a group's shortest canvas over that of its longest, to which all are padded
for _name in [name for name, entry in DECODERS.items() if entry.run is None]:
    DECODERS[_name] = replace(DECODERS[_name], run=getattr(import_module(f"adjust_dlm.decoders.{_name}"), _name))


class Plan(NamedTuple):
    """A decoder with its helpers and settings, all checked.

    Attributes:
        base: what its canvases are made for; a twin of the given one where a sampler wants more states.
        config: settings of its canvases.
        own: the decoder's own options, one object or nothing.
        run: fills a canvas.
    """

    base: Base
    config: DecodeConfig
    own: list[Any]
    run: Callable[[Canvas], None]

    def require_begun(self, prompts: Sequence[Any]) -> None:
        """Raises InputError for a prompt whose first mask nothing scores."""
        spec, by_token = self.base.spec, self.base.spec.block == 1 and self.base.lag
        good = not by_token or all(not isinstance(one, list) or one[:1] not in ([], [spec.mask_id]) for one in prompts)
        said = f"a prompt is empty, or begins with a mask; base {spec.name!r} scores a token by the one before it"
        require(good, f"{said}: give at least one")


def make_plan(
    base: Base, config: DecodeConfig, *, decoder: str, sampler: Any = None, partner: Partner | None = None,
    **options: Any,
) -> Plan:  # fmt: skip
    """Everything that can be refused before there is a canvas; see `decode`.

    Raises:
        InputError: unknown decoder or option, missing sampler or partner, or a setting that it does not know.
    """
    own = build_options(decoder, options)
    entry = DECODERS[decoder]
    hint = "take joint, since it writes one token a pass" if base.spec.block == 1 else "train one with `adjust train`"
    require(
        not entry.needs_sampler or sampler is not None,
        f"decoder {decoder!r} needs a sampler for base {base.spec.name!r}: {hint}",
    )
    require(
        not entry.needs_partner or partner is not None,
        f"decoder {decoder!r} needs an autoregressive partner of base {base.spec.name!r}: see `load_partner`",
    )
    able = [name for name, known in DECODERS.items() if known.takes_candidates]
    require(
        not config.candidates or entry.takes_candidates or decoder == "joint",
        f"candidates is {config.candidates}; of the decoders only {', '.join(able)} know them, {decoder!r} does not",
    )
    require(
        base.spec.block is None or config.cache_period is None,
        f"cache_period is {config.cache_period}; base {base.spec.name!r} has blocks and an exact cache, always on",
    )
    if decoder == "joint":
        config = config.but(tokens_per_step=1, schedule="exact")
    # As many masks as commits before the next pass; `verified` drafts from the states that are left of the last one.
    counted = config.tokens_per_step if decoder in ("joint", "parallel", "adjust") else None
    base, config = no_further(base, config, 2 * own[0].depth - 1 if decoder == "verified" else counted)
    if entry.needs_sampler and isinstance(sampler, Sampler):
        require_same_base("the sampler", sampler.base_fingerprint, base)
        base = sampler.on(base)

    def run(canvas: Canvas) -> None:
        helpers = [with_sampler_cache(sampler)] if entry.needs_sampler else []
        if entry.needs_partner and partner is not None:
            partner.require_start(canvas)
            helpers.append(partner)
        entry.run(with_cache(base, config), *helpers, canvas, *own)

    return Plan(base, config, own, run)


@torch.no_grad()
def decode(
    base: Base, prompts: list[list[int]], config: DecodeConfig, *, decoder: str = "adjust", sampler: Any = None,
    partner: Partner | None = None, rows: list[int] | None = None, watch: Callable[[Canvas], None] | None = None,
    eager: bool | None = None, slots: int | None = None, **options: Any,
) -> DecodeResult:  # fmt: skip
    """Decodes a batch of token prompts; each row's result is what it would be alone.

    Args:
        base: the frozen model.
        prompts: token ids of each row (see `Base.encode`); masks inside them are filled in too.
        config: all settings; `joint` is one token a pass, whatever `tokens_per_step` and `schedule` say.
        decoder: a name in `DECODERS`.
        sampler: g, for decoders that need it.
        partner: autoregressive model, for decoders that need one (`load_partner`).
        rows: global row ids, 0..B-1 unless given; with the seed they decide every random number.
        watch: called with the canvas after every commit.
        eager: True runs the reference decoders; False their fast form wherever there is one (`decoders/fast`); None
            that on CUDA, and says once where there is none.
        slots: rows of a pass in the fast form; further rows take the place of those that are done. By default all.
        options: settings that only this decoder has, such as `tau=` of `threshold`.

    Raises:
        InputError: unknown decoder or option, missing sampler or partner, a sampler of another base, or a canvas that
            does not fit the base.
        FloatingPointError: the base, its sampler or its partner gave NaN or infinite logits.
    """
    require(bool(prompts), "no prompts: give at least one (an empty list of ids is a prompt)")
    require_value("slots", slots, Count | None)
    plan = make_plan(base, config, decoder=decoder, sampler=sampler, partner=partner, **options)
    plan.require_begun(prompts)
    started = time.perf_counter()
    canvas = Canvas(plan.base, prompts, plan.config, rows=rows)
    canvas.watch = watch
    wanted = fast.wanted(base, eager)
    reason = fast.why_not(plan.base, decoder, plan.config, sampler, watch) if wanted else None
    if wanted and reason is None:
        own = plan.own[0] if plan.own else None
        fast.run_fast(base, sampler, canvas, decoder=decoder, options=own, slots=slots)
    else:
        if reason is not None:
            fast.log_fallback(reason)
        plan.run(canvas)
    if canvas.open:
        raise RuntimeError(f"decoder {decoder!r} left {int(canvas.masked_BL.sum())} masks on the canvas")
    of_canvas = {field.name: getattr(canvas, field.name) for field in fields(DecodeResult)[:-2]}  # rows and config
    return DecodeResult(**of_canvas, decoder=decoder, seconds=time.perf_counter() - started)


def takes_fast(
    base: Base, config: DecodeConfig, *, decoder: str, sampler: Any = None, eager: bool | None = None
) -> bool:
    """Whether `decode` with these arguments takes the fast form, whose numbers are the reference's up to rounding."""
    return fast.wanted(base, eager) and fast.why_not(base, decoder, config, sampler, None) is None


def decode_many(
    base: Base, prompts: Sequence[list[int]], config: DecodeConfig, *, batch_size: int,
    rows: Sequence[int] | None = None, decoder: str = "adjust", sampler: Any = None, eager: bool | None = None,
    **more: Any,
) -> Iterator[tuple[list[int], DecodeResult]]:  # fmt: skip
    """Decodes any number of prompts; each row is as it would be alone.

    In the fast form prompts of similar length go together, up to eight batches of them, longest first, and a row's
    place is given to the next as soon as it is done: answers of different lengths waste nothing but the end of a group.
    The reference takes one batch after another. `batch_size` are rows of a pass, `rows` their global ids (0, 1, ...
    unless given); for the rest see `decode`.

    Yields:
        Which prompts, and their rows in that order, group by group.

    Raises:
        InputError: as `decode`.
    """
    require_value("batch_size", batch_size, Count)
    rows = range(len(prompts)) if rows is None else rows
    require(len(rows) == len(prompts), f"{len(rows)} row ids for {len(prompts)} prompts; give one each")
    how: dict[str, Any] = {"decoder": decoder, "sampler": sampler, "eager": eager, **more}
    if takes_fast(base, config, decoder=decoder, sampler=sampler, eager=eager):
        groups = _groups([len(prompt) + config.max_new_tokens for prompt in prompts], batch_size)
    else:
        groups = [list(range(len(prompts))[at : at + batch_size]) for at in range(0, len(prompts), batch_size)]
    for mine in groups:
        given = [prompts[n] for n in mine]
        yield mine, decode(base, given, config, rows=[rows[n] for n in mine], slots=batch_size, **how)


def _groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Which canvases go together, longest first.

    All of a group are padded to its longest. One that is much shorter begins a new group, where the passes of the one
    before are large enough to compute more than they wait, and where all that are left would be padded by as much.
    """
    groups, longest = list[list[int]](), 0
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    for left, n in zip(range(len(order), 0, -1), order, strict=True):
        last = groups[-1] if groups else []
        large = min(len(last), batch_size) * longest >= fast.COMPACT
        shorter = lengths[n] < _NEAR * longest and left * (longest - lengths[n]) >= fast.COMPACT
        if not last or len(last) == batch_size * _BATCHES or (large and shorter):
            groups.append([n])
            longest = lengths[n]
        else:
            last.append(n)
    return groups


def generate(
    base: Base, prompt: str = "", *, decoder: str = "adjust", sampler: Any = None, partner: Partner | None = None,
    chat: bool = False, num_samples: int = 1, **settings: Any,
) -> list[str]:  # fmt: skip
    """Text in, texts out: `generate(base, "Once", sampler=g, tokens_per_step=4, temperature=0.6)`.

    Settings are fields of `DecodeConfig` and the decoder's own options.
    """
    ids = base.encode(prompt, chat=chat)
    shared, own = split_settings(settings)
    config, helpers = DecodeConfig(**shared), {"sampler": sampler, "partner": partner}
    result = decode(base, [ids] * num_samples, config, decoder=decoder, **helpers, **own)
    return [base.decode(row[-config.max_new_tokens :].tolist()) for row in result.tokens_BL]
