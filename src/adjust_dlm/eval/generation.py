"""Texts of many rows with what they cost: generated once, scored by anything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import adjust_dlm
from adjust_dlm.artifacts import from_pretrained
from adjust_dlm.bases import Base, Partner, cut_at_end
from adjust_dlm.bases.partner import load_partner
from adjust_dlm.decoders import decode_many, takes_fast
from adjust_dlm.files import write_whole
from adjust_dlm.progress import Bar
from adjust_dlm.sampler import Sampler, default_sampler
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, DecodeConfig, DecodeResult, require
from adjust_dlm.variants import DECODERS, read_variant


@dataclass(frozen=True)
class Generated:
    """One row of a decode.

    Attributes:
        row: its row id.
        tokens: new tokens before the first end token: what is text, and what counts as throughput.
        rounds: base passes it waited for; fewer than `base_calls` where one looks at several canvases (`verified`).
        base_calls, sampler_calls, partner_calls: passes it needed.
        seconds: its share of the wall time of its batch.
    """

    row: int
    tokens: list[int]
    rounds: int
    base_calls: int
    sampler_calls: int
    partner_calls: int
    seconds: float


def generate_rows(
    base: Base, helpers: dict[str, Any], variant: str, prompts: Sequence[list[int]], settings: DecodeConfig, *,
    first_row: int = EVALUATION_ROWS, batch_size: int = 256, keep: Path | None = None, eager: bool = False,
) -> list[Generated]:  # fmt: skip
    """Decodes every prompt with one variant of a decoder; all rows in order, on every rank, which share them.

    Prompt n is row first_row + n. The variant's settings go over those given. In the folder `keep` the texts of a call
    with the same base, models, prompts and settings are read, not made again, and a call that was stopped goes on.

    Raises:
        InputError: rows that a sampler may have been trained on.
    """
    require(
        first_row >= EVALUATION_ROWS,
        f"first_row is {first_row}; rows below {EVALUATION_ROWS} are for trajectories: g may have been trained on them",
    )
    rank, world = place()
    name, changes, options = read_variant(variant)
    config = settings.but(**changes)
    facts = [variant, first_row, prompts, asdict(config)]
    if eager and takes_fast(base, config, decoder=name, sampler=helpers.get("sampler")):
        facts.append("eager")  # elsewhere it changes nothing, and the same texts are found
    kept = None if keep is None else keep / f"{digest(base, helpers, facts)}.jsonl"
    about = {"decoder": variant, "temperature": config.temperature, "tokens_per_step": config.tokens_per_step}
    # Of the first rank: files may be on its disk alone, or just being written.
    found: list[Generated] = [] if kept is None else distributed.from_all_ranks(_read(kept) if rank == 0 else [])
    if len(found) == len(prompts):
        return found
    known = {line.row for line in found}
    mine = [n for n in range(rank, len(prompts), world) if first_row + n not in known]
    given, numbers = [prompts[n] for n in mine], [first_row + n for n in mine]
    made: list[Generated] = []
    how = {"batch_size": batch_size, "rows": numbers, "decoder": name, "eager": eager or None, **helpers, **options}
    with Bar(variant, enabled=rank == 0) as bar:
        for _, result in decode_many(base, given, config, **how):
            fresh = generated(base, result)
            made += fresh
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with kept.with_suffix(f".{rank}.part").open("a", encoding="utf-8") as file:
                    file.writelines(to_line(about | asdict(line)) for line in fresh)
            bar.show(len(made) / len(given))
    out: list[Generated] = sorted([*found, *distributed.from_all_ranks(made)], key=lambda line: line.row)
    if kept is not None and rank == 0:
        write_whole({kept: "".join(to_line(about | asdict(line)) for line in out)})
        for part in kept.parent.glob(f"{kept.stem}.*.part"):
            part.unlink(missing_ok=True)
    return out


def generated(base: Base, result: DecodeResult) -> list[Generated]:
    """The rows of a decode."""
    tokens = result.tokens_BL[:, -result.config.max_new_tokens :].tolist()
    counted = (result.rows_B, result.rounds_B, result.base_calls_B, result.sampler_calls_B, result.partner_calls_B)
    return [
        Generated(row, cut_at_end(ids, base.spec.end_ids), waited, f, g, ar, result.seconds / len(tokens))
        for ids, (row, waited, f, g, ar) in zip(tokens, torch.stack(counted, 1).tolist(), strict=True)
    ]


def _read(kept: Path) -> list[Generated]:
    """All rows of a call, or those of one that was stopped, but for the torn last line of one that was killed."""
    rows = {}
    for file in [kept] if kept.is_file() else kept.parent.glob(f"{kept.stem}.*.part"):
        for line in file.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                rows[value["row"]] = Generated(**{name: value[name] for name in Generated.__dataclass_fields__})
    return [rows[row] for row in sorted(rows)]


def place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def over_ranks(items: Sequence[Any], work: Callable[[Sequence[Any]], Iterable[Any]]) -> list[Any]:
    """`work` of a share of the items on every rank; its results for all items, in order, on every rank."""
    rank, world = place()
    made = zip(range(rank, len(items), world), work(items[rank::world]), strict=True)
    return [value for _, value in sorted(distributed.from_all_ranks(list(made)), key=lambda pair: pair[0])]


def sampler_for(config: Any, base: Base) -> Sampler | None:
    """The sampler that some settings name (a folder or a Hub id), else the one that ships for the base, else None."""
    named = config.sampler or default_sampler(config.base)
    return None if named is None else from_pretrained(str(named), base)


def open_helpers(
    config: Any, base: Base, variants: Iterable[str], *, sampler: Any = None, partner: Partner | None = None
) -> dict[str, Any]:
    """The sampler and the partner of some settings, as far as one of the variants wants them; those given are taken."""
    entries = [DECODERS[read_variant(variant).name] for variant in variants]
    helpers: dict[str, Any] = {}
    if any(entry.needs_sampler for entry in entries):
        helpers["sampler"] = sampler or sampler_for(config, base)
        require(helpers["sampler"] is not None, f"no sampler ships for base {config.base!r}; name one")
    if any(entry.needs_partner for entry in entries):
        helpers["partner"] = partner or load_partner(base, config.partner)
    return helpers


def digest(base: Base, helpers: dict[str, Any], facts: list[Any]) -> str:
    """Names a call by all that decides its result, and by the card, since its seconds are kept too."""
    card = torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else base.device.type
    about = [adjust_dlm.__version__, base.fingerprint, base.quantized, str(base.dtype), base.compiled, card]
    entry = DECODERS[read_variant(facts[0]).name]
    digest = hashlib.sha256(json.dumps([*about, *facts]).encode())
    sampler, partner = helpers.get("sampler"), helpers.get("partner")
    if entry.needs_sampler and isinstance(sampler, Sampler):
        digest.update(json.dumps(asdict(sampler.config)).encode())
        for weight in sampler.state_dict().values():
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if entry.needs_partner and partner is not None:
        digest.update(partner.fingerprint.encode())
    return digest.hexdigest()[:24]


def to_line(value: dict[str, Any]) -> str:
    """One line of a JSON lines file."""
    return json.dumps(value, ensure_ascii=False) + "\n"


CALLS = ("rounds", "base_calls", "sampler_calls", "partner_calls", "seconds")
COSTS = (*CALLS, "tokens_per_pass", "tokens_per_second")


def costs(rows: Sequence[Generated]) -> dict[str, float]:
    """Mean passes of each kind and seconds a row, and tokens per base pass and per second over all rows."""
    tokens = sum(len(line.tokens) for line in rows)
    total = {name: sum(getattr(line, name) for line in rows) for name in CALLS}
    speed = {"tokens_per_pass": tokens / max(total["base_calls"], 1), "tokens_per_second": tokens / total["seconds"]}
    return {name: value / len(rows) for name, value in total.items()} | speed


def half_width(column: Sequence[float]) -> float:
    """Of the 95 % interval of a mean: normal, or for zeros and ones the farther end of Wilson's, which leans to 1/2."""
    n, mean = len(column), sum(column) / len(column)
    if set(column) <= {0, 1}:
        z2 = 1.96**2
        half = 1.96 * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return half + abs((mean + z2 / (2 * n)) / (1 + z2 / n) - mean)
    spread = sum((x - mean) ** 2 for x in column) / (n - 1) if n > 1 else math.nan
    return 1.96 * math.sqrt(spread / n)
