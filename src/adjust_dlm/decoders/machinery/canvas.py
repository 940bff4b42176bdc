"""The canvas: prompts and masked positions, what was committed when, and which rows are still open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base, BaseSpec
from adjust_dlm.bases.blocks import open_block
from adjust_dlm.bases.memory import Memory
from adjust_dlm.checks import is_id, require
from adjust_dlm.sampling import DRAW, NOISE, confidence, gumbel, uniform, wrapped
from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, OrderRule, State


@dataclass
class Picks:
    """Positions and tokens of one commit: [B, N] each; `valid_BN` is False where a row has nothing to do.

    The positions of a row are all different, valid or not.
    `processed_RV` are the logits [B * N, V] that the tokens were drawn from, where the picker has them.
    """

    position_BN: Tensor
    token_BN: Tensor
    valid_BN: Tensor
    processed_RV: Tensor | None = None


class Canvas(State):
    """A `State` that knows its own history.

    Attributes:
        order_BL: commit number of each position, `GIVEN` or `MASKED`.
        commits_B: commits so far, per row.
        rows_B, seeds_B: global row ids and seeds; together they fix every random number of a row.
        new_B: masks that were appended to each row's prompt.
        base_calls_B, sampler_calls_B, partner_calls_B: passes each row needed.
        rounds_B: rounds of each row; a round waits for one pass, which may be over several canvases (`verified`).
        quota_B: commits left in this round, per row.
        only_BL: where this round may still go: everywhere until its first pick.
        wide: columns that it may go to at most, of one row.
        memory, sampler_memory: what the rows keep of earlier passes, and of steps of g (see `machinery.cache`).
        last_BLD: of a decoder that drafts: states of each row's last pass.
        watch: called after every commit.
        chance_BL: where it is a tensor, decoders write into it with what probability a token was drawn (after
            temperature and filters), for every position that they propose a token for; not without `noting`.
    """

    watch: Callable[[Canvas], None] | None = None
    chance_BL: Tensor | None = None
    noting = True
    last_BLD: Tensor | None = None

    def __init__(
        self, base: Base, prompts: list[list[int]], config: DecodeConfig, *, rows: list[int] | None = None,
        seeds: list[int] | None = None, new: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Left-pads the prompts and appends masks to each; masks inside are filled in too, an empty one is fine.

        Row ids are 0..B-1, the seed of each row that of the config, and its new masks (0 or more)
        `config.max_new_tokens`, unless they are given.

        Raises:
            InputError: a canvas longer than the base's context, or an id that the base does not have; on a block base a
                block_length that does not divide its blocks, or a mask left of a later block's given token.
        """
        self.base, self.config = base, config
        spec, count = base.spec, len(prompts)
        size = spec.block
        require(
            size is None or size % (config.block_length or 1) == 0,
            f"block_length is {config.block_length}; base {spec.name!r} has blocks of {size}, which it must divide",
        )
        require(
            size is None or config.schedule == "exact",
            f"schedule is {config.schedule!r}; base {spec.name!r} has blocks, and no published counts: leave it out",
        )
        ahead = spec.causal and self.rule != "left_to_right"
        require(not ahead, f"order is {self.rule}; base {spec.name!r} has causal blocks, written from left to right")
        require(new is None or config.schedule == "exact", "a reference schedule takes one max_new_tokens for all rows")
        rows = list(range(count)) if rows is None else rows
        seeds = [config.seed] * count if seeds is None else seeds
        new = [config.max_new_tokens] * count if new is None else new
        odd = [row for row in rows if not is_id(row, -(2**63), 2**63)]
        require(not odd, f"row id {odd[:1]}: row ids are whole numbers of 64 bits")
        for name, given in (("row ids", rows), ("seeds", seeds), ("lengths", new)):
            require(len(given) == count, f"{len(given)} {name} for {count} prompts; give one each")
        tokens_BL, real_BL = _left_padded(spec, prompts, new)
        padded = not bool(real_BL.all())
        tokens_BL, real_BL = tokens_BL.to(base.device), real_BL.to(base.device)
        masked_BL = (tokens_BL == spec.mask_id) & real_BL
        super().__init__(tokens_BL, real_BL, masked_BL, padded=padded)
        self.order_BL = torch.where(masked_BL, MASKED, GIVEN)
        self.rows_B = torch.tensor(rows, device=base.device, dtype=torch.long)
        self.seeds_B = torch.tensor([wrapped(seed) for seed in seeds], device=base.device)
        self.new_B = torch.tensor(new, device=base.device, dtype=torch.long)
        zeros = [torch.zeros_like(self.rows_B) for _ in range(7)]
        self.base_calls_B, self.sampler_calls_B, self.partner_calls_B, self.rounds_B = zeros[:4]
        self.commits_B, self.quota_B, self._before_B = zeros[4:]  # until now, left in this round, before this round
        self._ends_E = torch.tensor(spec.end_ids, device=base.device, dtype=torch.long)
        self._column_L = torch.arange(tokens_BL.shape[1], device=base.device)
        self.only_BL = torch.ones_like(real_BL)
        self.memory, self.sampler_memory = Memory(count, base.device), Memory(count, base.device)
        self.narrowed, self.wide = False, 0
        self._round = 0
        self._schedules = self._reference_schedules() if config.schedule == "reference" else None

    # What may be committed now ---------------------------------------------------------------------------------

    @property
    def rule(self) -> OrderRule:
        """The rule for the next position."""
        return self.config.order or self.base.spec.order

    @property
    def on_processed(self) -> bool:
        """Whether that rule sees logits after temperature and filters."""
        return (self.config.order_on or self.base.spec.order_on) == "processed"

    @property
    def open_B(self) -> Tensor:
        """Rows that still have something to commit."""
        return self.masked_BL.any(-1)

    @property
    def open(self) -> bool:
        """Whether any row is open (waits for the device)."""
        return bool(self.open_B.any())

    @property
    def busy_B(self) -> Tensor:
        """Rows with commits left in this round."""
        return (self.quota_B > 0) & self.open_B

    @property
    def open_BL(self) -> Tensor:
        """Positions that may be committed now: the masks of each row's block that are candidates."""
        return self._block_BL & self.only_BL

    @property
    def seen_BL(self) -> Tensor:
        """The masks that a pass of the base has states for: all, or those of the block that a block base is in."""
        return self.masked_BL if self.base.spec.block is None else self.masked_BL & self.looked_BL

    @property
    def looked_BL(self) -> Tensor:
        """Of a block base the open columns of each row's latest pass with a cache; before any, those of the next."""
        size, (final_B1, _, edge_B1) = self.base.spec.block or 1, self.memory.counts_B3.split(1, -1)
        step = 1 if self.base.spec.causal else size
        edge_B1 = torch.where(edge_B1 > 0, edge_B1, self.block_of(step)[:, None] * step + size)
        return (self.positions_BL >= final_B1) & (self.positions_BL < edge_B1) & self.real_BL

    def lead(self, score_BL: Tensor) -> Tensor:
        """Puts the first position of a block before all others where it is scored by the block before: in place.

        That state does not see the block: a token drawn there later would not follow what stands in it. A row's first
        position is scored by its own state. In causal blocks no position goes before those left of it.
        """
        if self.base.spec.causal:
            shut_BL = score_BL == -torch.inf
            score_BL.copy_(score_BL.masked_fill(shut_BL, torch.inf).cummin(-1).values).masked_fill_(shut_BL, -torch.inf)
        if self.base.lag:
            score_BL.masked_fill_(self.lead_BL & (score_BL > -torch.inf), torch.inf)
        return score_BL

    @property
    def lead_BL(self) -> Tensor:
        """First positions of blocks that the block before scores."""
        place_BL, apart = self.positions_BL, bool(self.base.lag) and not self.base.spec.causal
        return (place_BL % (self.base.spec.block or 1) == 0) & (place_BL > 0) & apart

    @property
    def _block_BL(self) -> Tensor:
        """The masks of each row's block."""
        if self.base.spec.causal:
            return self.seen_BL
        if self.base.spec.block is not None:
            return self.masked_BL & open_block(self, self.config.block_length or self.base.spec.block)
        if self.config.block_length is None:
            return self.masked_BL
        end_B = len(self._column_L) - self.new_B + (self.block_B + 1) * self.config.block_length
        return self.masked_BL & (self._column_L < end_B[:, None])

    @property
    def block_B(self) -> Tensor:
        """The block of each row's first mask; one block unless told, or on a causal base."""
        length = None if self.base.spec.causal else self.config.block_length or self.base.spec.block
        if length is None:
            return torch.zeros_like(self.rows_B)
        if self.base.spec.block is not None:
            return self.block_of(length)
        first_B = self.masked_BL.long().argmax(-1) - (len(self._column_L) - self.new_B)
        return first_B.clamp_min(0) // length

    def block_of(self, size: int) -> Tensor:
        """The block of so many positions, from multiples of it on, that holds each row's first mask."""
        return self.positions_BL.gather(1, self.masked_BL.long().argmax(-1, keepdim=True))[:, 0] // size

    # Rounds and commits ----------------------------------------------------------------------------------------

    def start_round(self, wanted_B: Tensor | None = None, *, same_pass: bool = False) -> int:
        """Books one base pass for every open row, sets each row's quota, returns the largest.

        Args:
            wanted_B: commits of each row in this round; by default those of the schedule.
            same_pass: the pass of the round before looked at this canvas too: nothing is booked.
        """
        self._begin(self._scheduled() if wanted_B is None else wanted_B, booked=not same_pass)
        self._round += 1
        most = int(self.quota_B.max())
        self.wide = self.config.candidates + 1 if self.config.candidates else most
        return most

    def _begin(self, wanted_B: Tensor, *, booked: bool = True) -> None:
        if booked:
            self.base_calls_B += self.open_B
            self.rounds_B += self.open_B
        self.only_BL.fill_(True)
        self.narrowed = False
        self._before_B.copy_(self.commits_B)
        self.quota_B.copy_(torch.minimum(wanted_B, self.open_BL.sum(-1)))

    def round(self) -> Iterator[int]:
        """k = 0, 1, ... for the commits of one round; ends early when every row has met its quota."""
        for k in range(self.start_round()):
            busy_B = self.busy_B
            if k and not busy_B.any():
                return
            self.sampler_calls_B += busy_B & (k > 0)
            yield k

    def narrow(self, score_BL: Tensor) -> None:
        """At a round's first pick, by its scores: of the positions behind it only candidates stay open in the round."""
        count = self.config.candidates
        if count:
            self.quota_B.clamp_max_(count + 1)
        if count != 0 and self.wide > 1:
            wide_B = self.quota_B if count is None else torch.full_like(self.quota_B, count + 1)
            self.only_BL.copy_(best_columns(score_BL, self.real_BL, wide_B))
        self.narrowed = True

    def commit(self, picks: Picks) -> None:
        """Writes tokens, order and quotas; closes rows whose text is finished."""
        rank_BN = picks.valid_BN.cumsum(-1) - 1
        goes_BN, at_BN = picks.valid_BN & (rank_BN < self.quota_B[:, None]), picks.position_BN
        number_BN = self.commits_B[:, None] + rank_BN
        for into_BL, new_BN in (
            (self.tokens_BL, picks.token_BN), (self.order_BL, number_BN), (self.masked_BL, torch.zeros_like(goes_BN)),
        ):  # fmt: skip
            into_BL.scatter_(1, at_BN, torch.where(goes_BN, new_BN, into_BL.gather(1, at_BN)))
        done_B = goes_BN.sum(-1)
        self.commits_B += done_B
        self.quota_B -= done_B
        # A row ends once nothing is masked left of its first committed end token; the rest is filler.
        finished_B = self.finished(self.tokens_BL, self.masked_BL, self.order_BL >= 0)
        filler_BL = finished_B[:, None] & self.masked_BL
        self.tokens_BL.masked_fill_(filler_BL, self.base.spec.filler_id)
        self.masked_BL &= ~filler_BL
        if self.watch is not None:
            self.watch(self)

    def finished(self, tokens_BL: Tensor, masked_BL: Tensor, written_BL: Tensor) -> Tensor:
        """Rows whose text is whole: nothing is masked left of the first end token among those written."""
        end_BL = (tokens_BL[..., None] == self._ends_E).any(-1)
        ended_BL = (end_BL & written_BL).long().cumsum(-1) > 0
        return ended_BL.any(-1) & ~(masked_BL & ~ended_BL).any(-1)

    @property
    def written_BL(self) -> Tensor:
        """What this round has committed."""
        return self.order_BL >= self._before_B[:, None]

    # Schedules -------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> int | Tensor:
        """Commits of every round, or of each row's rounds [B, rounds], the last of which goes on."""
        return self.config.tokens_per_step if self._schedules is None else self._schedules

    def _scheduled(self) -> Tensor:
        if self._schedules is None:
            return torch.full_like(self.commits_B, self.config.tokens_per_step)
        return self._schedules[:, min(self._round, self._schedules.shape[1] - 1)]

    def _reference_schedules(self) -> Tensor:
        """[B, steps] commits per round of the family's published loop, block after block."""
        new, width = self.config.max_new_tokens, self.config.tokens_per_step
        length = self.config.block_length or new
        parts, before, at = [], 0, len(self._column_L) - new
        for first in range(0, new, length):
            end = at + min(first + length, new)
            steps = -(-min(length, new - first) // width)
            masked = self.masked_BL[:, before:end].sum(-1).tolist()
            parts.append(torch.tensor([self.base.reference_schedule(m, steps) for m in masked]))
            before = end
        return torch.cat(parts, 1).to(self.base.device)

    # Randomness, and what it made ------------------------------------------------------------------------------

    def uniforms(self, position: Tensor, row: Tensor, stream: int = DRAW) -> Tensor:
        """The uniforms of the next commit at (row index, position index): float64, shape of `position`."""
        return uniform(*self._counters(position, row), stream)

    def gumbels(self, position_R: Tensor, row_R: Tensor, token_V: Tensor) -> Tensor:
        """Gumbel noise of the next commit for every token: fp32 [R, V]; fresh after each commit of the row."""
        return gumbel(uniform(*self._counters(position_R[:, None], row_R[:, None]), NOISE, token_V))

    def _counters(self, position: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        start_B = self.real_BL.long().argmax(-1)
        return self.seeds_B[row], self.rows_B[row], self.commits_B[row], position - start_B[row]

    def note_chance(self, row: Tensor, position: Tensor, processed_RV: Tensor, token_R: Tensor) -> None:
        """Keeps the probability of drawn tokens, if anyone wants to know: (row index, position index) of each.

        A row with fewer masks than others has picks that are none; those of its tokens that stand keep their chance.
        """
        if self.noting and self.chance_BL is not None:
            at = row.flatten(), position.flatten()
            chance_R = confidence(processed_RV, token_R)
            self.chance_BL[at] = torch.where(self.masked_BL[at], chance_R, self.chance_BL[at])

    def restart(self, b: int, prompt: list[int], row: int) -> None:
        """Row b becomes a fresh canvas of the same width: another prompt, another row id; what it cost stays booked.

        Raises:
            InputError: the prompt is longer than the width leaves room for.
        """
        room = len(self._column_L) - self.config.max_new_tokens
        require(len(prompt) <= room, f"row {row} has a prompt of {len(prompt)} tokens; this canvas has room for {room}")
        spec, pads = self.base.spec, room - len(prompt)
        _refuse_gaps(spec, b, prompt)
        for memory in (self.memory, self.sampler_memory):
            memory.counts_B3[b] = 0
        line = [*[spec.pad_id] * pads, *prompt, *[spec.mask_id] * self.config.max_new_tokens]
        self.tokens_BL[b] = torch.tensor(line, device=self.tokens_BL.device)
        self.real_BL[b] = self._column_L >= pads
        self.masked_BL[b] = (self.tokens_BL[b] == spec.mask_id) & self.real_BL[b]
        self.order_BL[b] = torch.where(self.masked_BL[b], MASKED, GIVEN)
        self.rows_B[b], self.commits_B[b], self.quota_B[b] = row, 0, 0
        self.padded |= pads > 0


def _left_padded(spec: BaseSpec, prompts: list[list[int]], new: list[int]) -> tuple[Tensor, Tensor]:
    """Ids with masks behind them, and which of them are real: [B, L] on the CPU."""
    given: list[Any] = prompts
    flat = [prompt for prompt in given if not isinstance(prompt, Sized)]
    require(not flat, f"{flat[:1]} among the prompts; each is a list of token ids")
    long, masks = max(zip(map(len, prompts), new, strict=True), key=sum)
    width = long + masks
    require(
        width <= spec.context,
        f"prompt of {long} tokens plus {masks} new ones make {width}; base {spec.name!r} takes at most {spec.context}",
    )
    tokens_BL = torch.full((len(prompts), width), spec.pad_id, dtype=torch.long)
    real_BL = torch.zeros(tokens_BL.shape, dtype=torch.bool)
    for b, (prompt, masks) in enumerate(zip(prompts, new, strict=True)):
        wrong = [t for t in prompt if not is_id(t, 0, spec.vocab_size)]
        require(not wrong, f"prompt {b} holds token id {wrong[:1]}; ids run from 0 to {spec.vocab_size - 1}")
        _refuse_gaps(spec, b, prompt)
        first = width - len(prompt) - masks
        tokens_BL[b, first:] = torch.tensor([*prompt, *[spec.mask_id] * masks])
        real_BL[b, first:] = True
    return tokens_BL, real_BL


def _refuse_gaps(spec: BaseSpec, b: int, prompt: list[int]) -> None:
    """Raises InputError for a mask with a given token in a later block of a block base, or of causal ones behind it."""
    size = 1 if spec.causal else spec.block or len(prompt) + 1
    gap = next((n for n, token in enumerate(prompt) if token == spec.mask_id), len(prompt))
    given = max((n for n, token in enumerate(prompt) if token != spec.mask_id), default=-1)
    require(
        given // size <= gap // size,
        f"prompt {b} has a mask at {gap} and a token at {given}, in a later block of {size}; base {spec.name!r} sees "
        "nothing to the right of a block: take a base that sees whole canvases",
    )


# Which columns of a canvas a step looks at: sets of a fixed size, so that shapes do not depend on the texts.
def columns_of(marked_BL: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` marked columns of each row, lowest first, and which of these [B, N] are marked at all."""
    length = marked_BL.shape[1]
    column_L = torch.arange(length, device=marked_BL.device)
    ranked_BN = torch.where(marked_BL, column_L, column_L + length).sort(-1).values[:, :count]
    return ranked_BN % length, ranked_BN < length


def best_columns(score_BL: Tensor, real_BL: Tensor, count_B: Tensor) -> Tensor:
    """The `count_B` best columns of each row; of -inf are those that are not open, which fill it up, the last first."""
    count_B1 = count_B[:, None]
    rank_BL = score_BL.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    open_BL = (rank_BL < count_B1) & (score_BL > -torch.inf)
    other_BL = real_BL & ~open_BL
    from_right_BL = other_BL.flip(-1).long().cumsum(-1).flip(-1)
    return open_BL | (other_BL & (from_right_BL <= count_B1 - open_BL.sum(-1, keepdim=True)))
