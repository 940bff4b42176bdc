"""Adaptation to a block base: what is masked where, the loss by hand, and a folder that loads as the trained model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adjust_dlm.bases import load_base
from adjust_dlm.bases.autoregressive import read_vocabulary
from adjust_dlm.data.corpus import Corpus
from adjust_dlm.decoders import decode
from adjust_dlm.train.adapt import AdaptConfig, AdaptTrainer, adapt
from adjust_dlm.train.adapter import AdapterModel
from adjust_dlm.train.canvas_batches import CanvasBatches
from adjust_dlm.train.masked_ce import (
    block_batch,
    block_views_mask,
    ce_chunk,
    group_batch,
    hidden_in_views,
    masked_batch,
    next_positions,
    open_positions,
    taught_chunk,
)
from adjust_dlm.types import DecodeConfig, InputError
from helpers import left_pad
from tiny_ar import BOS, IM_END, MASK, save_tiny, tiny_model, tiny_tokenizer

SIZE, LENGTH = 4, 12
ONE = {"text": 1.0, "chat": 0.0, "lists": 0.0, "files": 0.0}


@pytest.fixture(autouse=True)
def _light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def live_adapter(family: str = "llama") -> AdapterModel:
    model = tiny_model(family)
    words = read_vocabulary(tiny_tokenizer(), model.config)
    adapter = AdapterModel(model, words, rank=4, alpha=8, seed=3, source="tiny", block=SIZE)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapter.trainables().items():
            if "lora_A" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def canvases(rows: int = 6) -> tuple[Tensor, Tensor]:
    """Texts of prompts of 1 to 5 tokens; every second one ends early."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(4, 100, (rows, LENGTH), generator=generator)
    tokens_BL[:, 0] = BOS
    for b in range(0, rows, 2):
        tokens_BL[b, 5 + b % 4 :] = IM_END
    return tokens_BL, 1 + torch.arange(rows) % 5


def both(masked_BL: Tensor) -> Tensor:
    return torch.stack([masked_BL, ~masked_BL], 1)


def longhand(adapter: AdapterModel, tokens_BL: Tensor, open_BL: Tensor, masked_BL: Tensor, weight: float) -> Tensor:
    """Every open position once: by a pass over the clean text before its block and its block as that view has it."""
    total, head_VD = torch.zeros(()), adapter.body.embed_tokens.weight
    for tokens_L, open_L, masked_L in zip(tokens_BL, open_BL, masked_BL, strict=True):
        for i in open_L.nonzero()[:, 0].tolist():
            first = i // SIZE * SIZE
            if i == first:  # scored by the last column of the clean block before it
                tokens, hidden = tokens_L[:i], torch.zeros(i, dtype=torch.bool)
            else:
                hides_L = masked_L & open_L if masked_L[i] else open_L & ~masked_L
                tokens = tokens_L[: first + SIZE]
                hidden = torch.where(torch.arange(first + SIZE) < first, False, hides_L[: first + SIZE])
            h_LD = by_blocks(adapter, tokens, hidden)
            row_V = (h_LD[i - 1] @ head_VD.T).index_fill(0, torch.tensor([MASK, *range(100, 104)]), -torch.inf)
            total = total - weight * row_V.log_softmax(-1)[tokens_L[i]]
    return total


def by_blocks(adapter: AdapterModel, tokens_L: Tensor, hidden_L: Tensor) -> Tensor:
    """States of a text under the block mask, by the layers themselves."""
    body, length = adapter.body, len(tokens_L)
    block_L = torch.arange(length) // SIZE
    mask = (block_L[None] <= block_L[:, None])[None, None]
    e_LD = torch.where(hidden_L[:, None], adapter.mask_D, body.embed_tokens(tokens_L))
    rotary = body.rotary_emb(e_LD, torch.arange(length)[None])
    h_BLD = e_LD[None]
    for layer in body.layers:
        h_BLD = layer(h_BLD, mask, None, None, False, rotary)
    return body.norm(h_BLD)[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loss_and_gradients_are_those_of_every_position_by_hand(family: str) -> None:
    adapter = live_adapter(family)
    tokens_BL, prompt_B = canvases()
    open_BL = open_positions(tokens_BL, prompt_B, (IM_END, BOS), SIZE)
    masked_BL = torch.rand(open_BL.shape, generator=torch.Generator().manual_seed(4)) < 0.5
    loss = adapter.loss(
        block_batch(tokens_BL, open_BL, both(masked_BL), torch.full((6, 3, LENGTH), 0.1), SIZE, chunk=7)
    )
    naive = longhand(adapter, tokens_BL, open_BL, masked_BL, 0.1)
    torch.testing.assert_close(loss, naive, rtol=1e-5, atol=1e-5)
    parameters = list(adapter.trainables().values())
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(naive, parameters), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


def test_columns_are_those_of_the_saved_base(tmp_path: Path) -> None:
    """Of the clean half, and of each block of a view behind the clean text; no column of a row is left out."""
    adapter, (tokens_BL, prompt_B) = live_adapter(), canvases()
    open_BL = open_positions(tokens_BL, prompt_B, (IM_END, BOS), SIZE)
    masked_BL = torch.rand(open_BL.shape, generator=torch.Generator().manual_seed(4)) < 0.5
    batch = block_batch(tokens_BL, open_BL, both(masked_BL), torch.ones(6, 3, LENGTH), SIZE)
    base = saved(adapter, config(tmp_path))
    merged = base.model.state_dict()
    with torch.no_grad():
        for name, weight in adapter.body.named_parameters():  # rounded to bf16 as they are merged, so that all is exact
            known = merged.get(name.replace(".base_layer", ""))
            weight.copy_(torch.zeros(()) if known is None else known)
        states = adapter.states(batch.tokens_BL, batch.masked_BL).view(6, 3, LENGTH, -1)
    shown = torch.where(batch.masked_BL, MASK, batch.tokens_BL).view(6, 3, LENGTH)
    found, asked = [states[:, 0]], [base.hidden(left_pad(tokens_BL.tolist(), MASK))]
    for first in range(0, LENGTH, SIZE):
        for view in (1, 2):
            canvas = torch.cat([tokens_BL[:, :first], shown[:, view, first : first + SIZE]], 1)
            found.append(states[:, view, first : first + SIZE])
            asked.append(base.hidden(left_pad(canvas.tolist(), MASK))[:, first:])
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(asked, 1), rtol=0, atol=1e-5)


def test_short_canvases_share_passes_that_end_with_the_longest() -> None:
    """In quarters of nine blocks, which are three but for the last; the loss is that of one pass over all."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL, prompt_B = torch.randint(4, 100, (16, 36), generator=generator), torch.full((16,), 2)
    for b in range(15):
        tokens_BL[b, 4 + 2 * b :] = IM_END  # the last one fills the canvas
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(16, dtype=torch.int8))
    how: dict[str, Any] = {"batch_size": 16, "seed": 4, "block": SIZE, "end_ids": (IM_END, BOS), "suffix": 0.5}
    adapter = live_adapter("qwen2")
    batches = CanvasBatches(corpus, ONE, **how)
    (whole,), parts = batches.step(2, 16), batches.step(2, 2)
    wide = [part.tokens_BL.shape[1] // 3 for part in parts]
    assert wide == [12, 12, 24, 24, 24, 36, 36, 36] and whole.tokens_BL.shape[1] == 3 * 36
    torch.testing.assert_close(sum(map(adapter.loss, parts)), adapter.loss(whole), rtol=1e-5, atol=1e-5)


def test_what_is_open() -> None:
    """All behind the prompt, to the edge of the block in which the text ends."""
    tokens = torch.tensor(
        [[BOS, 9, 9, IM_END, *[IM_END] * 8], [BOS, 9, 9, 9, 9, IM_END, *[IM_END] * 6], [BOS, *[9] * 11]]
    )
    shown = open_positions(tokens, torch.tensor([1, 2, 6]), (IM_END, BOS), SIZE).int().tolist()
    assert shown == [
        [0, 1, 1, 1, *[0] * 8], [0, 0, *[1] * 6, *[0] * 4], [*[0] * 6, *[1] * 6],
    ]  # fmt: skip


def test_views_hide_complements_and_a_batch_is_one_mean() -> None:
    tokens_BL, prompt_B = canvases(8)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(8, dtype=torch.int8))
    how: dict[str, Any] = {"batch_size": 8, "seed": 4, "block": SIZE, "end_ids": (IM_END, BOS)}
    whole = CanvasBatches(corpus, ONE, **how).step(3, 8)[0]
    clean, a, b = whole.masked_BL.split(LENGTH, 1)
    tokens = whole.tokens_BL[:, :LENGTH]
    prompts = {tuple(t.tolist()): int(p) for t, p in zip(tokens_BL, prompt_B, strict=True)}
    given = torch.tensor([prompts[tuple(t.tolist())] for t in tokens])
    open_BL = open_positions(tokens, given, (IM_END, BOS), SIZE)
    assert not clean.any() and torch.equal(a ^ b, open_BL) and not (a & b).any()
    assert torch.equal(whole.tokens_BL, tokens.repeat(1, 3))
    counted = whole.weights_R > 0
    assert int(counted.sum()) == int(open_BL.sum())  # each open position once
    assert whole.weights_R[counted].sum().item() == pytest.approx(1)
    parts = [p for rank in (0, 1) for p in CanvasBatches(corpus, ONE, rank=rank, world=2, **how).step(3, 2)]
    assert len(parts) == 4
    adapter = live_adapter()
    assert sum(adapter.loss(p).item() for p in parts) == pytest.approx(adapter.loss(whole).item(), rel=1e-5)


def test_rates_are_spread_over_the_blocks() -> None:
    tokens_BL = torch.full((256, LENGTH), 9)
    tokens_BL[:, 0] = BOS
    corpus = Corpus(tokens_BL.int(), torch.ones(256).short(), torch.zeros(256, dtype=torch.int8))
    batch = CanvasBatches(corpus, ONE, batch_size=256, seed=1, block=SIZE, end_ids=(IM_END,)).step(0, 256)[0]
    share = batch.masked_BL[:, LENGTH : 2 * LENGTH].view(256, 3, SIZE)[:, 1:].float().mean(-1).flatten()
    assert abs(float(share.mean()) - 0.5) < 0.02
    # Of 4 positions at a uniform rate every count 0..4 is equally likely.
    counts = (share * SIZE).round().int().bincount(minlength=5)
    assert all(abs(int(n) - 512 / 5) < 5 * (512 / 5) ** 0.5 for n in counts)


def test_suffixes_of_the_blocks() -> None:
    """Two views hide all from a cut on: half a block apart, every cut alike often, in the share of blocks asked for."""
    hidden_B2L = hidden_in_views(4096, LENGTH, SIZE, 0.75, torch.Generator().manual_seed(2))
    a, b = hidden_B2L.view(4096, 2, -1, SIZE).unbind(1)
    suffixes = torch.arange(SIZE) >= torch.arange(SIZE)[:, None]
    cut = (a[..., None, :] == suffixes).all(-1)  # [B, J, S]: a suffix that begins there
    opposite = (b[..., None, :] == suffixes.roll(-SIZE // 2, 0)).all(-1)
    found = (cut & opposite).any(-1)
    others = ~found & ~(a ^ b).all(-1)
    assert not others.any()  # all else are a rate and its complement
    # Of four positions at a uniform rate none is a suffix whose opposite stands half a block on: both hide the last.
    assert found.float().mean().item() == pytest.approx(0.75, abs=0.02)
    counts = cut[found].sum(0)
    assert counts.sum() == found.sum() and (counts / found.sum() - 1 / SIZE).abs().max() < 0.02


def test_the_next_position_of_every_block() -> None:
    at, behind = next_positions(4096, LENGTH, SIZE, torch.Generator().manual_seed(2))
    blocks_at, blocks = at.view(-1, SIZE), behind.view(-1, SIZE)
    assert (blocks_at.sum(-1) == 1).all() and torch.equal(blocks, blocks_at.cumsum(-1) > 0)
    assert (blocks_at.float().mean(0) - 1 / SIZE).abs().max() < 0.02


def test_next_is_what_the_base_says_from_left_to_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all cuts `next` is the mean of -log p(x_i | all before it), the base's own, with the block from i on hidden.

    It has every position behind a prompt up to the token that ends the text.
    """
    adapter, (tokens_BL, prompt_B) = live_adapter(), canvases(5)  # a pass of four has to be filled
    run = config(tmp_path, length=LENGTH, share_text=1.0)
    base = saved(adapter, run)
    part = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(5, dtype=torch.int8))
    batches = CanvasBatches(part, ONE, batch_size=8, seed=1, block=SIZE, end_ids=(IM_END, BOS))
    trainer = AdaptTrainer(run, adapter, batches, {"ce": part})
    place_NL, found = (torch.arange(LENGTH) % SIZE).expand(5, -1), torch.zeros(SIZE, 2, dtype=torch.float64)
    for cut in range(SIZE):
        drawn = (place_NL == cut, place_NL >= cut)
        monkeypatch.setattr("adjust_dlm.train.adapt.next_positions", lambda *_, drawn=drawn: drawn)
        found[cut] = trainer._masked_ce(part, -1.0, 0)
    asked = torch.zeros(SIZE, 2, dtype=torch.float64)
    for row, prompt in zip(tokens_BL.tolist(), prompt_B.tolist(), strict=True):
        ends = [i for i in range(prompt, LENGTH) if row[i] in (IM_END, BOS)]
        for i in range(prompt, ends[0] + 1 if ends else LENGTH):
            state = left_pad([row[:i] + [MASK] * (SIZE - i % SIZE)], MASK)
            h_RD = base.at(base.hidden(state), state, torch.tensor([0]), torch.tensor([i]))
            asked[i % SIZE] += torch.tensor([-float(base.logits(h_RD).log_softmax(-1)[0, row[i]]), 1])
    torch.testing.assert_close(found, asked, rtol=5e-3, atol=0)  # its merged weights are bf16, too


def test_the_mask_of_the_views() -> None:
    mask = block_views_mask(4, 2)[0, 0].int()
    clean, a, b = mask.split(4)
    assert clean.tolist() == [[1, 1, 0, 0] + [0] * 8] * 2 + [[1] * 4 + [0] * 8] * 2
    assert a.tolist() == [[0] * 4 + [1, 1, 0, 0] + [0] * 4] * 2 + [[1, 1, 0, 0, 0, 0, 1, 1] + [0] * 4] * 2
    assert b.tolist() == [[0] * 8 + [1, 1, 0, 0]] * 2 + [[1, 1, 0, 0] + [0] * 4 + [0, 0, 1, 1]] * 2


def config(tmp_path: Path, name: str = "out", **changes: Any) -> AdaptConfig:
    ar, text = tmp_path / "ar", tmp_path / "text.txt"
    if not ar.is_dir():
        save_tiny(ar)
        text.write_text("the cat sat on the mat and " * 200)
    fields: dict[str, Any] = {
        "ar": str(ar), "output": tmp_path / name, "text": 16, "chat": 0, "lists": 0, "heldout": 8,
        "text_files": (text,), "length": 20, "batch_size": 8, "micro_batch": 4, "steps": 60, "lora_rank": 4,
        "lora_alpha": 4, "lr": 1e-2, "warmup": 2, "log_every": 2, "share_files": 1.0, "block_size": SIZE,
    }  # fmt: skip
    return AdaptConfig(**{**fields, **changes})


def saved(adapter: AdapterModel, run: AdaptConfig, *, causal: bool = False) -> Any:
    """The base in a folder that the adapter writes, which from now on has its values as the folder has them."""
    for parameter in adapter.trainables().values():
        parameter.data = parameter.data.bfloat16().float()
    facts = {"ar": str(run.ar), "mask_id": MASK, "end_ids": [IM_END, BOS], "pad_id": IM_END, "bos_id": BOS}
    facts |= {"token_limit": 100, "context": 64, "order": "left_to_right", "order_on": "raw", "block": SIZE}
    adapter.save(run.output, {**facts, "masks_alone": causal})
    return load_base(str(run.output))


def test_a_run_learns_and_its_folder_is_the_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[AdapterModel] = []
    init = AdaptTrainer.__init__

    def keeping(self: AdaptTrainer, settings: AdaptConfig, adapter: AdapterModel, *rest: Any) -> None:
        kept.append(adapter)
        init(self, settings, adapter, *rest)

    monkeypatch.setattr(AdaptTrainer, "__init__", keeping)
    run = config(tmp_path)
    result = adapt(run)
    lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert set(result["ce"]["files"]) == {"0.15", "0.5", "0.85", "1.0", "first", "next"}
    for rate in ("0.5", "first", "next"):
        assert result["ce"]["files"][rate] < lines[0]["ce"]["files"][rate] - 0.5
    base = load_base(str(run.output))
    assert (base.spec.block, base.spec.causal, base.lag) == (SIZE, False, 1)
    assert "masks_alone" not in json.loads((run.output / "base.json").read_text())
    tokens_BL, _ = canvases(3)
    masked_BL = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    masked_BL[:, :-SIZE] = False  # clean blocks, then one that is half there
    h_BLD = base.hidden(left_pad(torch.where(masked_BL, MASK, tokens_BL).tolist(), MASK))
    kept[0].cpu().float()  # it was trained on a card where there is one
    with torch.no_grad():
        trained = torch.stack([by_blocks(kept[0], t, m) for t, m in zip(tokens_BL, masked_BL, strict=True)])
    assert (h_BLD - trained).norm() / trained.norm() < 0.02  # the folder's weights are rounded to bf16
    out = decode(base, [[BOS]], DecodeConfig(max_new_tokens=10), decoder="joint")
    assert MASK not in out.tokens_BL


@pytest.mark.parametrize("causal", [False, True])
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, causal: bool
) -> None:
    kind = {"causal": True} if causal else {"suffix": 0.5}
    more: dict[str, Any] = {"steps": 8, "order": "left_to_right", **kind}
    adapt(config(tmp_path, "whole", **more))
    step = AdaptTrainer._train_step

    def killed_in_step_4(self: AdaptTrainer) -> None:
        step(self)
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    parts = config(tmp_path, "parts", **more, corpus=tmp_path / "whole" / "corpus")
    with monkeypatch.context() as patch:
        patch.setattr(AdaptTrainer, "_train_step", killed_in_step_4)
        assert adapt(parts)["step"] == 4
    assert adapt(parts)["step"] == 8
    whole, cut = (load_file(tmp_path / run / "adapter_model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    with pytest.raises(InputError, match="block_size was 4 and is now 2"):
        adapt(config(tmp_path, "parts", **more, corpus=tmp_path / "whole" / "corpus", block_size=2))
    told = ("True", "None") if causal else ("None", "True")
    with pytest.raises(InputError, match=f"holds a corpus with own_template = {told[0]}, not {told[1]}"):
        now = {"causal": not causal, "suffix": 0.0}
        adapt(config(tmp_path, "parts", **more | now, corpus=tmp_path / "whole" / "corpus"))


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="length is 129; with block_size 16 it must be a multiple of that, such as 128"
    ):
        AdaptConfig(output=tmp_path, block_size=16)
    with pytest.raises(InputError, match="block_size is 0"):
        AdaptConfig(output=tmp_path, block_size=0)
    with pytest.raises(InputError, match="causal is true; such blocks are written from left to right: give block_size"):
        AdaptConfig(output=tmp_path, causal=True)
    with pytest.raises(InputError, match="give block_size above 1"):
        AdaptConfig(output=tmp_path, causal=True, block_size=1, length=128, order="left_to_right")
    with pytest.raises(InputError, match="give block_size above 1, order left_to_right"):
        AdaptConfig(output=tmp_path, causal=True, block_size=16, length=128)
    left: dict[str, Any] = {"block_size": 16, "length": 128, "causal": True, "order": "left_to_right"}
    with pytest.raises(InputError, match=r"suffix is 0\.5; causal blocks hide what stands behind a position"):
        AdaptConfig(output=tmp_path, suffix=0.5, **left)


@pytest.mark.parametrize(("block", "causal"), [(None, False), (8, False), (8, True)])
def test_compiled_layers_share_one_graph_and_change_nothing(
    block: int | None, monkeypatch: pytest.MonkeyPatch, *, causal: bool
) -> None:
    import torch._dynamo as dynamo

    def model_of(compiled: bool) -> AdapterModel:
        model = tiny_model()
        words = read_vocabulary(tiny_tokenizer(), model.config)
        adapter = AdapterModel(model, words, rank=4, alpha=4, seed=0, source="x", block=block)
        if compiled:
            plain = torch.nn.Module.compile
            monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, **how, backend="aot_eager"))
            adapter.compile_passes()
            adapter._chunk, adapter._taught_chunk = ce_chunk, taught_chunk  # their compiler needs none of the layers
        return adapter

    tokens_BL = torch.randint(4, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    masked_BL = (torch.arange(16) % 3 == 1).expand(2, -1)
    if block is None:
        batch = masked_batch(tokens_BL, masked_BL, torch.ones(2))
    elif causal:
        cut_BG, weights_BGN = torch.tensor([[2], [5]]), (torch.arange(9) > 0).expand(2, 1, -1)
        batch = group_batch(tokens_BL, cut_BG, weights_BGN, taught=True)
    else:
        weights_B3L, open_BL = torch.ones(2, 3, 16), (torch.arange(16) > 0).expand(2, -1)
        batch = block_batch(tokens_BL, open_BL, both(masked_BL), weights_B3L, block)
    dynamo.reset()
    dynamo.utils.counters.clear()
    losses, gradients = [], []
    for compiled in (False, True):
        adapter = model_of(compiled)
        loss = adapter.loss(batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in adapter.trainables().values()])
    # Of two layers; with causal blocks a second one is that of the clean columns, without adapters.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1 + causal
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
