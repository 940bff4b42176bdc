"""docs/adding-a-decoder.md: its code runs, is as short as it says, and what it builds is a decoder like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adjust_dlm.decoders import DECODERS, decode
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, MASK, row_of, tiny_base
from test_docs import SNIPPETS, run_block

PAGE = [block for block in SNIPPETS if block.file.name == "adding-a-decoder.md"]


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """The names of the page, all of its blocks run as printed."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in PAGE:
        run_block(block, names)
    yield names
    del DECODERS["cosine"]


def test_the_page_runs_as_printed(page: dict[str, Any]) -> None:
    assert len(PAGE) == 3 and DECODERS["cosine"].run is page["cosine"]


def test_the_decoder_is_under_forty_lines() -> None:
    assert len(Path(PAGE[0].file).read_text().split("```python\n")[1].split("```")[0].strip().splitlines()) < 40


@pytest.mark.parametrize("passes", [1, 3, 5, 20])
def test_what_it_builds_is_a_decoder(page: dict[str, Any], passes: int) -> None:
    base, prompts = tiny_base("dream"), [[BOS, 5], [BOS, MASK, 7, 4], [BOS]]
    config = DecodeConfig(max_new_tokens=9, seed=3)
    whole = decode(base, prompts, config, decoder="cosine", passes=passes)
    assert not (whole.tokens_BL == MASK).any() and int(whole.base_calls_B.max()) <= passes
    for b, prompt in enumerate(prompts):
        assert row_of(decode(base, [prompt], config, decoder="cosine", rows=[b], passes=passes), 0) == row_of(whole, b)


def test_the_schedule_by_hand(page: dict[str, Any]) -> None:
    """10 masks, 4 passes: floor(10 cos(22.5 t)) = 9, 7, 3, 0 are left."""
    fills = []
    base = tiny_base("dream", end_ids=(23,))
    watch = lambda canvas: fills.append(int(canvas.masked_BL.sum()))  # noqa: E731
    decode(base, [[BOS]], DecodeConfig(max_new_tokens=10), decoder="cosine", passes=4, watch=watch)
    assert fills == [9, 7, 3, 0]


def test_its_settings_are_checked(page: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="passes is 0"):
        decode(tiny_base("dream"), [[BOS]], DecodeConfig(), decoder="cosine", passes=0)
    with pytest.raises(InputError, match="it has passes"):
        decode(tiny_base("dream"), [[BOS]], DecodeConfig(), decoder="cosine", steps=3)
    assert torch.is_tensor(page["seen"])
