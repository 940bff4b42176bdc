"""Texts of many rows with what they cost: generated once, scored by anything."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import adjust_dlm
from adjust_dlm.artifacts import from_pretrained
from adjust_dlm.bases import Base, Partner, cut_at_end
from adjust_dlm.bases.partner import load_partner
from adjust_dlm.decoders import DECODERS, decode_many, read_variant, takes_fast
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler, default_sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed
from adjust_dlm.types import DecodeConfig, require


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
    base: Base,
    helpers: dict[str, Any],
    variant: str,
    prompts: Sequence[list[int]],
    settings: DecodeConfig,
    *,
    first_row: int = EVALUATION_ROWS,
    batch_size: int = 256,
    keep: Path | None = None,
    eager: bool = False,
) -> list[Generated]:
    """Decodes every prompt with one variant of a decoder; under torch.distributed ranks share the rows.

    Args:
        base: the frozen model.
        helpers: `sampler` and `partner` for decoders that want them.
        variant: see `read_variant`; its settings go over `settings`.
        prompts: ids; prompt n is row first_row + n.
        settings: what all variants share.
        first_row: id of the first row; joint text of a row that g was trained on would be the training text.
        batch_size: rows decoded at once on a rank.
        keep: folder of texts; a call with the same base, models, prompts and settings that is there is read, not
            repeated, and one that was stopped goes on.
        eager: run the reference decoders where their fast form on CUDA would be taken.

    Returns:
        All rows in order, on every rank.

    Raises:
        InputError: rows that a sampler may have been trained on.
    """
    require(
        first_row >= EVALUATION_ROWS,
        f"first_row is {first_row}; rows below {EVALUATION_ROWS} are for trajectories: g may have been trained on them",
    )
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    name, changes, options = read_variant(variant)
    config = settings.but(**changes)
    facts = [variant, first_row, prompts, asdict(config)]
    if eager and takes_fast(base, config, decoder=name, sampler=helpers.get("sampler")):
        facts.append("eager")  # elsewhere it changes nothing, and the same texts are found
    kept = None if keep is None else _Kept(keep, digest(base, helpers, facts))
    about = {"decoder": variant, "temperature": config.temperature, "tokens_per_step": config.tokens_per_step}
    found: list[Generated] = [] if kept is None else distributed.from_first_rank(kept.read() if rank == 0 else None)
    if len(found) == len(prompts):
        return found
    known = {line.row for line in found}
    mine = [n for n in range(rank, len(prompts), world) if first_row + n not in known]
    given, numbers = [prompts[n] for n in mine], [first_row + n for n in mine]
    made = []
    how = {"batch_size": batch_size, "rows": numbers, "decoder": name, "eager": eager or None, **helpers, **options}
    for which, result in decode_many(base, given, config, **how):
        rows = [numbers[n] for n in which]
        tokens = result.tokens_BL[:, -config.max_new_tokens :].tolist()
        counted = (result.rounds_B, result.base_calls_B, result.sampler_calls_B, result.partner_calls_B)
        calls = torch.stack(counted, 1).tolist()
        share = result.seconds / len(rows)
        fresh = [
            Generated(row, cut_at_end(ids, base.spec.end_ids), waited, f, g, ar, share)
            for row, ids, (waited, f, g, ar) in zip(rows, tokens, calls, strict=True)
        ]
        made += fresh
        if kept is not None:
            kept.add(rank, fresh, about)
    out: list[Generated] = sorted([*found, *distributed.from_all_ranks(made)], key=lambda line: line.row)
    if kept is not None and rank == 0:
        kept.finish(out, about)
    return out


class _Kept:
    """The rows of one call on disk: a part for each rank that grows batch by batch, then one whole file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.path = folder / f"{name}.jsonl"

    def read(self) -> list[Generated]:
        """All rows, or those of a call that was stopped."""
        files = [self.path] if self.path.is_file() else sorted(self.folder.glob(f"{self.name}.*.part"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        rows = {row.row: row for line in lines if (row := _parsed(line)) is not None}
        return [rows[row] for row in sorted(rows)]

    def add(self, rank: int, lines: Iterable[Generated], about: dict[str, Any]) -> None:
        """A batch of a rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.{rank}.part").open("a", encoding="utf-8") as file:
            file.writelines(to_line(about | asdict(line)) for line in lines)

    def finish(self, lines: Iterable[Generated], about: dict[str, Any]) -> None:
        """The whole, in place of the parts."""
        write_whole({self.path: "".join(to_line(about | asdict(line)) for line in lines)})
        for part in self.folder.glob(f"{self.name}.*.part"):
            part.unlink(missing_ok=True)


def _parsed(line: str) -> Generated | None:
    """A kept row; None for the torn last line of a run that was killed, and for one of an older version."""
    try:
        value = json.loads(line)
        return Generated(**{name: value[name] for name in Generated.__dataclass_fields__})
    except (ValueError, KeyError):
        return None


class Sources(Protocol):
    """Settings that name the models beside the base."""

    @property
    def base(self) -> str: ...  # noqa: D102

    @property
    def sampler(self) -> str | None: ...  # noqa: D102

    @property
    def partner(self) -> str | None: ...  # noqa: D102


def open_helpers(
    config: Sources, base: Base, variants: Iterable[str], *, sampler: Any = None, partner: Partner | None = None
) -> dict[str, Any]:
    """The sampler and the partner, as far as a decoder among the variants wants them; those given are taken."""
    entries = [DECODERS[read_variant(variant).name] for variant in variants]
    helpers: dict[str, Any] = {}
    if any(entry.needs_sampler for entry in entries):
        named = config.sampler or default_sampler(config.base)
        require(sampler is not None or named is not None, f"no sampler ships for base {config.base!r}; name one")
        helpers["sampler"] = sampler or from_pretrained(str(named), base)
    if any(entry.needs_partner for entry in entries):
        helpers["partner"] = partner or load_partner(base, config.partner)
    return helpers


def digest(base: Base, helpers: dict[str, Any], facts: list[Any]) -> str:
    """Names a call by all that decides its result, and by the card, since its seconds are kept too."""
    card = torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else base.device.type
    about = [adjust_dlm.__version__, base.fingerprint, base.quantized, str(base.dtype), base.compiled, card]
    entry = DECODERS[read_variant(facts[0]).name]
    sampler, partner = helpers.get("sampler"), helpers.get("partner")
    digest = hashlib.sha256(json.dumps([*about, *facts]).encode())
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
