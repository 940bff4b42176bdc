"""The Triton kernels of a round's bookkeeping, interpreted (or compiled on a card), against the plain forms."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.types import DecodeConfig
from helpers import build

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 5
LANES = pytest.mark.parametrize(("length", "block"), [*itertools.product((1, 7, 16, 33), (None, 4))])


def two_lanes(length: int, seed: int, block: int | None = None) -> tuple[Lane, Lane]:
    """The same random lane twice: for the plain form, for the kernels. Slot 0 is done, slot 1 has no quota left."""
    base, _ = build(DEVICE)
    config, both = DecodeConfig(max_new_tokens=length, block_length=block), []
    for kernels in (False, True):
        generator = torch.Generator().manual_seed(seed)

        def drawn(high: int, *shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(high, shape, generator=generator).to(DEVICE)

        lane = Lane(base, SLOTS, length, padded=True, config=config)
        lane.kernels = kernels
        lane.masked_BL.copy_(drawn(2, SLOTS, length))
        lane.masked_BL[0] = False
        lane.masked_BL[2:, -1] = True
        lane.only_BL.copy_(drawn(3, SLOTS, length) > 0)
        lane.schedule_BL.copy_(drawn(4, SLOTS, length))
        highs = {"quota_B": 3, "commits_B": 40, "rows_B": 2**33, "_first_B": 3, "_round_B": 2 * length}
        for name, high in highs.items():
            getattr(lane, name).copy_(drawn(high, SLOTS))
        lane.seeds_B.copy_(drawn(2**62, SLOTS) - 2**61)
        lane.new_B.fill_(length)
        lane.quota_B[1] = 0
        both.append(lane)
    return both[0], both[1]


@LANES
def test_a_round_begins_as_in_the_plain_form(length: int, block: int | None) -> None:
    for seed in range(4):
        plain, fast = two_lanes(length, seed, block)
        for lane in (plain, fast):
            lane.begin_round()
            lane.begin_round()
        for one, other in zip(plain.buffers(), fast.buffers(), strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@LANES
def test_open_columns_are_those_of_the_plain_form(length: int, block: int | None) -> None:
    for seed in range(4):
        plain, fast = two_lanes(length, seed, block)
        for count in {1, (length + 1) // 2, length}:
            (columns, valid), (got, got_valid) = plain.open_columns(count), fast.open_columns(count)
            assert torch.equal(valid, got_valid) and torch.equal(columns, got)
            assert not valid[:2].any()


@pytest.mark.parametrize("width", [1, 6, 16, 21])
def test_choices_are_those_of_the_plain_form(width: int) -> None:
    """Scores with many ties, infinite ones, and rows with fewer open columns than are asked for."""
    for seed in range(2):
        plain, fast = two_lanes(40, seed)
        column_BN, open_BN = plain.open_columns(width)
        score_BN = torch.randint(4, (SLOTS, width), generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)
        score_BN[score_BN == 3] = -torch.inf
        for count in (1, min(3, width), width):
            want = plain.choose(score_BN, column_BN, open_BN, count)
            got = fast.choose(score_BN, column_BN, open_BN, count)
            for one, other in zip(want, got, strict=True):
                assert torch.equal(one, other) and one.dtype == other.dtype
        assert not plain.bad and not fast.bad
        assert int(want[3].sum()) == int((open_BN & (score_BN > -torch.inf)).sum())
        assert want[3].any() or width == 1


def test_a_choice_notes_nan_where_it_may_choose() -> None:
    for lane in two_lanes(40, 0):
        column_BN, open_BN = lane.open_columns(9)
        assert open_BN[-1].all()
        score_BN = torch.zeros(SLOTS, 9, device=DEVICE)
        lane.choose(score_BN.masked_fill(~open_BN, torch.nan), column_BN, open_BN, 2)
        assert not lane.bad
        score_BN[-1] = torch.nan
        _, index_BC, _, _ = lane.choose(score_BN, column_BN, open_BN, 9)
        assert lane.bad
        assert torch.equal(index_BC.sort(-1).values, torch.arange(SLOTS * 9, device=DEVICE).view(SLOTS, 9))  # each once
