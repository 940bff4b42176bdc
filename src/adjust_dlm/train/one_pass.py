"""One-pass training: trajectories are decoded and trained on in the same loop, so a window costs one base pass in all.

A pool of rows is decoded one token a pass, as `adjust trajectories` would decode them. The states that a pass computes
for its commit are also f(x) of Algorithm 2, h_0 of one window and the teacher of others; they are kept until the
windows of a block are complete. Rows start at staggered moments, so that every micro-batch mixes mask ratios, and a
row that ends makes room for the next row number.

Shapes here: N rows of the pool, M of a micro-batch, S states of a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.data import store
from adjust_dlm.data.prompts import PromptSource, open_prompts
from adjust_dlm.data.trajectories import RowMaker
from adjust_dlm.decoders import Canvas
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.train.config import PoolConfig
from adjust_dlm.train.rows import open_checked
from adjust_dlm.train.unroll import NEVER, Frames
from adjust_dlm.types import NEXT_DECAY, DecodeConfig, RowWeights, State, Trajectory, require

_IDLE = -1  # row id of a place in the pool that has not started yet


def lookahead(weights: RowWeights, decay: float = NEXT_DECAY) -> int:
    """Commits to know behind a state before its row weights are fixed, to the last bit of fp32.

    `next` weights fall as exp(-rank / decay): rows that are revealed later than that have none of it.
    """
    return 0 if weights == "uniform" else math.ceil(16.7 * decay)  # exp(-16.7) < 2**-24


@dataclass
class Moment:
    """The pool before one commit.

    Attributes:
        row_N: row ids, -1 where nothing is decoded.
        tokens_NL: int32 canvas.
        masked_NL: what is masked.
        real_NL: False on pads.
        revealed_NL: the position that the commit behind this moment filled.
        h_NLD: f of the canvas.
    """

    row_N: Tensor
    tokens_NL: Tensor
    masked_NL: Tensor
    real_NL: Tensor
    revealed_NL: Tensor
    h_NLD: Tensor


class Lane:
    """The part of a pool that has one temperature: places, and which row comes next."""

    def __init__(self, base: Base, settings: DecodeConfig, source: PromptSource, places: int, rows: Iterator[int]):
        """`places` idle places; rows are taken in turn."""
        width = max(source.lengths)
        self.canvas = Canvas(base, [[base.spec.pad_id] * width] * places, settings, rows=[_IDLE] * places)
        self.canvas.padded = len(source.lengths) > 1
        self.canvas.masked_BL.zero_()
        self.source, self.rows, self.taken, self.end = source, rows, 0, 0
        self.begins = [place * settings.max_new_tokens // places for place in range(places)]

    def refill(self, now: int) -> None:
        """Fresh rows for places whose text is finished, or whose first moment is this one."""
        canvas = self.canvas
        for b in (~canvas.open_B).nonzero()[:, 0].tolist():
            if now < self.begins[b]:
                continue
            row = self.next_row()
            canvas.restart(b, self.source.ids(row), row)

    def next_row(self) -> int:
        """Takes a row number."""
        row = next(self.rows)
        self.taken, self.end = self.taken + 1, row + 1
        return row

    def commit(self, h_BLD: Tensor) -> Tensor:
        """One token for every open row; [B, L] bool of the positions that got one."""
        canvas, before_BL = self.canvas, self.canvas.masked_BL.clone()
        canvas.start_round()
        canvas.commit(pick(canvas.base, h_BLD, canvas))
        return before_BL & (canvas.order_BL >= 0)


class Pool:
    """Frames for Algorithm 2, straight from decoding.

    Args:
        config: what is decoded, from row number `first` on, behind what is held out.
        length: S; a slice holds S - rollout windows.
        slices: M, a divisor of the pool's rows.
        rank, world: of the rows of a temperature, this process decodes number rank, rank + world, ...
        weights, decay: row weights that the windows will have; they say how long a state has to wait.
    """

    def __init__(
        self, base: Base, config: PoolConfig, source: PromptSource, *, length: int, rollout: int, slices: int,
        seed: int = 0, suppress_eos: bool = False, first: int = 0, rank: int = 0, world: int = 1,
        weights: RowWeights = "next", decay: float = NEXT_DECAY,
    ) -> None:  # fmt: skip
        kinds = config.trajectories(seed=seed, suppress_eos=suppress_eos).decode_configs(base)
        config.check_rows(slices)
        source.check_fits(base, config.max_new_tokens)
        self.base, self.source, self.first = base, source, first
        self.length, self.rollout, self.groups = length, rollout, config.rows // slices
        self.lanes = [
            Lane(
                base, kind, source, config.rows // len(kinds),
                itertools.islice(_rows_of(lane, len(kinds), source, first), rank, None, world),
            )
            for lane, kind in enumerate(kinds)
        ]  # fmt: skip
        self.width = max(source.lengths) + config.max_new_tokens
        self.wait = min(lookahead(weights, decay), self.width)
        self.moments: list[Moment] = []
        self.passes = self.group = self.spent = 0

    @property
    def end(self) -> int:
        """The row behind the last one that was taken."""
        return max(lane.end for lane in self.lanes)

    @property
    def saved_bytes(self) -> int:
        """Of `state`, with all moments (int32 tokens, three masks) and canvases (int64 tokens and order, two masks)."""
        moments = (self.length + self.wait) * (self.width * (4 + 3 * 1) + 8)
        rows = sum(len(lane.begins) for lane in self.lanes)
        return rows * (moments + self.width * (2 * 8 + 2 * 1) + 2 * 8)

    @property
    def settled(self) -> bool:
        """Whether every micro-batch of this block has a window that counts: the first rows start one after another."""
        started_N = (torch.stack([m.row_N for m in self.moments[: self.spent]]) != _IDLE).any(0)
        return bool(started_N.view(-1, self.groups).any(0).all())

    def frames(self) -> Frames:
        """The next micro-batch in which at least one window counts: S states of M rows."""
        while True:
            if self.group == 0:
                del self.moments[: self.spent]
                while len(self.moments) < self.length + self.wait:
                    self.advance()
                self.spent = self.length - self.rollout
            places = slice(self.group, None, self.groups)  # spread over phases and temperatures
            self.group = (self.group + 1) % self.groups
            windows = self.moments[: self.spent]
            if bool((torch.stack([m.row_N[places] for m in windows]) != _IDLE).any()):
                return self._frames(places)

    @torch.no_grad()
    def advance(self) -> None:
        """One base pass over the pool, and a commit in every open row."""
        for lane in self.lanes:
            lane.refill(self.passes)
        canvases = [lane.canvas for lane in self.lanes]
        row_N, tokens_NL, masked_NL, real_NL = (
            torch.cat([getattr(canvas, name) for canvas in canvases])
            for name in ("rows_B", "tokens_BL", "masked_BL", "real_BL")
        )
        h_NLD = self.base.hidden(State(tokens_NL, real_NL, masked_NL, canvases[0].padded))
        parts = h_NLD.split([len(canvas.rows_B) for canvas in canvases])
        revealed_NL = torch.cat([lane.commit(h_BLD) for lane, h_BLD in zip(self.lanes, parts, strict=True)])
        self.moments.append(Moment(row_N, tokens_NL.int(), masked_NL, real_NL, revealed_NL, h_NLD))
        self.passes += 1

    def _frames(self, places: slice) -> Frames:
        moments = self.moments[: self.length]
        x = State(
            torch.cat([m.tokens_NL[places] for m in moments]).long(), torch.cat([m.real_NL[places] for m in moments]),
            torch.cat([m.masked_NL[places] for m in moments]), self.lanes[0].canvas.padded,
        )  # fmt: skip
        text_SM = torch.stack([m.row_N[places] for m in moments])
        return Frames(x, [m.h_NLD[places] for m in moments], self._ranks(places).flatten(0, 1), text_SM)

    def _ranks(self, places: slice) -> Tensor:
        """[S, M, L] commits until a masked position is revealed, from the newest moment back; negative elsewhere."""
        out, later_ML, row_M = [], None, None
        for moment in reversed(self.moments):
            known_ML = torch.full_like(moment.tokens_NL[places], NEVER, dtype=torch.long)
            if later_ML is not None and row_M is not None:
                known_ML = torch.where((moment.row_N[places] == row_M)[:, None], later_ML + 1, known_ML)
            later_ML, row_M = known_ML.masked_fill(moment.revealed_NL[places], 0), moment.row_N[places]
            out.append(torch.where(moment.masked_NL[places], later_ML, -NEVER))
        return torch.stack(out[::-1][: self.length])

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: canvases and moments; states of the base are computed again."""
        canvas = ("tokens_BL", "real_BL", "masked_BL", "order_BL", "rows_B", "commits_B")
        moment = ("row_N", "tokens_NL", "masked_NL", "real_NL", "revealed_NL")
        return {
            "passes": self.passes, "group": self.group, "spent": self.spent,
            "taken": [lane.taken for lane in self.lanes],
            "lanes": [{name: getattr(lane.canvas, name).cpu() for name in canvas} for lane in self.lanes],
            "moments": [{name: getattr(m, name).cpu() for name in moment} for m in self.moments],
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a `state` of a pool with the same settings that has not moved yet."""
        device = self.base.device
        self.passes, self.group, self.spent = saved["passes"], saved["group"], saved["spent"]
        for lane, taken, canvas in zip(self.lanes, saved["taken"], saved["lanes"], strict=True):
            for _ in range(taken):
                lane.next_row()
            for name, value in canvas.items():
                getattr(lane.canvas, name).copy_(value)
        for part in saved["moments"]:
            known = {name: value.to(device) for name, value in part.items()}
            tokens_NL, real_NL, masked_NL = known["tokens_NL"].long(), known["real_NL"], known["masked_NL"]
            h_NLD = self.base.hidden(State(tokens_NL, real_NL, masked_NL, self.lanes[0].canvas.padded))
            self.moments.append(Moment(**known, h_NLD=h_NLD))


def _rows_of(lane: int, lanes: int, source: PromptSource, first: int) -> Iterator[int]:
    """Row numbers of one temperature."""
    return (row for row in itertools.count(first) if store.temperature_index(row, len(source), lanes) == lane)


def start_pool(config: Any, base: Base, rank: int, world: int) -> tuple[Sequence[Trajectory], Pool]:
    """Held-out trajectories, and the pool of this process.

    Held-out rows come from stored folders where these are given; else they are rows 0 .. heldout-1, decoded first.
    Training decodes the rows behind them: of stored ones, behind the last that has its seed.

    Raises:
        InputError: bad settings or prompts; stored trajectories that are another base's.
    """
    pool, windows = config.pool, config.slice_states - config.rollout
    least = "it must be at least 2, for g learns between two commits of a text"
    require(pool.max_new_tokens >= 2, f"pool.max_new_tokens is {pool.max_new_tokens}; {least}")
    stored = open_checked(config.heldout_trajectories, base) if config.heldout_trajectories else None
    manifests, first = ([], config.heldout) if stored is None else (stored.manifests, 0)
    first = max((m["first_row"] + m["rows"] for m in manifests if m["seed"] == config.seed), default=first)
    wanted = world * (pool.rows + config.steps * config.accumulate * config.slices * windows // pool.max_new_tokens)
    source = open_prompts(pool.prompts, base, chat=pool.chat, rows=first + wanted, seed=config.seed)
    source.check_fits(base, pool.max_new_tokens)
    made = pool.trajectories(seed=config.seed, suppress_eos=config.suppress_eos, first=first)
    held = RowMaker(made, base, source).decoded((0, config.heldout)) if stored is None else stored
    return held, Pool(
        base, pool, source, length=config.slice_states, rollout=config.rollout, slices=config.slices,
        seed=config.seed, suppress_eos=config.suppress_eos, first=first, rank=rank, world=world,
        weights=config.weights, decay=config.next_decay,
    )  # fmt: skip
