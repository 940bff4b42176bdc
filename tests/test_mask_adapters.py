"""Adapters of masks alone: text is the model's own to the bit, masks by hand, their training, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases import load_base
from adjust_dlm.bases.autoregressive import autoregressive_base, read_vocabulary
from adjust_dlm.bases.layers import join_projections
from adjust_dlm.bases.mask_lora import MaskLora
from adjust_dlm.bases.memory import Memory
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data.ar import CHAT_TEMPLATE
from adjust_dlm.data.corpus import Corpus, load_corpus
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.exported import export
from adjust_dlm.train.adapt import AdaptTrainer, adapt
from adjust_dlm.train.adapter import AdapterModel
from adjust_dlm.train.canvas_batches import CanvasBatches, ends_of
from adjust_dlm.train.masked_ce import behind_cuts, cuts, group_batch, open_positions
from adjust_dlm.types import DecodeConfig, InputError
from helpers import MASK as HIDDEN
from helpers import left_pad, tiny_base, tiny_sampler
from test_block_adapt import LENGTH, ONE, SIZE, canvases, config, live_adapter, saved
from test_fast import Replayed
from tiny_ar import BOS, IM_END, MASK, tiny_model, tiny_tokenizer

FAMILIES = ["llama", "qwen2", "qwen3"]
CUTS = torch.tensor([[1, 6], [3, 9], [2, 5], [1, 11], [4, 7], [8, 2]])
LEFT: dict[str, Any] = {"causal": True, "order": "left_to_right"}


@pytest.fixture(autouse=True)
def _light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


# In the body ---------------------------------------------------------------------------------------------------


def test_an_adapter_by_hand() -> None:
    """y + B A h in one column of two; the other one is y to the bit."""
    part = MaskLora(5, 3, 2)
    generator = torch.Generator().manual_seed(0)
    part.down.data, part.up.data = (torch.randn(shape, generator=generator) for shape in ((2, 5), (3, 2)))
    y, h = torch.randn(1, 2, 3, generator=generator), torch.randn(1, 2, 5, generator=generator)
    out = part(y, h, torch.tensor([[[True], [False]]]))
    assert torch.equal(out[:, 0], y[:, 0])
    torch.testing.assert_close(out[0, 1], y[0, 1] + part.up @ (part.down @ h[0, 1]))
    h[0, 0] = torch.inf  # what an adapter would make of text, even an overflow, is not looked at
    assert torch.equal(part(y, h, torch.tensor([[[True], [False]]])), out)


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_a_text_without_masks_knows_no_adapters_and_joined_projections_change_nothing(family: str) -> None:
    base = tiny_base(family, block=SIZE, causal=True)
    rows = [[BOS, 5, 6, 7, 8, 9, 3, 4], [BOS, 5, 6, 7, 8, HIDDEN, HIDDEN, HIDDEN]]
    with torch.no_grad():
        text_LD, masks_LD = base.hidden(left_pad(rows))
        for part in base.model.modules():
            if isinstance(part, MaskLora):
                part.up.mul_(3)
        text, masks = base.hidden(left_pad(rows))
    assert torch.equal(text, text_LD) and torch.equal(masks[:5], masks_LD[:5])
    assert ((masks - masks_LD)[5:].abs().amax(-1) > 0.01).all()
    join_projections(base.model)
    torch.testing.assert_close(base.hidden(left_pad(rows)), torch.stack([text, masks]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_drafts_have_them_where_a_canvas_has(family: str) -> None:
    """Every filling of the open block, masks behind it, against a canvas that holds it."""
    base = tiny_base(family, block=SIZE, causal=True)
    row = [BOS, 5, 6, 7, 8, HIDDEN, HIDDEN, HIDDEN]
    fillings = [[8, 9, HIDDEN, HIDDEN], [8, 9, 5, HIDDEN], [8, HIDDEN, HIDDEN, HIDDEN]]
    memory, places = Memory(1), torch.arange(8)[None]
    memory.width, memory.seen = 8, 8
    token_BJS, valid = torch.tensor([fillings]), torch.ones(1, 8, dtype=torch.bool)
    _, views = base.hidden_drafts(left_pad([row]), memory, places, valid, token_BJS, places[:, SIZE:])
    for filling, found in zip(fillings, views[0], strict=True):
        asked = base.hidden(left_pad([row[:SIZE] + filling]))[0, SIZE:]
        torch.testing.assert_close(found, asked, rtol=0, atol=1e-5)


def test_what_has_no_such_adapters() -> None:
    base = tiny_base("dream", block=SIZE, causal=True)
    with pytest.raises(InputError, match="mask_id is 7; the body's adapters are for 20"):
        TransformerBase(base.model, base.head_matrix, replace(base.spec, mask_id=7), next_frame=True)
    with pytest.raises(
        InputError, match="'dream' has adapters of masks alone, which no model of transformers can have"
    ):
        export(tiny_sampler(base), base, "unused")
    with pytest.raises(InputError, match="lora_rank is 4; adapters of masks alone are for causal blocks"):
        Shape(**{**vars(base.layer_config), "causal": False, "lora_rank": 4})


# Training ------------------------------------------------------------------------------------------------------


def model_states(family: str, tokens_BL: Tensor) -> Tensor:
    return tiny_model(family).model(tokens_BL).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_are_those_of_the_saved_base(tmp_path: Path, family: str) -> None:
    """Clean ones are the model's own; a group is the text before its cut and S masks, as the folder's base has them."""
    adapter, (tokens_BL, _) = live_adapter(family), canvases()
    run = config(tmp_path)
    tiny_model(family).save_pretrained(run.ar)
    base = saved(adapter, run, causal=True)
    assert (base.spec.block, base.spec.causal, base.layer_config.lora_rank) == (SIZE, True, 4)
    base.model.load_state_dict(  # in fp32 as it was trained, where the folder's are rounded
        {name.replace(".base_layer", ""): w for name, w in adapter.body.state_dict().items() if "lora" not in name}
        | {
            "embed_tokens.weight": adapter.body.embed_tokens.weight.index_copy(
                0, torch.tensor([MASK]), adapter.mask_D[None]
            )
        },
        strict=False,
    )
    with torch.no_grad():
        states = adapter.states_of_groups(tokens_BL, CUTS)
    torch.testing.assert_close(states[:, :LENGTH], model_states(family, tokens_BL), rtol=0, atol=1e-5)
    for b, row in enumerate(tokens_BL.tolist()):
        for g, cut in enumerate(CUTS[b].tolist()):
            canvas = left_pad([row[:cut] + [MASK] * SIZE], MASK)
            asked = base.hidden(canvas)[0, cut:]
            found = states[b, LENGTH + g * SIZE :][:SIZE]
            torch.testing.assert_close(found, asked, rtol=0, atol=1e-5)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_base_writes_the_models_own_text(
    tmp_path: Path, temperature: float, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its adapters are: joint decoding, and `verified` by the same random numbers in fewer passes."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    run = config(tmp_path)
    base = saved(live_adapter(), run, causal=True)
    model = tiny_model()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # as the folder's weights are
    one = autoregressive_base(model, tiny_tokenizer(), mask_id=MASK)
    texts = [[4 + (7 * n + 3 * i) % 96 for i in range(n)] for n in (1, 2, 5, 9)]
    asked = DecodeConfig(max_new_tokens=21, tokens_per_step=1, temperature=temperature, seed=3)
    own, wanted = (decode(b, texts, asked, decoder="joint", eager=eager) for b in (base, one))
    assert torch.equal(own.tokens_BL, wanted.tokens_BL) and len(own.tokens_BL.unique()) > 20
    if temperature == 0:
        fewer = decode(
            base, texts, asked.but(tokens_per_step=3), decoder="verified", sampler=tiny_sampler(base), eager=eager
        )
        assert torch.equal(fewer.tokens_BL, wanted.tokens_BL)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_learn_the_law_of_the_model_behind_the_text(family: str) -> None:
    """The weighted cross-entropy against its softmax, position by position, and the gradients of that."""
    adapter, (tokens_BL, prompt_B) = live_adapter(family), canvases()
    text_BL = open_positions(tokens_BL, prompt_B, (IM_END, BOS), 1)
    seen_BGN = behind_cuts(text_BL, CUTS, SIZE)
    assert seen_BGN.tolist() == [
        [[c + n < LENGTH and bool(text_BL[b, c + n]) for n in range(SIZE + 1)] for c in cuts_G]
        for b, cuts_G in enumerate(CUTS.tolist())
    ]
    weights_BGN = seen_BGN * torch.rand(seen_BGN.shape, generator=torch.Generator().manual_seed(3))
    weights_BGN[..., 0] = 0
    law_BLV = (model_states(family, tokens_BL) @ adapter.body.embed_tokens.weight.T + adapter.bias_V).softmax(-1)
    states = adapter.states_of_groups(tokens_BL, CUTS)
    log_p = (states @ adapter.body.embed_tokens.weight.T + adapter.bias_V).log_softmax(-1)
    naive, count = torch.zeros(()), 0
    for b, g, n in weights_BGN.nonzero().tolist():
        law_V = law_BLV[b, CUTS[b, g] + n - 1]  # of the position n behind the cut
        row_V = log_p[b, LENGTH + g * SIZE + n - 1]
        naive = naive - weights_BGN[b, g, n] * (law_V * row_V)[law_V > 0].sum()
        count += 1
    batch = group_batch(tokens_BL, CUTS, weights_BGN, taught=True, chunk=7)
    assert count > 20 and int((batch.weights_R > 0).sum()) == count
    loss = adapter.loss(batch)
    torch.testing.assert_close(loss, naive, rtol=1e-5, atol=1e-5)
    parameters = list(adapter.trainables().values())
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(naive, parameters), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


def test_cuts_are_spread_over_the_text() -> None:
    """One in each equal part, every position alike often, none at the text's last token or where there is no text."""
    text_BL = torch.zeros(4, LENGTH, dtype=torch.bool)
    for b, (first, last) in enumerate([(1, 10), (5, 11), (0, 6), (7, 7)]):
        text_BL[b, first : last + 1] = True
    generator = torch.Generator().manual_seed(0)
    found = torch.stack(
        [cuts(text_BL, torch.tensor([3, 2, 3, 3]), torch.rand(4, 3, generator=generator)) for _ in range(3000)]
    )
    for g, part in enumerate([(1, 3), (4, 6), (7, 9)]):
        places, counts = found[:, 0, g].unique(return_counts=True)
        assert places.tolist() == list(range(part[0], part[1] + 1)) and (counts / 3000 - 1 / 3).abs().max() < 0.04
    assert found[:, 1, 0].unique().tolist() == [5, 6, 7] and found[:, 1, 1].unique().tolist() == [8, 9, 10]
    assert found[:, 2].amin() == 1 and found[:, 2].amax() == 5  # nothing stands before position 0
    assert found[:, 3].unique().tolist() == [7]


def test_a_batch_is_one_mean_in_which_early_masks_count_most() -> None:
    """Weights fall as 1 / n, add up to 1, and follow the length of a text; ranks and passes share the batch."""
    tokens_BL, prompt_B = canvases(8)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(8, dtype=torch.int8))
    how: dict[str, Any] = {"batch_size": 8, "seed": 4, "block": SIZE, "causal": True, "end_ids": (IM_END, BOS)}
    whole = CanvasBatches(corpus, ONE, **how).step(3, 8)[0]
    assert whole.weights_R.sum().item() == pytest.approx(1)
    assert whole.cut_BG is not None and whole.teachers_R is not None
    wide = LENGTH + whole.cut_BG.shape[1] * SIZE
    prompts = {tuple(t.tolist()): int(p) for t, p in zip(tokens_BL, prompt_B, strict=True)}
    given = torch.tensor([prompts[tuple(t.tolist())] for t in whole.tokens_BL])
    text_BL = open_positions(whole.tokens_BL, given, (IM_END, BOS), 1)
    first: dict[tuple[int, int], float] = {}
    parts = zip(whole.rows_R.tolist(), whole.teachers_R.tolist(), whole.weights_R.tolist(), strict=True)
    for row, teacher, weight in [part for part in parts if part[2] > 0]:
        b, (g, n) = row // wide, divmod(row % wide - LENGTH, SIZE)
        assert g >= 0 and teacher == b * LENGTH + int(whole.cut_BG[b, g]) + n  # which scores the position behind it
        assert text_BL[b, teacher % LENGTH + 1]
        assert weight == pytest.approx(first.setdefault((b, g), weight) / (n + 1), rel=1e-5)
    assert len(first) > 12 and int((whole.weights_R > 0).sum()) > 30
    of_text = {b: weight for (b, _), weight in first.items()}
    ends = -(-(text_BL * torch.arange(1, LENGTH + 1)).amax(-1) // SIZE) * SIZE
    scale = {b: weight / float(text_BL[b].sum() * SIZE / ends[b]) for b, weight in of_text.items()}
    assert max(scale.values()) == pytest.approx(min(scale.values()), rel=1e-5)
    parts = [p for rank in (0, 1) for p in CanvasBatches(corpus, ONE, rank=rank, world=2, **how).step(3, 2)]
    adapter = live_adapter()
    assert len(parts) == 4
    assert sum(adapter.loss(p).item() for p in parts) == pytest.approx(adapter.loss(whole).item(), rel=1e-5)


def test_the_evaluation_is_that_of_the_model_and_of_masks_behind_its_text(tmp_path: Path) -> None:
    """`next` is -log p of the autoregressive model; `next+n` that of n masks behind a cut, each cut in turn."""
    adapter, (tokens_BL, prompt_B) = live_adapter(), canvases(5)  # a pass of four has to be filled
    part = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(5, dtype=torch.int8))
    batches = CanvasBatches(part, ONE, batch_size=8, seed=1, block=SIZE, causal=True, end_ids=(IM_END, BOS))
    text_BL = open_positions(tokens_BL, prompt_B, (IM_END, BOS), 1)
    cut_BG = cuts(text_BL, torch.full((5,), 3), torch.full((5, 3), 0.5))
    trainer = AdaptTrainer.__new__(AdaptTrainer)
    trainer.batches, trainer.config = batches, config(tmp_path)
    head = adapter.body.embed_tokens.weight
    states = adapter.states_of_groups(tokens_BL, cut_BG)
    log_p = (states @ head.T + adapter.bias_V).log_softmax(-1)
    for n in (0, 1, 3):
        batch = trainer._behind(part, n)(torch.arange(5), torch.ones(5))
        asked, count = torch.zeros(()), 0
        for b, cuts_G in enumerate(cut_BG.tolist()):
            for g, cut in enumerate(cuts_G):
                if cut + n < LENGTH and text_BL[b, cut + n]:
                    row = cut - 1 if n == 0 else LENGTH + g * SIZE + n - 1
                    asked, count = asked - log_p[b, row, tokens_BL[b, cut + n]], count + 1
        assert float(batch.weights_R.sum()) == count > 5
        torch.testing.assert_close(adapter.loss(batch), asked, rtol=1e-5, atol=1e-5)


def test_a_run_learns_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    run = config(tmp_path, **LEFT)
    result = adapt(run)
    lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0]["ce"]["files"], result["ce"]["files"]
    assert set(after) == {"next", "next+1", "next+2"}  # a round of a block of four hides three behind the next
    assert after["next"] == pytest.approx(before["next"], abs=1e-6)  # nothing that was trained has touched it
    losses = [line["loss"] for line in lines if "loss" in line]  # of a random model's laws: most of it has to stay
    assert len(losses) == 30 and sum(losses[-5:]) < sum(losses[:5]) - 1
    assert json.loads((run.output / "base.json").read_text())["masks_alone"] is True
    base: TransformerBase = load_base(str(run.output))
    assert (base.spec.block, base.spec.causal, base.spec.order, base.lag) == (SIZE, True, "left_to_right", 1)
    out = decode(base, [[BOS]], DecodeConfig(max_new_tokens=10, tokens_per_step=2), decoder="parallel")
    assert MASK not in out.tokens_BL
    small = load_base(str(run.output), quantize="fp8-dynamic")
    rows = left_pad([[BOS, 9, 9, 9, MASK, MASK]], MASK)
    near, exact = small.hidden(rows), base.hidden(rows)
    assert 0 < (near - exact).norm() / exact.norm() < 0.2


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    """An adapter of all columns, one without a linear layer, one of no rank; each is told before anything is cached."""
    run = config(tmp_path)
    saved(live_adapter(), run, causal=True)
    facts = json.loads((run.output / "base.json").read_text())
    with pytest.raises(InputError, match=r"causal is False; the adapter in .* was trained the other way"):
        adapt(config(tmp_path, "other", init=run.output))
    for name, wrong in (("r", "four"), ("target_modules", ["q_proj"])):
        path = run.output / "adapter_config.json"
        was = path.read_text()
        path.write_text(json.dumps(json.loads(was) | {name: wrong}))
        with pytest.raises(InputError, match=r"cannot read the adapter in|does not fit"):
            load_base(str(run.output))
        path.write_text(was)
    (run.output / "base.json").write_text(json.dumps({**facts, "causal": True}))
    with pytest.raises(InputError, match="causal blocks with an adapter of all columns, which are no more"):
        load_base(str(run.output))


def test_a_causal_base_speaks_in_the_models_own_template(tmp_path: Path) -> None:
    """With its system turn, in the chats that it trains on and in those that it answers."""
    run = config(tmp_path, text=0, length=64, steps=2, text_files=(tmp_path / "chats.jsonl",), heldout=2, **LEFT)
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '<|im_start|>system\\nBe.<|im_end|>\\n' }}" + CHAT_TEMPLATE
    tokenizer.save_pretrained(run.ar)
    adapt(run)
    base, one = load_base(str(run.output)), load_base(run.ar)
    asked = base.encode_messages(chat[:1])
    start = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert asked == one.encode_messages(chat[:1]) == tokenizer.encode(start, add_special_tokens=False)
    corpus = load_corpus(run.output / "corpus", "train")
    assert corpus.tokens_NL[0].tolist() == [*asked, *tokenizer.encode("So."), *[IM_END] * (64 - len(asked) - 3)]
    assert int(corpus.prompt_len_N[0]) == len(asked)


def test_where_rows_end() -> None:
    """In quarters of five blocks, which are two blocks each: the last one ends with the canvas."""
    used = torch.arange(20) < torch.tensor([0, 1, 8, 9, 17, 20])[:, None]
    assert ends_of(used, SIZE).tolist() == [8, 8, 8, 16, 20, 20]


def test_a_fresh_adapter_changes_nothing() -> None:
    """B is 0: masks are read as the model would read their embedding."""
    model = tiny_model("qwen2")
    words = read_vocabulary(tiny_tokenizer(), model.config)
    adapter = AdapterModel(model, words, rank=4, alpha=8, seed=3, source="tiny", block=SIZE)
    tokens_BL, _ = canvases()
    with torch.no_grad():
        states = adapter.states_of_groups(tokens_BL, CUTS)
        for b, cut in enumerate(CUTS[:, 0].tolist()):
            e_LD = torch.cat([adapter.body.embed_tokens(tokens_BL[b, :cut]), adapter.mask_D.expand(SIZE, -1)])
            wanted = tiny_model("qwen2").model(inputs_embeds=e_LD[None]).last_hidden_state[0, cut:]
            torch.testing.assert_close(states[b, LENGTH:][:SIZE], wanted, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_compiled_passes_on_a_card_change_nothing() -> None:
    """Losses and gradients in fp32, of passes of all lengths, against the layers as they stand."""
    tokens_BL, prompt_B = canvases(32)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(32, dtype=torch.int8))
    how: dict[str, Any] = {"batch_size": 32, "seed": 4, "block": SIZE, "causal": True, "end_ids": (IM_END, BOS)}
    batches = CanvasBatches(corpus, ONE, **how).step(0, 8)
    assert len({batch.tokens_BL.shape[1] for batch in batches}) > 1
    made = []
    for compiled in (False, True):
        adapter = live_adapter("qwen2").cuda()
        if compiled:
            adapter.compile_passes()
        loss = sum(adapter.loss(batch.to(torch.device("cuda"))) for batch in batches)
        made.append((loss, torch.autograd.grad(loss, list(adapter.trainables().values()))))
    torch.testing.assert_close(made[0], made[1], rtol=1e-3, atol=1e-5)
