"""`adjust eval divergence`: how far the text of a decoder is from the base's joint law, in nats a token."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.data.prompts import open_prompts
from adjust_dlm.decoders import make_plan
from adjust_dlm.decoders.divergence import Observation, observe, why_not
from adjust_dlm.eval.generation import digest, open_helpers, over_ranks, place
from adjust_dlm.eval.settings import DivergenceConfig
from adjust_dlm.files import write_whole
from adjust_dlm.progress import Bar
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, DecodeConfig, TokenSource, require
from adjust_dlm.variants import DECODERS, build_options, read_variant
from adjust_dlm.words import title_of

log = logging.getLogger(__name__)
Line = dict[str, Any]


def run(config: DivergenceConfig, base: Base | None = None, sampler: Any = None) -> dict[str, Any]:
    """Measures every decoder.

    Raises:
        InputError: a decoder whose law cannot be read off its commits; the reason is named.
    """
    distributed.start()
    base = base or load_base(config.base, device=config.device, dtype=config.dtype, quantize=config.quantize)
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
        make_plan(base, settings, decoder=name, **helpers, **options)
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
    temperature: float, sources: Sequence[TokenSource], batch_size: int, keep: Path,
) -> Line:  # fmt: skip
    """A summary of every commit for each source of tokens, and on top `kl_qp` of "own" and `kl_pq` of "base".

    The temperature is that of the law; prompt n is row EVALUATION_ROWS + n. In the folder `keep` a summary of the same
    base, g, prompts and settings is read, not measured again.
    """
    name, _, options = read_variant(variant)
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
                parts.append(observe(base, given, settings, sampler=helpers.get("sampler"), **how, **options))
                bar.show((first + len(given)) / len(prompts))
        summary, kl = Observation.cat(parts).summary(), {"own": "kl_qp", "base": "kl_pq"}[source]
        made = {source: summary, kl: summary[kl], f"{kl}_ci95": summary[f"{kl}_ci95"]}
        write_whole({kept: json.dumps(made) + "\n"})
        line |= made
        said = (temperature, variant, settings.tokens_per_step, title_of(kl), made[kl])
        log.info("T=%g %s, K=%d: %s %.4f nats a token", *said)
    return line


def reason_against(base: Base, variant: str, settings: DecodeConfig, sources: Sequence[TokenSource]) -> str | None:
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
