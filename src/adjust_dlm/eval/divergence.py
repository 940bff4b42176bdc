"""`adjust eval divergence`: how far the text of a decoder is from the base's joint law, in nats a token."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from adjust_dlm.bases import Base, load_base
from adjust_dlm.data.prompts import open_prompts
from adjust_dlm.decoders import make_plan
from adjust_dlm.decoders.divergence import Observation, Source, observe, why_not
from adjust_dlm.eval.generation import EvalConfig, digest, open_helpers, over_ranks, place
from adjust_dlm.files import write_whole
from adjust_dlm.progress import Bar
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed
from adjust_dlm.types import DecodeConfig, OrderRule, require, require_kinds
from adjust_dlm.variants import DECODERS, build_options, read_variant
from adjust_dlm.words import title_of

log = logging.getLogger(__name__)
Line = dict[str, Any]
OF_THE_LAW = ("max_new_tokens", "suppress_eos")  # with another value a variant is measured against another law


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(EvalConfig):
    """Settings of `adjust eval divergence`.

    q_i is what a decoder drew token i from, p_i the base looked at anew on the same canvas. The sum of KL(q_i || p_i)
    over the decoder's own tokens is the KL between the laws of whole texts, exact in expectation. With `quantize` the
    law is that of the quantized base.

    Attributes:
        decoders: names or variants ("adjust:candidates=0"), at every K unless they set their own.
        n: texts of each row and source of tokens.
        temperatures: of the law. A decoder has the same unless its variant says another: "parallel:temperature=0.8".
        sources: of tokens: the decoder's "own" for KL(q || p), drawn from the "base" at its positions for KL(p || q).
        prompts: unconditional, lists, questions, corpus:DIR, or a .jsonl or .txt file.
        chat: put each prompt of a file into the chat template.
        order: which position is next; the base's own rule by default.
        suppress_eos: never end a text.
        dtype: of base and g; bf16 on a GPU and fp32 on the CPU unless given.
    """

    output: str = "runs/divergence"
    decoders: tuple[str, ...] = ("joint", "parallel", "adjust")
    n: int = 256
    temperatures: tuple[float, ...] = (1.0,)
    sources: tuple[Source, ...] = ("own", "base")
    prompts: str = "unconditional"
    chat: bool = False
    order: OrderRule | None = None
    suppress_eos: bool = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    partner = None  # no decoder that asks one can be measured

    def __post_init__(self) -> None:
        """Checks what decoding would otherwise find out late."""
        require_kinds(self)
        super().__post_init__()
        self.require_at_least(n=2)  # else there is no interval
        good = self.temperatures and all(math.isfinite(t) and t > 0 for t in self.temperatures)
        require(bool(good), f"temperatures are {self.temperatures}; give some above 0 (at 0 a law is one text)")
        require(bool(self.sources), f"sources is empty; give one or both of {', '.join(get_args(Source))}")
        for variant in self.decoders:
            for name, value in read_variant(variant).settings.items():
                require(
                    name not in OF_THE_LAW or value == getattr(self, name),
                    f"decoder {variant!r} has a {name} of its own, which is the law's too: set it for all",
                )
        require(bool(self.cells()), "decoders is empty, or tokens_per_step is empty and all take K; give at least one")

    def cells(self) -> list[tuple[float, str]]:
        """Temperature and full variant of each line."""
        found = self.at_every_k(self.decoders)
        return [(temperature, variant) for temperature in dict.fromkeys(self.temperatures) for variant in found]


def run(config: DivergenceConfig, base: Base | None = None, sampler: Any = None) -> dict[str, Any]:
    """Measures every decoder.

    Raises:
        InputError: a decoder whose law cannot be read off its commits; the reason is named.
    """
    distributed.start()
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    base = base or load_base(config.base, device=config.device, dtype=dtype, quantize=config.quantize)
    cells = {
        (temperature, variant): config.decode_config(temperature=temperature).but(**read_variant(variant).settings)
        for temperature, variant in config.cells()
    }
    for (_, variant), settings in cells.items():
        reason = reason_against(base, variant, settings, config.sources)
        require(reason is None, f"decoder {variant!r} cannot be measured: {reason}")
    helpers = open_helpers(config, base, [variant for _, variant in cells], sampler=sampler)
    for (_, variant), settings in cells.items():  # refuses now what decoding would refuse once its turn came
        name, _, options = read_variant(variant)
        needed = helpers if DECODERS[name].needs_sampler else {}
        make_plan(base, settings, decoder=name, **needed, **options)
    source = open_prompts(config.prompts, base, chat=config.chat, rows=config.n, seed=config.seed)
    source.check_fits(base, config.max_new_tokens)
    prompts = [source.ids(row) for row in range(config.n)]

    def line_of(cell: tuple[float, str]) -> Line:
        (temperature, variant), settings = cell, cells[cell]
        facts = measure(
            base, helpers, variant, prompts, settings, temperature=temperature, sources=config.sources,
            batch_size=config.batch_size, keep=Path(config.output, "kept"),
        )  # fmt: skip
        about = {"temperature": temperature, "decoder": variant, "tokens_per_step": settings.tokens_per_step}
        return about | {"tokens_per_pass": facts[config.sources[0]]["tokens_per_pass"]} | facts

    lines = over_ranks(list(cells), lambda mine: map(line_of, mine))
    compare_with_parallel(lines)
    return {"first_row": EVALUATION_ROWS, "rows": lines}


def measure(
    base: Base, helpers: Line, variant: str, prompts: Sequence[list[int]], settings: DecodeConfig, *,
    temperature: float, sources: Sequence[Source], batch_size: int, keep: Path,
) -> Line:  # fmt: skip
    """A summary of every commit for each source of tokens, and on top `kl_qp` of "own" and `kl_pq` of "base".

    The temperature is that of the law; prompt n is row EVALUATION_ROWS + n. In the folder `keep` a summary of the same
    base, g, prompts and settings is read, not measured again.
    """
    name, _, options = read_variant(variant)
    needed = helpers if DECODERS[name].needs_sampler else {}
    line: Line = {}
    for source in sources:
        kept = keep / f"{digest(base, helpers, [variant, 'law', temperature, source, prompts, asdict(settings)])}.json"
        if kept.is_file():
            line |= json.loads(kept.read_text(encoding="utf-8"))
            continue
        parts = []
        with Bar(f"{variant}, {source}", enabled=place()[0] == 0) as bar:
            for first in range(0, len(prompts), batch_size):
                given = list(prompts[first : first + batch_size])
                rows = [EVALUATION_ROWS + first + n for n in range(len(given))]
                how: Line = {"decoder": name, "temperature": temperature, "source": source, "rows": rows}
                parts.append(observe(base, given, settings, sampler=needed.get("sampler"), **how, **options))
                bar.show((first + len(given)) / len(prompts))
        summary, kl = Observation.cat(parts).summary(), {"own": "kl_qp", "base": "kl_pq"}[source]
        made = {source: summary, kl: summary[kl], f"{kl}_ci95": summary[f"{kl}_ci95"]}
        write_whole({kept: json.dumps(made) + "\n"})
        line |= made
        said = (temperature, variant, settings.tokens_per_step, title_of(kl), made[kl])
        log.info("T=%g %s, K=%d: %s %.4f nats a token", *said)
    return line


def reason_against(base: Base, variant: str, settings: DecodeConfig, sources: Sequence[Source]) -> str | None:
    """`why_not` of a variant."""
    name, _, options = read_variant(variant)
    own = build_options(name, options)
    return why_not(base, name, settings, own[0] if own else None, tuple(sources))


def compare_with_parallel(lines: list[Line]) -> None:
    """How much less than parallel decoding's at the same T and K: a share, with the interval of a ratio of means.

    At K = 1 both are joint decoding, and a decoder that decides for itself how many tokens to commit has no K.
    """

    def k_of(line: Line) -> int:
        name, settings, _ = read_variant(line["decoder"])
        k = int(line["tokens_per_step"] or settings.get("tokens_per_step", 0))
        return k if k > 1 and DECODERS[name].takes_k else 0

    plain = [line for line in lines if line["decoder"] in ("parallel", f"parallel:tokens_per_step={k_of(line)}")]
    parallel = {(line["temperature"], k_of(line)): line for line in plain}
    for line in lines:
        other = parallel.get((line["temperature"], k_of(line)), line)
        for kl in ("kl_qp", "kl_pq"):
            if other is not line and line.get(kl) and other.get(kl):
                ratio = line[kl] / other[kl]
                half = ratio * math.hypot(line[f"{kl}_ci95"] / line[kl], other[f"{kl}_ci95"] / other[kl])
                line |= {f"{kl}_below_parallel": 1 - ratio, f"{kl}_below_parallel_ci95": half}
