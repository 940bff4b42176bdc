"""What `adjust bench runtime` measures: cells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from adjust_dlm.decoders import DECODERS, read_variant
from adjust_dlm.decoders.fast.engine import COVERED

Form = Literal["eager", "fast", "compiled", "public"]
FORMS: tuple[Form, ...] = get_args(Form)
COMPONENTS = "components"  # in the place of a decoder


class Cell(NamedTuple):
    """One thing to time.

    Attributes:
        form: eager (the reference decoders), fast (`decoders/fast`), compiled (fast, on compiled layers) or public
            (`bench/public_loop.py`).
        decoder: a decoder with its settings (see `read_variant`), or `components`.
        tokens_per_step: K; None where the decoder has none.
        batch: B.
        new_tokens: masked positions behind the prompt.
    """

    form: Form
    decoder: str
    tokens_per_step: int | None
    batch: int
    new_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        k = f" K={self.tokens_per_step}" if self.tokens_per_step else ""
        return f"{self.form} {self.decoder}{k} B={self.batch} L={self.new_tokens}"


def cell_of(form: Form, decoder: str, k: int, batch: int, new_tokens: int) -> Cell:
    """A cell whose K is the decoder's own where it has one: joint is K = 1, a variant may name its K."""
    if decoder == COMPONENTS:
        return Cell(form, decoder, k, batch, new_tokens)
    name, settings, _ = read_variant(decoder)
    own = settings.get("tokens_per_step", k) if DECODERS[name].takes_k else None
    return Cell(form, decoder, 1 if name == "joint" else own, batch, new_tokens)


def has_form(decoder: str, form: Form) -> bool:
    """The public loop knows plain parallel and adjust; the fast form what `fast.COVERED` says."""
    if form == "public":
        return decoder in ("parallel", "adjust")
    return form == "eager" or decoder == COMPONENTS or read_variant(decoder).name in COVERED


def grid(
    forms: Sequence[Form], decoders: Sequence[str], ks: Sequence[int], batches: Sequence[int], lengths: Sequence[int]
) -> list[Cell]:
    """All combinations that exist, once each; parallel decoding before what is compared with it.

    Compiled forms come last: each change between compiled and not throws captured graphs away.
    """
    ordered = sorted(decoders, key=lambda decoder: decoder != "parallel")
    made = [
        cell_of(form, decoder, k, batch, length)
        for form, length, batch, k in itertools.product(forms, lengths, batches, ks)
        for decoder in ordered
        if has_form(decoder, form)
    ]
    return sorted(dict.fromkeys(made), key=lambda cell: cell.form == "compiled")
