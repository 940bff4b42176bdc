"""The canvas: prompts and masked positions, what was committed when, and which rows are still open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.columns import candidate_columns, certain_columns
from adjust_dlm.decoders.machinery.padding import left_padded
from adjust_dlm.sampling import (
    NOISE,
    ORDER,
    confidence,
    draw,
    gumbel,
    no_softmax,
    process,
    row_scorer,
    uniform,
    wrapped,
)  # fmt: skip
from adjust_dlm.types import CERTAINTY, GIVEN, MASKED, DecodeConfig, State, is_id, require

_CHUNK_BYTES = 1 << 30  # fp32 logits held at once while scoring rows


_Kept = tuple[Tensor, Tensor]  # [B, L] row numbers, [R, V] logits


@dataclass
class Picks:
    """Positions and tokens of one commit: [B, N] each; `valid_BN` is False where a row has nothing to do.

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
        block_B: the block that each row is in, 0-based.
        chance_BL: where it is a tensor, decoders write into it with what probability a token was drawn (after
            temperature and filters), for every position that they propose a token for.
    """

    chance_BL: Tensor | None = None

    def __init__(
        self, base: Base, prompts: list[list[int]], config: DecodeConfig, *, rows: list[int] | None = None,
        seeds: list[int] | None = None, new: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Left-pads the prompts and appends masks to each.

        Args:
            base: the frozen model.
            prompts: token ids; masks inside them are kept and filled in too, an empty one is fine.
            config: all settings.
            rows: row ids, 0..B-1 unless given.
            seeds: one for each row; that of the config unless given.
            new: masks for each row, 0 or more; `config.max_new_tokens` unless given.

        Raises:
            InputError: a canvas longer than the base's context, or an id that the base does not have.
        """
        self.base, self.config = base, config
        spec, count = base.spec, len(prompts)
        rows = list(range(count)) if rows is None else rows
        odd = [row for row in rows if not is_id(row, -(2**63), 2**63)]
        require(not odd, f"row id {odd[:1]}: row ids are whole numbers of 64 bits")
        seeds = [config.seed] * count if seeds is None else seeds
        require(len(rows) == count, f"{len(rows)} row ids for {count} prompts; give one each")
        require(len(seeds) == count, f"{len(seeds)} seeds for {count} prompts; give one each")
        require(new is None or config.schedule == "exact", "a reference schedule takes one max_new_tokens for all rows")
        tokens_BL, real_BL = left_padded(spec, prompts, [config.max_new_tokens] * count if new is None else new)
        padded = not bool(real_BL.all())
        tokens_BL, real_BL = tokens_BL.to(base.device), real_BL.to(base.device)
        masked_BL = (tokens_BL == spec.mask_id) & real_BL
        super().__init__(tokens_BL, real_BL, masked_BL, padded=padded)
        self.order_BL = torch.where(masked_BL, MASKED, GIVEN)
        self.rows_B = torch.tensor(rows, device=base.device, dtype=torch.long)
        self.seeds_B = torch.tensor([wrapped(seed) for seed in seeds], device=base.device)
        self.new_B = torch.full_like(self.rows_B, config.max_new_tokens)
        if new is not None:
            self.new_B = torch.tensor(new, device=base.device)
        self.commits_B = torch.zeros_like(self.rows_B)
        self.base_calls_B, self.sampler_calls_B = self.commits_B.clone(), self.commits_B.clone()
        self.partner_calls_B, self.rounds_B = self.commits_B.clone(), self.commits_B.clone()
        self.quota_B = self.commits_B.clone()
        self._round = 0
        self._column_L = torch.arange(tokens_BL.shape[1], device=base.device)
        self._candidate_BL: Tensor | None = None
        self._certain_BL = self.masked_BL
        self.follows = True  # candidates follow every commit of the round
        self._before_B = self.commits_B.clone()  # commits before this round
        self._ends_E = torch.tensor(spec.end_ids, device=base.device, dtype=torch.long)
        self.watch: Callable[[Canvas], None] | None = None
        self._schedules = self._reference_schedules() if config.schedule == "reference" else None

    def restart(self, b: int, prompt: list[int], row: int) -> None:
        """Row b becomes a fresh canvas of the same width: another prompt, another row id; what it cost stays booked.

        Raises:
            InputError: the prompt is longer than the width leaves room for.
        """
        room = len(self._column_L) - self.config.max_new_tokens
        require(len(prompt) <= room, f"row {row} has a prompt of {len(prompt)} tokens; this canvas has room for {room}")
        spec, pads = self.base.spec, room - len(prompt)
        line = [*[spec.pad_id] * pads, *prompt, *[spec.mask_id] * self.config.max_new_tokens]
        self.tokens_BL[b] = torch.tensor(line, device=self.tokens_BL.device)
        self.real_BL[b] = self._column_L >= pads
        self.masked_BL[b] = (self.tokens_BL[b] == spec.mask_id) & self.real_BL[b]
        self.order_BL[b] = torch.where(self.masked_BL[b], MASKED, GIVEN)
        self.rows_B[b], self.commits_B[b], self.quota_B[b] = row, 0, 0
        self.padded |= pads > 0

    @property
    def open_BL(self) -> Tensor:
        """Positions that may be committed now: the masks of each row's block, and of its candidates."""
        return self._block_BL if self._candidate_BL is None else self._block_BL & self._candidate_BL

    @property
    def _block_BL(self) -> Tensor:
        """The masks of each row's block."""
        if self.config.block_length is None:
            return self.masked_BL
        end_B = len(self._column_L) - self.new_B + (self.block_B + 1) * self.config.block_length
        return self.masked_BL & (self._column_L < end_B[:, None])

    @property
    def block_B(self) -> Tensor:
        """The block of each row's first mask; one block unless told."""
        if self.config.block_length is None:
            return torch.zeros_like(self.rows_B)
        first_B = self.masked_BL.long().argmax(-1) - (len(self._column_L) - self.new_B)
        return first_B.clamp_min(0) // self.config.block_length

    def narrow(self, score_BL: Tensor) -> None:
        """After the first pick of a round: of the positions behind it only its `candidates` stay open in it."""
        count = self.config.candidates
        if count == 0 or self._candidate_BL is not None:
            return
        self._certain_BL = certain_columns(score_BL, count, near=self._near)
        self._candidate_BL = self._first_candidates(score_BL)
        self.quota_B = self.quota_B.clamp_max(count + 1)

    @property
    def _near(self) -> bool:
        return (self.config.order or self.base.spec.order) in CERTAINTY

    def _first_candidates(self, score_BL: Tensor) -> Tensor:
        """Before the first commit of a round, which is to be the column of the best score."""
        best_BL = self._column_L == score_BL.argmax(-1, keepdim=True)
        open_BL, count = score_BL > -torch.inf, self.config.candidates + 1
        return candidate_columns(self._certain_BL, open_BL, best_BL, self.real_BL, count)

    def _next_candidates(self) -> Tensor:
        """After a commit: neighbours of everything that the round has written."""
        written_BL = self.order_BL >= self._before_B[:, None]
        count = self.config.candidates
        return candidate_columns(self._certain_BL, self._block_BL, written_BL, self.real_BL, count)

    def active(self, carriers: Callable[[Tensor, State], Tensor]) -> Tensor:
        """Columns [B, L] that a sparse step computes: the candidates, and where this round's tokens are seen."""
        assert self._candidate_BL is not None
        return self._candidate_BL | carriers(self.order_BL >= self._before_B[:, None], self)

    @property
    def open_B(self) -> Tensor:
        """Rows that still have something to commit."""
        return self.masked_BL.any(-1)

    @property
    def open(self) -> bool:
        """Whether any row is open (waits for the device)."""
        return bool(self.open_B.any())

    def start_round(self, wanted_B: Tensor | None = None, *, same_pass: bool = False) -> int:
        """Books one base pass for every open row, sets each row's quota, returns the largest.

        Args:
            wanted_B: commits of each row in this round; by default those of the schedule.
            same_pass: the pass of the round before looked at this canvas too: nothing is booked.
        """
        if not same_pass:
            open_B = self.open_B
            self.base_calls_B += open_B
            self.rounds_B += open_B
        self._candidate_BL = None
        self._before_B = self.commits_B.clone()
        left_B = self.open_BL.sum(-1)
        self.quota_B = torch.minimum(self._scheduled() if wanted_B is None else wanted_B, left_B)
        self._round += 1
        return int(self.quota_B.max())

    @property
    def schedule(self) -> int | Tensor:
        """Commits of every round, or of each row's rounds [B, rounds], the last of which goes on."""
        return self.config.tokens_per_step if self._schedules is None else self._schedules

    def _scheduled(self) -> Tensor:
        if self._schedules is None:
            return torch.full_like(self.commits_B, self.config.tokens_per_step)
        return self._schedules[:, min(self._round, self._schedules.shape[1] - 1)]

    def round(self) -> Iterator[int]:
        """k = 0, 1, ... for the commits of one round; ends early when every row has met its quota."""
        for k in range(self.start_round()):
            busy_B = self.busy_B
            if k and not busy_B.any():
                return
            self.sampler_calls_B += busy_B & (k > 0)
            yield k

    @property
    def busy_B(self) -> Tensor:
        """Rows with commits left in this round."""
        return (self.quota_B > 0) & self.open_B

    def commit(self, picks: Picks) -> None:
        """Writes tokens, order and quotas; closes rows whose text is finished."""
        rank_BN = picks.valid_BN.cumsum(-1) - 1
        row_R, n_R = (picks.valid_BN & (rank_BN < self.quota_B[:, None])).nonzero(as_tuple=True)
        at = (row_R, picks.position_BN[row_R, n_R])
        self.tokens_BL[at] = picks.token_BN[row_R, n_R]
        self.order_BL[at] = self.commits_B[row_R] + rank_BN[row_R, n_R]
        self.masked_BL[at] = False
        done_B = picks.valid_BN.sum(-1).minimum(self.quota_B)
        self.commits_B += done_B
        self.quota_B = self.quota_B - done_B
        self._close_finished()
        if self._candidate_BL is not None and self.follows and self._near:
            self._candidate_BL = self._next_candidates()
        if self.watch is not None:
            self.watch(self)

    def _close_finished(self) -> None:
        """A row ends once nothing is masked left of its first committed end token; the rest is filler."""
        finished_B = self._finished(self.tokens_BL, self.masked_BL, self.order_BL >= 0)
        filler_BL = finished_B[:, None] & self.masked_BL
        self.tokens_BL.masked_fill_(filler_BL, self._filler)
        self.masked_BL &= ~filler_BL

    def _finished(self, tokens_BL: Tensor, masked_BL: Tensor, written_BL: Tensor) -> Tensor:
        """Rows whose text is whole: nothing is masked left of the first end token among those written."""
        end_BL = (tokens_BL[..., None] == self._ends_E).any(-1)
        ended_BL = (end_BL & written_BL).long().cumsum(-1) > 0
        return ended_BL.any(-1) & ~(masked_BL & ~ended_BL).any(-1)

    @property
    def _filler(self) -> int:
        spec = self.base.spec
        return spec.end_ids[0] if spec.end_ids else spec.pad_id

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

    def uniforms(self, position: Tensor, row: Tensor, stream: int = 1) -> Tensor:
        """The uniforms of the next commit at (row index, position index): float64, shape of `position`."""
        return uniform(*self._keys(position, row), stream)

    def gumbels(self, position_R: Tensor, row_R: Tensor, token_V: Tensor) -> Tensor:
        """Gumbel noise of the next commit for every token: fp32 [R, V]; fresh after each commit of the row."""
        return gumbel(uniform(*self._keys(position_R[:, None], row_R[:, None]), NOISE, token_V))

    def _keys(self, position: Tensor, row: Tensor) -> tuple[int | Tensor, Tensor, Tensor, Tensor]:
        start_B = self.real_BL.long().argmax(-1)
        return self.seeds_B[row], self.rows_B[row], self.commits_B[row], position - start_B[row]

    def note_chance(self, row: Tensor, position: Tensor, processed_RV: Tensor, token_R: Tensor) -> None:
        """Keeps the probability of drawn tokens, if anyone wants to know: (row index, position index) of each.

        A row with fewer masks than others has picks that are none; those of its tokens that stand keep their chance.
        """
        if self.chance_BL is not None:
            at = row.flatten(), position.flatten()
            chance_R = confidence(processed_RV, token_R)
            self.chance_BL[at] = torch.where(self.masked_BL[at], chance_R, self.chance_BL[at])


def rows_at_once(base: Base) -> int:
    """How many rows of fp32 logits are held at a time."""
    return max(1, _CHUNK_BYTES // (4 * base.spec.vocab_size))


def pick(base: Base, h_BLD: Tensor, canvas: Canvas, count: int = 1) -> Picks:
    """TOP and the draw (Algorithm 1, lines 5-6): the `count` best open positions of each row, and their tokens.

    The head runs on open positions only. Their logits are kept for the draw if they fit into one chunk; else it runs
    once more on the chosen ones.

    Raises:
        FloatingPointError: the states gave NaN or infinite logits; such a row could never be finished.
    """
    refuse_nan(base, h_BLD[canvas.masked_BL])
    score_BL, kept_RV = _scores(base, h_BLD, canvas)
    count = max(count, 1)
    if count == 1:
        canvas.narrow(score_BL)
    position_BN = score_BL.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    valid_BN = score_BL.gather(1, position_BN) > -torch.inf
    row_BN = torch.arange(len(score_BL), device=h_BLD.device)[:, None].expand_as(position_BN)
    logits_RV = _logits_of(base, h_BLD, canvas, row_BN, position_BN, kept_RV)
    u_R = canvas.uniforms(position_BN, row_BN).flatten()
    processed_RV = process(logits_RV, canvas.config)
    refuse_nan(base, score_BL, logits_RV=processed_RV)
    token_R = draw(processed_RV, u_R, canvas.config.temperature)
    canvas.note_chance(row_BN, position_BN, processed_RV, token_R)
    return Picks(position_BN, token_R.view_as(position_BN), valid_BN, processed_RV)


def refuse_nan(base: Base, *parts: Tensor, logits_RV: Tensor | None = None) -> None:
    """Raises FloatingPointError for states or scores that are NaN, or logits that have no softmax."""
    bad = [] if logits_RV is None else [no_softmax(logits_RV)]
    if bool(torch.stack([*bad, *(part.isnan().any() for part in parts)]).any()):
        raise FloatingPointError(nan_message(base))


def nan_message(base: Base) -> str:
    """What a FloatingPointError says."""
    return f"base {base.spec.name!r} or its sampler gave NaN or infinite logits ({base.dtype} on {base.device})"


def _logits_of(
    base: Base, h_BLD: Tensor, canvas: Canvas, row_BN: Tensor, position_BN: Tensor, kept: _Kept | None
) -> Tensor:
    """Logits [B * N, V] of chosen positions; of ones that are not open (invalid picks) any will do."""
    if kept is None:
        return base.logits(h_BLD[row_BN, position_BN].flatten(0, 1), suppress_eos=canvas.config.suppress_eos)
    index_BL, logits_RV = kept
    return logits_RV[index_BL[row_BN, position_BN].flatten()]


def _scores(base: Base, h_BLD: Tensor, canvas: Canvas) -> tuple[Tensor, _Kept | None]:
    """Certainty of every open position, -inf elsewhere: [B, L]; and the logits behind it, if all are at hand."""
    rule = canvas.config.order or base.spec.order
    row_R, position_R = (canvas.open_BL & canvas.busy_B[:, None]).nonzero(as_tuple=True)
    score_BL = torch.full(canvas.tokens_BL.shape, -torch.inf, device=h_BLD.device)
    kept = None
    if rule == "left_to_right":
        score_R = -position_R.float()
    elif rule == "random":
        score_R = canvas.uniforms(position_R, row_R, ORDER).float()
    else:
        score_R, logits_RV = _logit_scores(base, h_BLD, canvas, row_R, position_R)
        if logits_RV is not None:
            index_BL = torch.zeros_like(canvas.tokens_BL)
            index_BL[row_R, position_R] = torch.arange(len(row_R), device=h_BLD.device)
            kept = index_BL, logits_RV
    score_BL[row_R, position_R] = score_R
    return score_BL, kept


def _logit_scores(
    base: Base, h_BLD: Tensor, canvas: Canvas, row_R: Tensor, position_R: Tensor
) -> tuple[Tensor, Tensor | None]:
    config = canvas.config
    on_processed = (config.order_on or base.spec.order_on) == "processed"
    chunk = rows_at_once(base)
    score = row_scorer(compiled=base.compiled)
    parts, logits_RV = [h_BLD.new_empty(0, dtype=torch.float32)], None
    for row, position in zip(row_R.split(chunk), position_R.split(chunk), strict=True):
        logits_RV = None  # one chunk at a time
        logits_RV = base.logits(h_BLD[row, position], suppress_eos=config.suppress_eos)
        u_R = canvas.uniforms(position, row)
        rule = config.order or base.spec.order
        parts.append(score(logits_RV, u_R, rule, on_processed=on_processed, config=config))
    return torch.cat(parts), logits_RV if 0 < len(row_R) <= chunk else None
