"""Settings of `adjust bench runtime`, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from adjust_dlm.bench.shapes import SHAPES
from adjust_dlm.checks import Checked, Count, NotNegative, PositiveOrInf, TopP, Whole, require
from adjust_dlm.hub import BASES
from adjust_dlm.options import VerifiedOptions
from adjust_dlm.types import DEFAULT_BASE, OrderRule, Quantize, check_placement
from adjust_dlm.variants import read_variant

Form = Literal["eager", "fast", "compiled", "public"]
COMPONENTS = "components"  # in the place of a decoder


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Checked):
    """Settings of `adjust bench runtime`: every combination of forms, L, B, K and decoders is a cell, in that order.

    Attributes:
        base: a base, or a shape with random weights: dream-7b-shape, llada-8b-shape, small-shape, tiny-shape.
        sampler: folder or Hub id of g; the base's own by default, else a random one, as with a shape (in that folder's
            form).
        partner: autoregressive model for decoders that ask one; the base's own by default.
        output: folder of runtime.csv and runtime.md, which grow cell by cell.
        decoders: decoders with settings, such as "adjust:sparse=true", and "components".
        tokens_per_step: K.
        batch_sizes: B; by default 8, 32 and 1 on a card, 1 on a CPU.
        new_tokens: L; by default 128 on a card, 64 on a CPU.
        forms: buffers and CUDA graphs (fast), the released code's loop (public), reference (eager), compiled layers.
        prompt_tokens: length of every prompt.
        temperature: 0 is argmax.
        top_p: nucleus mass.
        order: rule of the next position; the base's own by default. confidence has no kernels at T > 0.
        tokens_per_wait: what a row of `verified` is assumed to commit a round; a round is timed then, not a decode.
        suppress_eos: never end a text, so that every row is full; without it only tokens before the end count.
        seed: of every decode.
        runs: timed decodes of a cell at most, after a warm-up that does not count.
        seconds: for everything, loading included; cells that do not fit are listed as left out.
        cell_seconds: no timed decode of a cell begins later; with warm-up a cell has three times as long, a compiled
            one all that is left.
        layers: of a shape, instead of its own number; 0 keeps that.
        block: S, for a shape that writes in blocks (eager and fast form).
        device: auto, cpu, cuda or cuda:N.
        quantize: int8 or fp8 weights of linear layers, or fp8-dynamic, which multiplies in fp8, too.
    """

    bases: ClassVar = (*BASES, *SHAPES)
    base: str = DEFAULT_BASE
    sampler: str | None = None
    partner: str | None = None
    output: str = "runs/runtime"
    decoders: tuple[str, ...] = ("parallel", "adjust", COMPONENTS, "joint")
    tokens_per_step: tuple[Count, ...] = (4,)
    batch_sizes: tuple[Count, ...] = ()
    new_tokens: tuple[Count, ...] = ()
    forms: tuple[Form, ...] = ("fast", "eager")
    prompt_tokens: Count = 8
    temperature: NotNegative = 1.0
    top_p: TopP = 1.0
    order: OrderRule | None = None
    tokens_per_wait: float | None = None
    suppress_eos: bool = True
    seed: int = 0
    runs: Count = 3
    seconds: PositiveOrInf = 300.0
    cell_seconds: PositiveOrInf = 10.0
    layers: Whole = 0
    block: Count | None = None
    device: str = "auto"
    quantize: Quantize | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        said = self.tokens_per_wait
        for decoder in (decoder for decoder in self.decoders if decoder != COMPONENTS):
            name, _, options = read_variant(decoder)
            if said is not None and name == "verified":
                most = VerifiedOptions(**options).depth
                require(1 <= said <= most, f"tokens_per_wait is {said:g}; {decoder} commits 1 to {most} tokens a round")
        for name in ("layers", "block"):
            good = not getattr(self, name) or self.base in SHAPES
            require(good, f"{name} can be set for {', '.join(SHAPES)}, not {self.base!r}")
        check_placement(self.quantize, None)
