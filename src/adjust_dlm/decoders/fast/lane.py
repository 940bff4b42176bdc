"""A canvas of fixed shape: buffers that captured functions read and write in place, without asking the device.

Everything that decides a token is inherited from `Canvas` or shared with it; what differs is that nothing here depends
on a count that only the device knows. Rows are loaded into slots and stored back; a slot without a row is idle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.layers import Layer
from adjust_dlm.bases.memory import Memory, at_columns, renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.machinery.cache import surplus
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks, columns_of
from adjust_dlm.decoders.machinery.pick import nan_message
from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import DRAW, ORDER, REDRAW, STREAM, wrapped
from adjust_dlm.types import GIVEN, DecodeConfig, State

if TYPE_CHECKING:
    from adjust_dlm.kernels.commit import Draws

_COLUMNS = ("tokens_BL", "real_BL", "masked_BL", "order_BL")
_COUNTS = (
    "rows_B", "seeds_B", "new_B", "commits_B", "base_calls_B", "sampler_calls_B", "rounds_B", "quota_B",
)  # fmt: skip


def _nobody() -> None:
    return None


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton forms of picks can run; without it the plain ones do."""
    return HAS_TRITON and device.type == "cuda"


class Lane(Canvas):
    """B slots of L columns, the last ones new; shorter canvases get more left pads.

    Attributes:
        h_BLD: states now; behind their D columns features, where the base gives them. On a block base they lie in
            `memory`, and steps of g write over those of the open block, which every pass makes anew. Between rounds of
            `verified` they are the canvas' `last_BLD`.
        shape: slots, columns, whether padded, features, and S: lanes of one shape do the same work.
        slot_B: 0 to B - 1.
        kernels: take the Triton forms of what has one.
        schedule_BL: commits of each row's rounds, the last one repeated.
        enters_B: all slots, those first whose rows may have entered a block since their last pass.
        bad: whether a NaN or a row of logits without a softmax was seen.
        noting: write `chance_BL` (see `Canvas`).
        report_N: which slots are open (B), and `bad` (1), after the latest commit; True for a row that came
            since, as rounds of a schedule may commit nothing.
    """

    def __init__(self, base: Base, slots: int, length: int, *, padded: bool, config: DecodeConfig) -> None:
        """All slots idle. `padded=False` promises rows of exactly this length in all of them."""
        super().__init__(base, [[]] * slots, config.but(schedule="exact"), new=[length] * slots)
        self.padded, self.shape = padded, (slots, length, padded, base.keep, base.spec.block)
        self.order_BL.fill_(GIVEN)
        self.kernels = has_kernels(base.device)
        shape, device = (slots, length), base.device
        self.slot_B, self._round_B = torch.arange(slots, device=device), torch.zeros_like(self.rows_B)
        self.schedule_BL = torch.zeros_like(self.tokens_BL)
        self.enters_B = self.slot_B.clone()
        self.bad = torch.zeros((), dtype=torch.bool, device=device)
        self._first_B = torch.zeros_like(self.rows_B)  # first real column
        self._positions_BL = torch.zeros_like(self.tokens_BL)
        streams = range(1 + max(DRAW, ORDER, REDRAW))
        self._offsets = torch.tensor([wrapped(stream * STREAM) for stream in streams], device=device)
        self.chance_BL: Tensor = torch.full(shape, torch.nan, device=device)
        self.report_N = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        wide = base.width * (1 + len(base.keep))
        states_BLD = torch.zeros(slots, length + surplus(base), wide, dtype=base.dtype, device=device)
        self.h_BLD = states_BLD[:, :length]
        if isinstance(base, TransformerBase) and base.spec.block is not None:
            self.memory.kept = [*self._keys(list(base.model.layers), states_BLD), states_BLD]
        self._clean = True
        self._follows: Callable[[], Memory | None] = _nobody  # whose keys and values stand in the first slots,
        self._since = 0  # unless passes have written there since
        self.start(config)

    def start(self, config: DecodeConfig) -> None:
        """Takes the settings of a decode; every slot is idle and holds nothing of earlier rows, or their faults.

        Rows are loaded or looked at behind it, which counts positions anew.
        """
        for part in () if self._clean else (self.h_BLD, *self.memory.kept, *self.sampler_memory.kept):
            part.zero_()  # what is NaN spoils a row even where it is masked
            self.forget()
        self.config, self.noting, self._clean = config, False, False
        self.bad.zero_()
        self.masked_BL.zero_()
        self.only_BL.fill_(True)
        self.tokens_BL.fill_(self.base.spec.pad_id)
        self.real_BL.fill_(True)

    def load(self, canvas: Canvas, rows: list[int], slots: list[int]) -> None:
        """Copies rows of a canvas into slots."""
        index, to = self._index(rows), self._index(slots)
        pad = self.tokens_BL.shape[1] - canvas.tokens_BL.shape[1]
        for name, idle in zip(_COLUMNS, (self.base.spec.pad_id, False, False, GIVEN), strict=True):
            target = getattr(self, name)
            target[to, :pad] = idle
            target[to, pad:] = getattr(canvas, name)[index]
        if canvas.chance_BL is not None:
            self.chance_BL[to, pad:] = canvas.chance_BL[index]
        for name in _COUNTS:
            getattr(self, name)[to] = getattr(canvas, name)[index]
        self._round_B[to] = 0
        self.report_N[to] = True
        if self.memory.kept:
            for mine, theirs in ((self.memory, canvas.memory), (self.sampler_memory, canvas.sampler_memory)):
                mine.counts_B3[to] = theirs.counts_B3[index]
                if self._follows() is not canvas.memory or self._since != canvas.memory.writes:
                    mine.load(to, theirs, index)
        if canvas.last_BLD is not None:  # where drafts may begin; before a row's open block its memory knows better
            here_BL = canvas.real_BL if self.base.spec.block is None else canvas.looked_BL
            here_BL = here_BL & (canvas.commits_B > 0)[:, None]
            old_BLD = self.h_BLD[to, pad:]
            self.h_BLD[to, pad:] = torch.where(here_BL[index][..., None], canvas.last_BLD[index], old_BLD)
        self.forget()
        self._first_B[to] = self.real_BL[to].long().argmax(-1)
        self._count_positions()
        schedule = canvas.schedule
        if isinstance(schedule, int):
            self.schedule_BL[to] = schedule
        else:
            self.schedule_BL[to, : schedule.shape[1]] = schedule[index]
            self.schedule_BL[to, schedule.shape[1] :] = schedule[index, -1:]

    def _index(self, places: list[int]) -> slice | Tensor:
        """Of rows or slots: neighbours as a slice."""
        first, last = places[0], places[-1]
        if places == list(range(first, last + 1)):
            return slice(first, last + 1)
        pages = torch.tensor(places, pin_memory=self.tokens_BL.is_cuda)  # a copy that waits for nothing
        return pages.to(self.tokens_BL.device, non_blocking=True)

    def forget(self) -> None:
        """The keys and values in the first slots are no longer those of the canvas that was given them last."""
        self._follows = _nobody

    def store(self, canvas: Canvas, rows: list[int], slots: list[int]) -> None:
        """Copies slots back into the rows of the canvas that they came from."""
        length, index, of = canvas.tokens_BL.shape[1], self._index(rows), self._index(slots)
        for name in _COLUMNS:
            getattr(canvas, name)[index] = getattr(self, name)[of, -length:]
        for name in _COUNTS:
            getattr(canvas, name)[index] = getattr(self, name)[of]

    def look(self, state: State) -> None:
        """Takes into the first slots what passes and steps see of a state; everything else is idle and finite."""
        rows, length = state.tokens_BL.shape
        self.real_BL[:rows, :-length] = False
        self.tokens_BL[:rows, -length:] = state.tokens_BL
        self.real_BL[:rows, -length:] = state.real_BL
        self._count_positions()
        self.h_BLD.zero_()

    def give(self, canvas: Canvas, *, drafts: bool = False) -> None:
        """Copies the first slots back into all rows of the canvas that they were loaded from.

        With the last states, if its next round `drafts` from them.
        """
        count, length = canvas.tokens_BL.shape
        columns = (*_COLUMNS, *(("chance_BL",) if self.noting else ()))
        new = {name: getattr(self, name)[:count, -length:].clone() for name in columns}
        new |= {name: getattr(self, name)[:count].clone() for name in _COUNTS}
        new |= {"last_BLD": self.h_BLD[:count, -length:].clone()} if drafts else {}
        known = [(getattr(canvas, name), getattr(self, name)) for name in ("memory", "sampler_memory")]
        counts = [mine.counts_B3[:count].clone() for _, mine in known]
        if self.memory.kept:
            self._give_keys(canvas, known)
        vars(canvas).update(new)  # all or, for want of memory, nothing
        if self.memory.kept:
            for (theirs, _), counts_B3 in zip(known, counts, strict=True):
                theirs.counts_B3 = counts_B3
            self._follows, self._since = weakref.ref(canvas.memory), canvas.memory.writes

    def _give_keys(self, canvas: Canvas, known: list[tuple[Memory, Memory]]) -> None:
        """Of a round on a block base: two blocks from what was final; what is not final is made anew in any case."""
        count, length = canvas.tokens_BL.shape
        first_B = canvas.real_BL.long().argmax(-1)
        two_N = torch.arange(2 * (self.base.spec.block or 1), device=first_B.device)
        for theirs, mine in known:
            lacks = self.tokens_BL.shape[1] - length
            parts = [part[:count, lacks:] for part in mine.kept]
            if parts and not theirs.kept:
                theirs.kept, theirs.width = [part.clone() for part in parts], parts[0].shape[1]
                continue
            column_BN = (first_B + theirs.counts_B3[:, 0])[:, None] + two_N
            for old, part in zip(theirs.kept, parts, strict=False):
                width = part.shape[1]
                if len(two_N) >= width:
                    old.copy_(part)
                else:
                    renew(old, at_columns(part, column_BN % width), column_BN % width)

    def refuse_nan(self) -> None:
        """Raises FloatingPointError once a NaN was seen (waits for the device)."""
        if bool(self.bad):
            raise FloatingPointError(nan_message(self.base))
        self._clean = True

    def take(self, other: Lane, slots: list[int]) -> None:
        """Copies slots of another lane of the same length into the first ones."""
        self.load(other, slots, list(range(len(slots))))
        index = self._index(slots)
        self.h_BLD[: len(slots)] = other.h_BLD[index]
        self._round_B[: len(slots)] = other._round_B[index]
        self.bad.copy_(other.bad)

    @property
    def schedule(self) -> Tensor:
        """See `Canvas.schedule`."""
        return self.schedule_BL

    def _count_positions(self) -> None:
        self._positions_BL.copy_(super().positions_BL)

    @property
    def positions_BL(self) -> Tensor:
        """As `State.positions_BL`, kept: they change with the rows alone, and every pass and step asks for them."""
        return self._positions_BL

    def buffers(self) -> list[Tensor]:
        """What a function of the lane may write, but for keys and values: these are the same after a second run."""
        kept = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return [*kept, self.memory.counts_B3, self.sampler_memory.counts_B3]

    @property
    def held(self) -> int:
        """Bytes of all that is kept."""
        kept = [part.untyped_storage() for part in (*self.buffers(), *self.memory.kept, *self.sampler_memory.kept)]
        return sum({part.data_ptr(): part.nbytes() for part in kept}.values())

    def need_keys(self, sampler: Sampler) -> None:
        """Makes the buffers of g's keys and values, once for all g of as many layers."""
        if len(self.sampler_memory.kept) != len(sampler.layers):
            self.forget()
            self.sampler_memory.kept = self._keys([one.layer for one in sampler.layers], self.h_BLD)

    @staticmethod
    def _keys(layers: list[Layer], states_BLD: Tensor) -> list[Tensor]:
        """Zeros for the keys and values of each layer, as wide as `Memory` has them."""
        shapes = [layer.self_attn.shape for layer in layers]
        widths = [2 * shape.num_key_value_heads * shape.head_dim for shape in shapes]
        return [states_BLD.new_zeros(*states_BLD.shape[:2], width) for width in widths]

    def begin_round(self) -> None:
        """As `Canvas.start_round`, from the schedule in the buffers."""
        if self.kernels:
            from adjust_dlm.kernels.commit import begin

            begin(
                self._block_BL, self.only_BL, self.schedule_BL, self._round_B, self.commits_B,
                self._before_B, self.quota_B, self.base_calls_B, self.rounds_B,
            )  # fmt: skip
            return
        at_B = self._round_B.clamp_max(self.schedule_BL.shape[1] - 1)
        self._begin(self.schedule_BL.gather(1, at_B[:, None])[:, 0])
        self._round_B += 1

    def start_round(self, wanted_B: Tensor | None = None, *, same_pass: bool = False) -> int:
        """As `Canvas.start_round`, for one commit of open rows alone, anywhere in their blocks: nobody is asked."""
        assert wanted_B is not None
        self.quota_B.copy_(wanted_B)
        if not same_pass:
            self.base_calls_B += wanted_B
            self.rounds_B += wanted_B
        return 1

    def commit(self, picks: Picks) -> None:
        """See `Canvas.commit`."""
        if self.kernels:
            from adjust_dlm.kernels.commit import commit

            commit(
                self.tokens_BL, self.order_BL, self.masked_BL, self.commits_B, self.quota_B, self._ends_E,
                picks.position_BN, picks.token_BN, picks.valid_BN, self.report_N, self.bad, self.base.spec.filler_id,
            )  # fmt: skip
        else:
            super().commit(picks)
            self.report_N.copy_(torch.cat([self.open_B, self.bad[None]]))

    def open_columns(self, count: int) -> tuple[Tensor, Tensor]:
        """`columns_of` what may be committed now, in rows with commits left."""
        if self.kernels:
            from adjust_dlm.kernels.commit import open_columns

            return open_columns(self._block_BL, self.only_BL, self.quota_B, count)
        return columns_of(self.open_BL & self.busy_B[:, None], count)

    def choose(
        self, score_BN: Tensor, column_BN: Tensor, open_BN: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The `count` best open columns of each row, best first, the first of equals; notes a NaN.

        Returns:
            Columns, their indices among all scores, uniforms for their draws, and which of them are open, all [B, C].
        """
        if self.kernels:
            from adjust_dlm.kernels.commit import choose

            return choose(score_BN, open_BN, column_BN, count, self._draws(DRAW), self.bad)
        score_BN = torch.where(open_BN, score_BN, -torch.inf)
        self.bad |= score_BN.isnan().any()
        best_BC = score_BN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        position_BC, row_BC = column_BN.gather(1, best_BC), self.slot_B[:, None].expand_as(best_BC)
        u_BC, valid_BC = self.uniforms(position_BC, row_BC), score_BN.gather(1, best_BC) > -torch.inf
        return position_BC, row_BC * score_BN.shape[1] + best_BC, u_BC, valid_BC

    def uniforms(self, position: Tensor, row: Tensor, stream: int = DRAW) -> Tensor:
        """See `Canvas.uniforms`."""
        if self.kernels:
            from adjust_dlm.kernels.commit import uniforms

            return uniforms(self._draws(stream), row, position).view(position.shape)
        return super().uniforms(position, row, stream)

    def _draws(self, stream: int) -> Draws:
        from adjust_dlm.kernels.commit import Draws

        return Draws(self.seeds_B, self._offsets[stream], self.rows_B, self.commits_B, self._first_B)

    def _counters(self, position: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.seeds_B[row], self.rows_B[row], self.commits_B[row], position - self._first_B[row]
