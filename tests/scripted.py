"""A base that answers with given texts: all of an evaluation but the model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjust_dlm.eval import downstream
from adjust_dlm.sampling import EVALUATION_ROWS
from tiny_ar import IM_END, chat_base

TAIL = " garbage 99 #### 99 The answer is 99. \\boxed{99}"  # what stands behind the end token, as on a real canvas


def answer_with(monkeypatch: pytest.MonkeyPatch, texts: Sequence[str]) -> list[str]:
    """Makes row n of every decode answer texts[n], an end token and a tail; gives a list that prompts will be in."""
    base = chat_base(context=4096)

    seen: list[str] = []

    def decode(made: Any, prompts: Any, config: Any, *, rows: Sequence[int], **_: Any) -> Any:
        seen.extend(base.tokenizer.decode(ids) for ids in prompts)
        new, tail = config.max_new_tokens, base.tokenizer.encode(TAIL)
        full = [[*base.tokenizer.encode(texts[row - EVALUATION_ROWS]), IM_END, *tail * new][:new] for row in rows]
        calls = torch.full((len(rows),), new)
        return SimpleNamespace(
            tokens_BL=torch.tensor(full), rounds_B=calls, base_calls_B=calls, sampler_calls_B=calls * 0,
            partner_calls_B=calls * 0, rows_B=torch.tensor(list(rows)), config=config, seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr("adjust_dlm.decoders.decode", decode)
    monkeypatch.setattr(downstream, "load_base", lambda *_, **__: base)
    return seen
