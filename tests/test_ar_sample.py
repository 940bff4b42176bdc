"""Samples of an autoregressive model: what a row holds does not depend on what is asked beside it."""

from typing import Any

import pytest
import torch

from adjust_dlm.data import ar
from adjust_dlm.data.ar import ar_sample
from adjust_dlm.sampling import draw, process, uniform
from adjust_dlm.types import DecodeConfig, InputError
from tiny_ar import IM_END, tiny_model

# Of lengths 3 to 141; with 70 new tokens the last one has a batch of its own.
PROMPTS = [[4 + (7 * n + 3 * i) % 96 for i in range(length)] for n, length in enumerate((9, 3, 70, 12, 9, 40, 141, 72))]
ROWS = [5, 900, 17, 2**41, 3, 4, 0, 8]
HOW: dict[str, Any] = {"new_tokens": 70, "seed": 3, "temperature": 1.2, "top_p": 1.0}


def up_to(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """A row up to and with its first end."""
    return row[: next((n for n, token in enumerate(row, 1) if token in ends), None)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and columns of each pass."""
    seen: list[tuple[int, int]] = []
    forward = ar._forward

    def spy(body: Any, tokens_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        seen.append((tokens_BT.shape[0], tokens_BT.shape[1]))
        h_BD = forward(body, tokens_BT, cache)
        assert all(len(kept_BHTE) == len(tokens_BT) for pair in cache.buffers.values() for kept_BHTE in pair)
        return h_BD

    monkeypatch.setattr(ar, "_forward", spy)
    return seen


@pytest.mark.parametrize("ends", [(), (IM_END, 9, 30)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_row_is_the_same_alone_and_beside_any_others(
    family: str, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    alone = [
        ar_sample(model, [prompt], rows=[row], batch_size=1, **HOW)[0]
        for prompt, row in zip(PROMPTS, ROWS, strict=True)
    ]
    assert [len(row) for row in alone] == [70] * 8 and len(set(map(tuple, alone))) == 8
    wanted = [up_to(row, ends) for row in alone]
    assert not ends or len({len(row) // 32 for row in wanted}) > 1  # some rows leave before the others
    monkeypatch.setattr(ar, "HEAD_ROWS", 3)
    for batch_size in (2, 3, 8):
        assert ar_sample(model, PROMPTS, rows=ROWS, batch_size=batch_size, end_ids=ends, **HOW) == wanted
        back = ar_sample(model, PROMPTS[::-1], rows=ROWS[::-1], batch_size=batch_size, end_ids=ends, **HOW)
        assert back == wanted[::-1]


def test_a_token_is_drawn_with_the_uniform_of_its_row_and_its_number() -> None:
    """As in a loop without a cache; numbers count from the first new token."""
    model, settings = tiny_model(), DecodeConfig(temperature=1.2, top_p=0.9)
    how: dict[str, Any] = {**HOW, "new_tokens": 5, "top_p": 0.9}
    for prompt, row, made in zip(PROMPTS, ROWS, ar_sample(model, PROMPTS, rows=ROWS, batch_size=8, **how), strict=True):
        for number in range(5):
            logits_1V = model(input_ids=torch.tensor([prompt + made[:number]])).logits[:, -1]
            u_1 = uniform(3, *torch.tensor([[row], [number], [number]]))
            assert made[number] == int(draw(process(logits_1V, settings), u_1, settings.temperature))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_rows_are_those_of_transformers(family: str) -> None:
    model = tiny_model(family)
    got = ar_sample(model, PROMPTS, rows=ROWS, batch_size=8, end_ids=[IM_END], forbid=[7], **{**HOW, "temperature": 0})
    for prompt, row in zip(PROMPTS, got, strict=True):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=70, do_sample=False, suppress_tokens=[7])
        assert row == made[0, len(prompt) :].tolist()
        assert row[-1] == IM_END or len(row) == 70


def test_samples_of_one_prompt_differ_by_row_and_are_read_once_a_batch(
    passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, how = tiny_model(), {"new_tokens": 40, "seed": 5}
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(tuple(x.shape)) or tolist(x))
    seven, three = (ar_sample(model, [[1, 5]] * 7, rows=range(7), batch_size=b, **how) for b in (7, 3))
    assert read == [(7, 40), (3, 40), (3, 40), (1, 40)]
    assert passes == [(rows, 2 if step == 0 else 1) for rows in (7, 3, 3, 1) for step in range(40)]
    assert seven == three and len(set(map(tuple, seven))) == 7
    assert seven[5:] == ar_sample(model, [[1, 5]] * 2, rows=[5, 6], batch_size=2, **how)
    assert seven != ar_sample(model, [[1, 5]] * 7, rows=range(7), batch_size=7, new_tokens=40, seed=6)


def test_rows_that_have_ended_leave_the_batch(passes: list[tuple[int, int]]) -> None:
    """Every 32 passes, also where the others still read; a prompt that is too long for a batch begins the next."""
    model, prompts = tiny_model(), [PROMPTS[n] for n in (1, 2, 1, 6)]  # 3, 70, 3 and 141 tokens
    made = ar_sample(model, prompts, rows=range(4), batch_size=8, end_ids=range(104), **HOW)
    assert [len(row) for row in made] == [1] * 4  # every token ends
    first = [(3, 3), *[(3, 1)] * 31, *[(1, 1)] * 64]  # the 68th pass draws the long one's token; the look is at 96
    assert passes == [*first, (1, 141), *[(1, 1)] * 31]
    passes.clear()
    assert all(
        len(row) == 20 for row in ar_sample(model, prompts[:2], rows=(0, 1), batch_size=8, **{**HOW, "new_tokens": 20})
    )
    assert [passes[n] for n in (0, 20)] == [(1, 3), (1, 70)] and len(passes) == 40
    passes.clear()
    ar_sample(model, [PROMPTS[n] for n in (1, 5)], rows=(0, 1), batch_size=8, **{**HOW, "new_tokens": 50})
    assert passes == [(2, 3), *[(2, 1)] * 63, *[(1, 1)] * 23]  # without ends a row leaves when it is full


def test_what_cannot_be_sampled_is_refused() -> None:
    model, how = tiny_model(), {"new_tokens": 2, "seed": 0}
    assert ar_sample(model, [], rows=[], batch_size=1, **how) == []
    with pytest.raises(InputError, match="a prompt is empty; a causal model needs at least one token"):
        ar_sample(model, [[1], []], rows=[0, 1], batch_size=1, **how)
    with pytest.raises(InputError, match="2 prompts need as many row ids, not 1"):
        ar_sample(model, [[1], [2]], rows=[0], batch_size=1, **how)
    with pytest.raises(InputError, match="batch_size is 0; it must be at least 1"):
        ar_sample(model, [[1]], rows=[0], batch_size=0, **how)
