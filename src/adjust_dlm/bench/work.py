"""Arithmetic and traffic of passes, counted from the shapes: what a time is compared with.

Arithmetic is that of matrices and attention, a multiplication and an addition being two operations. Traffic is the
least there can be: weights once, what a part takes and gives once. Neither asks how a part is really computed, so a
form that leaves something out shows a larger share of its ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from adjust_dlm.bases import Base
from adjust_dlm.bases.fp8 import Fp8Linear
from adjust_dlm.bases.mask_lora import MaskLora
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bench.clock import Ceilings
from adjust_dlm.decoders.machinery.cache import no_further
from adjust_dlm.sampler import Sampler, layer_shape
from adjust_dlm.types import CERTAINTY, DecodeConfig
from adjust_dlm.variants import Variant


@dataclass(frozen=True)
class Work:
    """FLOP and bytes of one part.

    Attributes:
        flops: all of them.
        bytes: read and written.
        fp8: FLOP of products in fp8, among all.
    """

    flops: float
    bytes: float
    fp8: float = 0.0

    def arithmetic(self, most: Ceilings) -> float:
        """Seconds that its FLOP take at least, each kind at its own ceiling."""
        return (self.flops - self.fp8) / most.flops + self.fp8 / (most.fp8 or most.flops)

    def floor(self, most: Ceilings) -> float:
        """Seconds that it takes at least: the roofline."""
        return max(self.arithmetic(most), self.bytes / most.bytes)


def layer_flops(shape: Shape, length: int, pairs: int | None = None) -> float:
    """Of one layer on one canvas; `pairs` of a query and a key that it sees, by default of all with all."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    matrices = shape.hidden_size * (2 * queries + 2 * keys) + 3 * shape.hidden_size * shape.intermediate_size
    return float(2 * length * matrices + 4 * (length * length if pairs is None else pairs) * queries)


def weight_bytes(module: nn.Module, kind: str | None = None) -> float:
    """Of its linear layers, one byte a weight where they are quantized, and of adapters of masks."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    alone = [w.nbytes for part in module.modules() if isinstance(part, MaskLora) for w in part.parameters()]
    plain = sum(float(x.in_features * x.out_features * (1 if kind else x.weight.element_size())) for x in linear)
    return plain + sum(alone)


def base_work(base: Base, rows: int, length: int, pairs: int | None = None) -> Work:
    """One base pass over `rows` canvases of `length` columns; features are states that it gives.

    Kept keys are not among the bytes.
    """
    shape = Shape.of(base.layer_config)
    states = (2 + len(base.keep)) * rows * length * base.width * base.dtype.itemsize
    body: nn.Module = base.model  # type: ignore[attr-defined]
    small = sum(part.weight.numel() for part in body.modules() if isinstance(part, Fp8Linear))
    adapters = [part for part in body.modules() if isinstance(part, MaskLora) and shape.lora_rank is not None]
    alone = sum(weight.numel() for part in adapters for weight in part.parameters())
    flops = shape.num_hidden_layers * layer_flops(shape, length, pairs) + 2.0 * length * alone
    return Work(rows * flops, weight_bytes(body, base.quantized) + states, 2.0 * rows * length * small)


def sampler_work(base: Base, sampler: Sampler, rows: int, length: int, pairs: int | None = None) -> Work:
    """One step of g, forward, with features among what it takes."""
    states, shape = (1 + sampler.states) * length * base.width, layer_shape(sampler.config, Shape.of(base.layer_config))
    mix = 2 * length * sampler.mix.in_features * sampler.mix.out_features
    flops = float(sampler.config.layers * layer_flops(shape, length, pairs) + mix)
    return Work(rows * flops, weight_bytes(sampler) + rows * states * base.dtype.itemsize)


def head_work(base: Base, rows: int) -> Work:
    """W on some rows, and their logits read once more for scores and draw."""
    width, vocabulary = base.width, base.spec.vocab_size
    traffic = vocabulary * width + rows * width + 2 * rows * vocabulary
    return Work(2.0 * rows * width * vocabulary, float(traffic * base.dtype.itemsize))


def open_counts(config: DecodeConfig, decoder: str, size: int | None, prompt: int) -> Iterator[tuple[int, list[int]]]:
    """Of every round on one canvas with no text that ends early: its block's first column, and rows scored by commits.

    Parallel decoding scores once for all commits of its round.
    """
    width, last = config.block_length or size or config.max_new_tokens, prompt + config.max_new_tokens
    for first in range(prompt if size is None else prompt - prompt % width, last, width):
        left = min(first + width, last) - max(first, prompt)
        while left:
            most = 1 if decoder == "joint" else config.tokens_per_step
            most = min(most, left, config.candidates + 1 if config.candidates else left)
            wide = most if config.candidates is None else config.candidates + 1 if config.candidates else left
            later = [min(left, wide) - k for k in range(1, most)]
            yield first, [left] if decoder == "parallel" else [left, *later]
            left -= most


def decode_work(
    base: Base, sampler: Sampler | None, variant: Variant, config: DecodeConfig, rows: int, prompt: int
) -> list[Work] | None:
    """Every part of a decode of `rows` canvases; None for decoders whose passes depend on what they write.

    Nor are steps counted that leave out some of the arithmetic: sparse ones, and of a causal base all but joint's. A
    canvas in blocks counts to its last edge.
    """
    base, config = no_further(base, config, 1) if variant.name == "joint" else (base, config)
    size = base.spec.block
    other = config.schedule != "exact" or config.cache_period or variant.options.get("sparse")
    other = other or (variant.name != "joint" and base.spec.causal)
    if other or variant.name not in ("joint", "parallel", "adjust"):
        return None
    parts, read, read_by_g = list[Work](), 0, 0  # columns whose keys are final
    looks, most = (config.order or base.spec.order) in CERTAINTY, config.tokens_per_step
    if variant.name == "adjust" and sampler is not None:
        base = sampler.on(base)

    def seen(at: int, read: int) -> tuple[int, int, int]:
        """What stands before the open block, and what a pass computes: columns and the pairs of their attention."""
        if size is None:
            return 0, prompt + config.max_new_tokens, (prompt + config.max_new_tokens) ** 2
        done, now = read // size, at // size
        edge = now + (size > 1 or not base.lag)  # of one token, the open block is none of a pass
        return now * size, (edge - done) * size, size**2 * (edge * (edge + 1) - done * (done + 1)) // 2

    for at, scored in open_counts(config, variant.name, size, prompt):
        read, *columns = seen(at, read)
        parts.append(base_work(base, rows, *columns))
        for k, count in enumerate(scored):
            if k and sampler is not None:
                read_by_g, *columns = seen(at, read_by_g)
                parts.append(sampler_work(base, sampler, rows, *columns))
            drawn = min(count, most) if variant.name == "parallel" else 1
            parts.append(head_work(base, rows * (count if looks else drawn)))
    return parts


def public_work(base: Base, sampler: Sampler | None, config: DecodeConfig, rows: int, prompt: int) -> list[Work]:
    """Of `public_loop`: the head on all rows, K steps of g a round, the last of which is for nothing."""
    length, rounds = prompt + config.max_new_tokens, -(-config.max_new_tokens // config.tokens_per_step)
    seen = base if sampler is None else sampler.on(base)
    full = head_work(seen, rows * length)
    steps = [] if sampler is None else [sampler_work(seen, sampler, rows, length), full] * config.max_new_tokens
    return [base_work(seen, rows, length), full] * rounds + steps
