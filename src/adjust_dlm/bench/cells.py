"""What `adjust bench runtime` measures: cells, and the order in which they are worth their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from adjust_dlm.decoders import DECODERS, read_variant
from adjust_dlm.decoders.fast.engine import COVERED
from adjust_dlm.types import require

Form = Literal["eager", "fast", "compiled", "public"]
FORMS: tuple[Form, ...] = get_args(Form)
COMPONENTS = "components"  # in the place of a decoder


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to time.

    Attributes:
        form: eager (the reference decoders), fast (`decoders/fast`), compiled (fast, on compiled layers) or public
            (`bench/public_loop.py`).
        decoder: a decoder with its settings (see `read_variant`), or `components`.
        tokens_per_step: K; 0 where the decoder has none.
        batch: B.
        new_tokens: masked positions behind the prompt.
    """

    form: Form
    decoder: str
    tokens_per_step: int
    batch: int
    new_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        k = f" K={self.tokens_per_step}" if self.tokens_per_step else ""
        return f"{self.form} {self.decoder}{k} B={self.batch} L={self.new_tokens}"

    @property
    def facts(self) -> dict[str, Any]:
        """As a record."""
        return asdict(self)

    @property
    def yardstick(self) -> Cell | None:
        """Parallel decoding at the same form, K, B and L; None for what is not compared with it."""
        if self.decoder == COMPONENTS or self.tokens_per_step == 0 or self.decoder == "parallel":
            return None
        return replace(self, decoder="parallel")


def cell_of(form: Form, decoder: str, k: int, batch: int, new_tokens: int) -> Cell:
    """A cell whose K is the decoder's own where it has one: joint is K = 1, a variant may name its K.

    Raises:
        InputError: a form that the decoder does not have.
    """
    if decoder == COMPONENTS:
        return Cell(form=form, decoder=decoder, tokens_per_step=k, batch=batch, new_tokens=new_tokens)
    name, settings, _ = read_variant(decoder)
    require(has_form(decoder, form), f"decoder {decoder!r} has no {form} form")
    own = settings.get("tokens_per_step", k) if DECODERS[name].takes_k else 0
    return Cell(
        form=form, decoder=decoder, tokens_per_step=1 if name == "joint" else own, batch=batch, new_tokens=new_tokens
    )


def has_form(decoder: str, form: Form) -> bool:
    """The public loop knows plain parallel and adjust; the fast form what `fast.COVERED` says."""
    if form == "public":
        return decoder in ("parallel", "adjust")
    return form == "eager" or decoder == COMPONENTS or read_variant(decoder).name in COVERED


def grid(
    forms: Sequence[Form], decoders: Sequence[str], ks: Sequence[int], batches: Sequence[int], lengths: Sequence[int]
) -> list[Cell]:
    """All combinations that exist, once each; parallel decoding before what is compared with it, compiled last."""
    ordered = sorted(decoders, key=lambda decoder: decoder != "parallel")
    made = [
        cell_of(form, decoder, k, batch, length)
        for form, length, batch, k in itertools.product(forms, lengths, batches, ks)
        for decoder in ordered
        if has_form(decoder, form)
    ]
    return by_form(dict.fromkeys(made))


def by_form(cells: Iterable[Cell]) -> list[Cell]:
    """Compiled forms last: each change between compiled and not throws captured graphs away."""
    return sorted(dict.fromkeys(cells), key=lambda cell: cell.form == "compiled")


def card_plan() -> list[Cell]:
    """What a card is asked for, the most important first: 128 new tokens, mostly K = 4."""
    sparse, near = "adjust:candidates=16,sparse=true", "adjust:candidates=16"
    wanted: list[tuple[Form, str, int, int]] = [
        *(("fast", decoder, 4, batch) for batch in (8, 32) for decoder in ("parallel", "adjust")),
        *(("fast", decoder, 4, 1) for decoder in ("parallel", "adjust")),
        *(("fast", COMPONENTS, 4, batch) for batch in (8, 32, 1)),
        *(("fast", sparse, 4, batch) for batch in (8, 32)),
        *(("public", decoder, 4, 8) for decoder in ("adjust", "parallel")),
        *(("eager", decoder, 4, 8) for decoder in ("parallel", "adjust")),
        *(("fast", near, 4, batch) for batch in (8, 32)),
        *(("fast", decoder, 8, 32) for decoder in ("parallel", "adjust")),
        *(("public", decoder, 4, 1) for decoder in ("adjust", "parallel")),
        ("public", "adjust", 4, 32),
        *(("eager", decoder, 4, 1) for decoder in ("parallel", "adjust")),
        *(("fast", decoder, 4, 1) for decoder in (sparse, near)),
        *(("fast", "joint", 1, batch) for batch in (1, 8)),
        ("public", "parallel", 4, 32),
        *(("eager", decoder, 4, 32) for decoder in ("parallel", "adjust")),
        *(("eager", COMPONENTS, 4, batch) for batch in (8, 1, 32)),
        ("fast", "joint", 1, 32),
    ]
    return [cell_of(form, decoder, k, batch, 128) for form, decoder, k, batch in wanted]


def cpu_plan() -> list[Cell]:
    """What two cores do in a few minutes: 64 new tokens of one row, and of four."""
    wanted: list[tuple[Form, str, int, int]] = [
        ("eager", "joint", 1, 1),
        *(("eager", decoder, 4, 1) for decoder in ("parallel", "adjust")),
        *(("public", decoder, 4, 1) for decoder in ("parallel", "adjust")),
        ("eager", COMPONENTS, 4, 1),
        *(("eager", decoder, k, 1) for k in (2, 8) for decoder in ("parallel", "adjust")),
        *(("fast", decoder, 4, 1) for decoder in ("parallel", "adjust")),
        *(("eager", decoder, 4, 4) for decoder in ("parallel", "adjust")),
        ("eager", "adjust:candidates=16,sparse=true", 4, 1),
    ]
    return [cell_of(form, decoder, k, batch, 64) for form, decoder, k, batch in wanted]
