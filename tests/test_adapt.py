"""Adaptation: the loss recomputed naively, training that resumes bit for bit, and a folder that loads as a base."""

import dataclasses
import errno
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adjust_dlm.bases import load_base
from adjust_dlm.bases.autoregressive import load_ar, read_vocabulary
from adjust_dlm.data.canvases import KINDS
from adjust_dlm.data.corpus import Corpus
from adjust_dlm.train import adapt as adapt_module
from adjust_dlm.train.adapt import AdaptConfig, AdaptTrainer, adapt
from adjust_dlm.train.adapter import AdapterModel
from adjust_dlm.train.canvas_batches import CanvasBatches, largest_remainder
from adjust_dlm.train.checkpoint import claim
from adjust_dlm.train.masked_ce import (
    MIN_T,
    chunked_ce,
    draw_masks,
    masked_batch,
    stratified_times,
)
from adjust_dlm.types import InputError, State
from ranks import first_of_two
from tiny_ar import BOS, IM_END, MASK, save_tiny, tiny_model, tiny_tokenizer

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture(autouse=True)
def _light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def live_adapter(family: str = "llama", seed: int = 3) -> AdapterModel:
    """An adapter that already changes the model: B and MASK are not at their start."""
    model = tiny_model(family)
    words = read_vocabulary(tiny_tokenizer(), model.config)
    adapter = AdapterModel(model, words, rank=4, alpha=8, seed=seed, source="tiny")
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapter.trainables().items():
            if "lora_A" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def canvases(rows: int = 5, length: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] and prompt lengths [B]."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(4, 100, (rows, length), generator=generator)
    return tokens_BL, torch.randint(1, length // 2, (rows,), generator=generator)


def reference_logits(adapter: AdapterModel, tokens_L: Tensor, masked_L: Tensor) -> Tensor:
    """fp32 logits [L, V] of one row through transformers' own forward and its own both-way mask."""
    e_LD = adapter.body.embed_tokens(tokens_L)
    e_LD = torch.stack([adapter.mask_D if masked else e for e, masked in zip(e_LD, masked_L, strict=True)])
    h_LD = adapter.body(inputs_embeds=e_LD[None], attention_mask=torch.ones(1, len(tokens_L))).last_hidden_state[0]
    return h_LD @ adapter.body.embed_tokens.weight.T


def naive_loss(adapter: AdapterModel, tokens_BL: Tensor, masked_BL: Tensor, prompt_B: Tensor, t_B: Tensor) -> Tensor:
    """The formula in the docstring of masked_ce, one position at a time."""
    total = torch.zeros(())
    for tokens_L, masked_L, prompt, t in zip(tokens_BL, masked_BL, prompt_B, t_B, strict=True):
        logits_LV = reference_logits(adapter, tokens_L, masked_L)
        for i in range(int(prompt), len(tokens_L)):
            if masked_L[i]:
                row_V = logits_LV[i - 1].clone()
                row_V[MASK] = -torch.inf
                row_V[100:] = -torch.inf
                total = total - row_V.log_softmax(-1)[tokens_L[i]] / (t * (len(tokens_L) - prompt))
    return total / len(tokens_BL)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_formula(family: str) -> None:
    adapter = live_adapter(family)
    tokens_BL, prompt_B = canvases()
    generator = torch.Generator().manual_seed(1)
    t_B = stratified_times(5, generator)
    masked_BL = draw_masks(prompt_B, t_B, 12, generator)
    weights_B = 1 / (t_B * (12 - prompt_B) * 5)
    loss = adapter.loss(masked_batch(tokens_BL, masked_BL, weights_B, chunk=7))
    parameters = list(adapter.trainables().values())
    got = torch.autograd.grad(loss, parameters)
    naive = naive_loss(adapter, tokens_BL, masked_BL, prompt_B, t_B)
    torch.testing.assert_close(loss, naive.float(), rtol=1e-5, atol=1e-6)
    for a, b in zip(got, torch.autograd.grad(naive, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_batches_carry_the_weights_of_the_formula() -> None:
    tokens_BL, prompt_B = canvases(rows=8)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(8, dtype=torch.int8))
    (batch,) = CanvasBatches(corpus, dict.fromkeys(("text", "chat", "lists", "files"), 1.0), batch_size=8, seed=4).step(
        0, 8
    )
    assert sorted(batch.tokens_BL.tolist()) == sorted(tokens_BL.tolist())
    masked = int(batch.masked_BL.sum())
    n = iter(range(masked))
    strata = set()
    for b, tokens_L in enumerate(batch.tokens_BL):
        prompt = int(prompt_B[(tokens_BL == tokens_L).all(-1)][0])
        assert not batch.masked_BL[b, :prompt].any()
        for i in batch.masked_BL[b].nonzero()[:, 0].tolist():
            row = next(n)
            assert batch.targets_R[row] == tokens_L[i]
            assert batch.rows_R[row] == b * 12 + i - 1
            t = 1 / (float(batch.weights_R[row]) * (12 - prompt) * 8)
            strata.add((b, int((t - MIN_T) / (1 - MIN_T) * 8)))
    assert len({stratum for _, stratum in strata}) == len(strata) >= 6  # one t a canvas, no two in one eighth
    assert batch.weights_R[masked:].eq(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_states_look_both_ways(family: str) -> None:
    adapter = live_adapter(family)
    tokens_BL, _ = canvases(rows=1)
    none_BL = torch.zeros(1, 12, dtype=torch.bool)
    other_BL = tokens_BL.clone()
    other_BL[0, -1] = (tokens_BL[0, -1] - 4 + 1) % 96 + 4
    moved_L = (adapter.states(tokens_BL, none_BL) - adapter.states(other_BL, none_BL)).norm(dim=-1)[0]
    assert moved_L.min() > 1e-4


def test_chunked_ce_equals_autograd_of_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(50, 8, dtype=torch.float64, generator=generator)
    h_RD = torch.randn(23, 8, dtype=torch.float64, generator=generator).requires_grad_()
    targets_R = torch.randint(1, 50, (23,), generator=generator)
    weights_R = torch.rand(23, generator=generator)
    weights_R[-4:], targets_R[-4:] = 0, 0  # filler: its target is forbidden
    bias_V = torch.zeros(50)
    bias_V[0] = -torch.inf
    loss = chunked_ce(h_RD, head_VD, bias_V, targets_R, weights_R, size=5)
    (grad,) = torch.autograd.grad(3 * loss, h_RD)
    logits_RV = h_RD @ head_VD.T
    dense_R = torch.nn.functional.cross_entropy(logits_RV[:19, 1:], targets_R[:19] - 1, reduction="none")
    expected = (dense_R * weights_R[:19]).sum()
    (expected_grad,) = torch.autograd.grad(3 * expected, h_RD)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_times_are_stratified() -> None:
    t_B = stratified_times(64, torch.Generator().manual_seed(0))
    parts = ((t_B - MIN_T) / (1 - MIN_T) * 64).floor().long()
    assert sorted(parts.tolist()) == list(range(64))
    assert parts.tolist() != list(range(64))
    assert t_B.min() >= MIN_T
    assert t_B.max() < 1


def test_ranks_split_one_global_batch() -> None:
    tokens_BL, prompt_B = canvases(rows=40)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.tensor([0] * 30 + [2] * 10, dtype=torch.int8))
    shares = {"text": 0.5, "chat": 9.0, "lists": 0.25, "files": 9.0}

    def make(**options: Any) -> CanvasBatches:
        return CanvasBatches(corpus, shares, batch_size=12, seed=1, **options)

    whole = make()
    assert whole.counts == {"text": 8, "lists": 4}
    for step in range(6):
        (one,) = whole.step(step, 12)
        halves = [make(rank=r, world=2).step(step, 3) for r in (0, 1)]
        assert torch.equal(torch.cat([b.tokens_BL for b in halves[0]]), one.tokens_BL[::2])
        assert torch.equal(torch.cat([b.masked_BL for b in halves[1]]), one.masked_BL[1::2])
        total = sum(float(b.weights_R.sum()) for half in halves for b in half)
        assert total == pytest.approx(float(one.weights_R.sum()))
    seen = [row for step in range(15) for row in whole.step(step, 12)[0].tokens_BL.tolist()]
    counts = [seen.count(row) for row in tokens_BL.tolist()]
    assert counts == [4] * 30 + [6] * 10  # 120 texts over 30 canvases, 60 list tasks over 10: whole permutations


def test_a_step_is_the_same_however_it_is_cut() -> None:
    """Canvases with prompts of any length, in passes of 8 to 1 on one or two ranks: losses and gradients add up."""
    adapter = live_adapter()
    tokens_BL, prompt_B = canvases(rows=8)
    corpus = Corpus(tokens_BL.int(), prompt_B.short(), torch.zeros(8, dtype=torch.int8))
    found = []
    for world, micro in ((1, 8), (1, 4), (1, 1), (2, 4), (2, 2)):
        ranks = [
            CanvasBatches(corpus, dict.fromkeys(KINDS, 1.0), batch_size=8, seed=4, rank=r, world=world)
            for r in range(world)
        ]
        loss = sum(adapter.loss(batch) for rank in ranks for batch in rank.step(3, micro))
        gradient = torch.autograd.grad(loss, list(adapter.trainables().values()))
        found.append((loss.item(), torch.cat([g.flatten() for g in gradient])))
    assert found[0][0] > 1
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert (gradient - found[0][1]).norm() < 1e-6 * found[0][1].norm()


def test_largest_remainder() -> None:
    assert largest_remainder({"a": 1.0, "b": 1.0, "c": 1.0}, 8) == {"a": 3, "b": 3, "c": 2}


def run_config(tmp_path: Path, name: str = "out", **changes: Any) -> AdaptConfig:
    """A small run on sampled text and a file of regular text."""
    ar, text = tmp_path / "ar", tmp_path / "text.txt"
    if not ar.is_dir():
        save_tiny(ar)
        text.write_text("the cat sat on the mat and " * 200)
    fields: dict[str, Any] = {
        "ar": str(ar), "output": tmp_path / name, "text": 32, "chat": 0, "lists": 0, "heldout": 8,
        "text_files": (text,), "length": 20, "batch_size": 8, "micro_batch": 4, "steps": 8, "lora_rank": 4,
        "lora_alpha": 4, "lr": 1e-2, "warmup": 2, "log_every": 2, "share_files": 1.0,
    }  # fmt: skip
    return AdaptConfig(**{**fields, **changes})


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("adapter_model.safetensors", "mask_embedding.safetensors")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_learns_and_its_folder_is_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    save_tiny(tmp_path / "ar", family)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and " * 200)
    kept: list[AdapterModel] = []
    init = AdaptTrainer.__init__

    def keeping(self: AdaptTrainer, config: AdaptConfig, adapter: AdapterModel, *rest: Any) -> None:
        kept.append(adapter)
        init(self, config, adapter, *rest)

    monkeypatch.setattr(AdaptTrainer, "__init__", keeping)
    config = run_config(tmp_path, steps=60)
    result = adapt(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert result["ce"]["files"]["0.5"] < lines[0]["ce"]["files"]["0.5"] - 0.5
    assert result["ce"] == lines[-1]["ce"]
    assert result["tokens"] == 60 * 8 * 20
    facts = json.loads((config.output / "base.json").read_text())
    assert (facts["mask_id"], facts["end_ids"], facts["bos_id"], facts["context"]) == (MASK, [IM_END, BOS], BOS, 512)

    base = load_base(str(config.output))
    tokens_BL, _ = canvases(rows=3)
    masked_BL = torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    filled_BL = torch.where(masked_BL, MASK, tokens_BL)
    h_BLD = base.hidden(State(tokens_BL=filled_BL, real_BL=torch.ones_like(masked_BL), masked_BL=masked_BL))
    with torch.no_grad():
        trained_BLD = kept[0].states(tokens_BL, masked_BL)
    trained_BLD = torch.cat([trained_BLD[:, :1], trained_BLD[:, :-1]], dim=1)
    with torch.no_grad(), kept[0].peft.disable_adapter():
        plain_BLD = kept[0].states(tokens_BL, masked_BL)
    plain_BLD = torch.cat([plain_BLD[:, :1], plain_BLD[:, :-1]], dim=1)
    # The folder's weights are rounded to bfloat16 (8 bits).
    error, learned = ((h_BLD - other).norm() / trained_BLD.norm() for other in (trained_BLD, plain_BLD))
    assert error < 0.02 < 0.2 < learned


def test_training_starts_from_an_adapter(tmp_path: Path) -> None:
    """The first evaluation of the second run is the last of the first, but for bf16; other ranks are refused."""
    save_tiny(tmp_path / "ar")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and " * 200)
    first = adapt(run_config(tmp_path, steps=40))["ce"]["files"]
    config = run_config(tmp_path, "again", init=tmp_path / "out", steps=1, lr=1e-9)
    adapt(config)
    begun = json.loads((config.output / "metrics.jsonl").read_text().splitlines()[0])["ce"]["files"]
    assert begun == pytest.approx(first, abs=0.03)
    with pytest.raises(InputError, match=r"has another rank or is of another model: .*lora_A"):
        adapt(run_config(tmp_path, "other", init=tmp_path / "out", lora_rank=2))
    with pytest.raises(InputError, match=r"lora_alpha is 8; the adapter in .* has 4"):
        adapt(run_config(tmp_path, "scale", init=tmp_path / "out", lora_alpha=8))
    with pytest.raises(InputError, match=r"holds no adapter_model\.safetensors"):
        run_config(tmp_path, "new", init=tmp_path).check_files()


def test_the_adapter_loads_through_peft_alone(tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = live_adapter()
    adapter.save(tmp_path, {"ar": "tiny"})
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    weights = adapter.trainables()
    found = {f"peft.{name}": p for name, p in loaded.named_parameters() if "lora_" in name}
    assert found.keys() == {name for name in weights if "lora_" in name}
    assert len(found) == 2 * 7 * 2
    for name, parameter in found.items():
        assert torch.equal(parameter, weights[name].bfloat16().float())


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def lost(weights: dict[str, Tensor]) -> None:
    weights["other.weight"] = weights.pop(sorted(weights)[1])


def cut(weights: dict[str, Tensor]) -> None:
    name = sorted(weights)[1]
    weights[name] = weights[name][:1].clone()


@pytest.mark.parametrize("change", [lost, cut])
def test_h14_no_weight_of_an_autoregressive_model_is_made_up(tmp_path: Path, change: Any) -> None:
    save_tiny(tmp_path)
    name = sorted(load_file(tmp_path / "model.safetensors"))[1]
    rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(InputError, match=f"missing or misshapen weights: {re.escape(name)}"):
        load_ar(str(tmp_path))


def test_h14_a_truncated_autoregressive_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot load the autoregressive model"):
        load_ar(str(tmp_path))


def whole(weights: dict[str, Tensor]) -> None:
    """As int8."""
    weights |= {name: w.char() for name, w in weights.items()}


def saved_base(tmp_path: Path) -> Path:
    """A folder as `adapt` leaves it, without the training."""
    ar = save_tiny(tmp_path / "ar")
    facts = {"ar": str(ar), "mask_id": MASK, "end_ids": [IM_END], "pad_id": IM_END, "bos_id": BOS, "context": 64}
    live_adapter().save(tmp_path / "base", {**facts, "order": "entropy", "order_on": "processed"})
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("adapter_model.safetensors", lost, "missing or unknown tensors .*other"),
        ("adapter_model.safetensors", cut, "cannot read the adapter"),
        ("mask_embedding.safetensors", lambda w: w.update(mask_embedding=torch.zeros(1)), r"shape \(1,\), wanted"),
        ("mask_embedding.safetensors", whole, r"mask_embedding is I8; weights must be one of F16"),
        ("adapter_model.safetensors", whole, r"lora_A\.weight is I8.*; weights must be one of F16"),
    ],
)
def test_h14_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, file: str, change: Any, said: str) -> None:
    folder = saved_base(tmp_path)
    load_base(str(folder))
    rewrite(folder / file, change)
    with pytest.raises(InputError, match=said):
        load_base(str(folder))
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_second_start_does_without_transformers(tmp_path: Path) -> None:
    """Importing it takes longer than everything else in a start together."""
    folder = saved_base(tmp_path)
    load_base(str(folder))  # merges
    code = (
        "import sys; from adjust_dlm import load_base; from adjust_dlm.sampler import Sampler; "
        f"base = load_base({str(folder)!r}); Sampler(base); base.encode('a'); "
        "print([m for m in ('transformers', 'peft', 'torch._dynamo', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("content", "said"), [(b"\xff\xfe", "is not JSON"), (b"[]", "holds a list")])
def test_facts_that_are_no_object_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    folder = saved_base(tmp_path)
    (folder / "base.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_base(str(folder))


def test_a_merge_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_base(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"could not write .*No space left.*; make room"):
            load_base(str(folder))
    assert [path.suffix for path in (tmp_path / "cache" / "merged").iterdir()] == [".lock"]


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


@pytest.mark.parametrize(("call", "step"), [(2, 0), (14, 3), (38, 8)])
def test_a_signal_in_an_evaluation_is_heard_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, step: int
) -> None:
    """In that one of twelve parts of the evaluations at steps 0, 3, 6 and 8; then the run goes on bit for bit."""
    whole = adapt(run_config(tmp_path, "whole", eval_every=3))
    config = run_config(tmp_path, "parts", corpus=tmp_path / "whole" / "corpus", eval_every=3)
    calls, draw = itertools.count(1), adapt_module.draw_masks

    def killed(*given: Any) -> Tensor:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(*given)

    with monkeypatch.context() as patch:
        patch.setattr(adapt_module, "draw_masks", killed)
        stopped = adapt(config)
    assert (stopped["finished"], stopped["step"], next(calls)) == (False, step, call + 1)
    assert not (config.output / "base.json").exists()
    assert sum("ce" in line for line in log_of(config.output)) == -(-step // 3)
    assert adapt(config)["ce"] == whole["ce"]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")


def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapt(run_config(tmp_path, "whole", eval_every=3))["finished"]
    step = AdaptTrainer._train_step

    def killed_in_step_3(self: AdaptTrainer) -> None:
        step(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    config = run_config(tmp_path, "parts", corpus=tmp_path / "whole" / "corpus", eval_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(AdaptTrainer, "_train_step", killed_in_step_3)
        stopped = adapt(config)
    assert (stopped["finished"], stopped["step"]) == (False, 3)
    assert not (config.output / "base.json").exists()
    assert adapt(config)["step"] == 8
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    with pytest.raises(InputError, match=r"lr was 0\.01 and is now 0\.02"):
        adapt(run_config(tmp_path, "parts", corpus=config.corpus, eval_every=3, lr=0.02))


def test_a_folder_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    """Nothing is written while another run has it; afterwards the run goes on, and leaves no lock."""
    config = run_config(tmp_path, steps=1)
    with claim(config.output):
        with pytest.raises(InputError, match=f"another run is writing to {config.output}; wait for its end"):
            adapt(config)
        assert [path.name for path in config.output.iterdir()] == ["run.lock"]
    assert not config.output.exists()
    assert adapt(config)["finished"] and not (config.output / "run.lock").exists()


@pytest.mark.parametrize(
    ("changes", "said"), [({"text_files": (Path("nowhere"),)}, "there is no file"), ({"chat": 4}, "lacks <|im_start|>")]
)
def test_a_refused_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, said: str) -> None:
    read = adapt_module.read_vocabulary
    monkeypatch.setattr(
        adapt_module, "read_vocabulary", lambda *given, **more: dataclasses.replace(read(*given, **more), chat=False)
    )
    with pytest.raises(InputError, match=re.escape(said)):
        adapt(run_config(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_a_run_begun_anew_sets_the_checkpoint_of_the_one_before_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, steps=1)
    adapt(config)
    before = (config.output / "checkpoint.pt").read_bytes()

    def stopped(_: AdaptTrainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AdaptTrainer, "_train_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        adapt(run_config(tmp_path, steps=1, resume="never"))
    assert not (config.output / "checkpoint.pt").exists()
    assert (config.output / "checkpoint.old.pt").read_bytes() == before


def test_a_finished_base_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, steps=1)
    adapt(config)
    before = (config.output / "base.json").read_bytes()
    monkeypatch.setattr(AdaptTrainer, "evaluate", lambda _: {"ce": {"text": {"0.5": 1.0}}})  # another device, say
    assert adapt(config)["ce"] == {"text": {"0.5": 1.0}}
    assert (config.output / "base.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "zeros", "config", "mark"])
def test_a_damaged_cache_is_made_again_and_says_why(tmp_path: Path, damage: str, caplog: Any) -> None:
    """Weights cut off or with zeros in the middle, another config of the same length, no mark: the base is the same."""
    folder = saved_base(tmp_path)
    before = load_base(str(folder)).model.state_dict()
    (weights,) = (tmp_path / "cache" / "merged").glob("*/model.safetensors")
    config, content, half = weights.with_name("config.json"), weights.read_bytes(), weights.stat().st_size // 2
    found = weights
    match damage:
        case "cut":
            weights.write_bytes(content[:-9])
        case "zeros":
            weights.write_bytes(content[:half] + bytes(512) + content[half + 512 :])
        case "config":
            found = config
            config.write_text(config.read_text().replace("1e-05", "1e-04").replace("1e-06", "1e-05"))
        case _:
            found = weights.with_name("source.json")
            found.unlink()
    caplog.clear()
    after = load_base(str(folder)).model.state_dict()
    assert [r.levelname for r in caplog.records] == ["WARNING"] and str(found) in caplog.text
    assert f": building {weights.parent}" in caplog.text and weights.read_bytes() == content
    assert all(torch.equal(after[name], value) for name, value in before.items())
    (folder / "adapter_config.json").unlink()
    with pytest.raises(InputError, match=r"adapter_config\.json is missing"):
        load_base(str(folder))


def test_a_loss_that_is_not_finite_names_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of, calls = AdapterModel.loss, itertools.count()

    def broken(self: AdapterModel, batch: Any) -> Any:
        loss = loss_of(self, batch)
        evaluating = batch.weights_R.unique().tolist() == [0, 1]
        return loss * torch.nan if not evaluating and next(calls) >= 2 * 5 else loss

    monkeypatch.setattr(AdapterModel, "loss", broken)
    with pytest.raises(FloatingPointError, match="the loss of step 5 is nan"):
        adapt(run_config(tmp_path, log_every=4))


def test_a_time_limit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(adapt_module.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(adapt_module.Bar, "show", lambda *_: None)  # it looks at the same clock
    result = adapt(run_config(tmp_path, steps=1000, max_seconds=35.0, log_every=1))
    # The clock starts behind step 1 (10 s a look): looks at 10, 20, 30 and 40 s.
    assert (result["finished"], result["step"], result["seconds"]) == (True, 4, 40.0)


def test_untied_heads_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    words = read_vocabulary(tiny_tokenizer(), model.config)
    with pytest.raises(InputError, match="only models with tied embeddings"):
        AdapterModel(model, words, rank=4, alpha=4, seed=0, source="tiny")


@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = run_config(tmp_path, "one", steps=4, lr=1e-3)
    adapt(config)
    config = dataclasses.replace(config, output=tmp_path / "two")
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(config))
    program = (
        "import pickle, torch; from adjust_dlm.train.adapt import adapt; torch.set_num_threads(1); "
        f"adapt(pickle.load(open({str(tmp_path / 'two.pickle')!r}, 'rb'))); torch.distributed.destroy_process_group()"
    )
    with first_of_two("-c", program):
        adapt(config)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name].float(), weight.float(), rtol=2e-2, atol=2e-4)
    ces = [json.loads((tmp_path / name / "base.json").read_text())["training"]["ce"] for name in ("one", "two")]
    for kind in ("text", "files"):
        assert ces[0][kind] == pytest.approx(ces[1][kind], rel=1e-3)


def test_every_file_of_the_folder_makes_the_fingerprint(tmp_path: Path) -> None:
    """A changed LoRA scale is another base: it must not find the old merge, nor a sampler of the old one."""
    config = run_config(tmp_path, steps=2)
    adapt(config)
    before = load_base(str(config.output)).fingerprint
    lora = config.output / "adapter_config.json"
    facts = json.loads(lora.read_text())
    lora.write_text(json.dumps({**facts, "lora_alpha": 2 * facts["lora_alpha"]}))
    assert load_base(str(config.output)).fingerprint != before


def test_bad_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "clip": 0.0, "lr": float("inf"), "warmup": -1, "eval_every": -1, "lora_alpha": 0, "share_text": float("nan"),
        "checkpoint_every_seconds": float("nan"), "seed": -1, "text": -1, "heldout": -1,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(InputError, match=f"{name} is {value}; it must"):
            AdaptConfig(**{"output": tmp_path, name: value})
    with pytest.raises(InputError, match="temperature is -1"):
        AdaptConfig(output=tmp_path, sample_temperature=-1.0)
    with pytest.raises(InputError, match="every kind of canvas that is asked for has share 0"):
        AdaptConfig(output=tmp_path, chat=0, lists=0, share_text=0.0)


def test_a_run_without_held_out_canvases_trains(tmp_path: Path) -> None:
    result = adapt(run_config(tmp_path, heldout=0, text_files=(), steps=2))
    assert (result["finished"], result["step"], result["ce"]) == (True, 2, {})


def test_a_batch_that_does_not_divide_is_told_before_sampling(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="micro_batch 3 does not divide the 8 canvases of a process"):
        adapt(run_config(tmp_path, micro_batch=3))
    with pytest.raises(InputError, match="batch_size 8 is not a multiple of the 3 processes"):
        run_config(tmp_path).canvases_of_a_pass(3)
    assert not (tmp_path / "out").exists()
