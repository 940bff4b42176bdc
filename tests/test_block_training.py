"""Training on block bases: all blocks of a text in one pass give what each of them gives alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.sampler import Sampler, SamplerConfig, load_sampler
from adjust_dlm.train.batches import pack
from adjust_dlm.train.blocks import pack_blocks, random_blocks
from adjust_dlm.train.metrics import held_out
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import observe, unroll, unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError, State, Trajectory
from helpers import BOS, FAMILIES, left_pad, tiny_base, tiny_sampler

SIZE = 4


def texts(base: TransformerBase, **settings: Any) -> list[Trajectory]:
    """Prompts of one to six tokens, so that blocks begin given, half given and open; the last block may be partial."""
    prompts = [[BOS, 5, 6, 7, 8, 9][:n] for n in range(1, 7)]
    result = decode(base, prompts, DecodeConfig(max_new_tokens=9, seed=2, **settings), decoder="joint")
    return [result.trajectory(b) for b in range(len(prompts))]


def canvas_of(x: Trajectory, block: int, t: int) -> tuple[State, int]:
    """The canvas before commit t of a block, as decoding has it, and the number of that commit in the whole text."""
    part = x.order_L[block * SIZE : (block + 1) * SIZE]
    commit = int(part[part >= 0].min()) + t
    tokens_L, masked_L = x.state(commit, 20)
    state = left_pad([tokens_L.tolist()])
    return replace(state, masked_BL=masked_L[None]), commit


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_steps_of_all_blocks_are_those_of_whole_canvases(family: str) -> None:
    """Both halves of Algorithm 2 against `Base.hidden` and `Sampler.forward` on the canvas of every window."""
    base = tiny_base(family, block=SIZE, end_ids=(1,))
    g = tiny_sampler(base)
    data, rollout, length = texts(base), 2, 5
    slices = pack_blocks(data, lambda n, commits: min(n % 2, max(0, commits - 2)), length, base)
    frames = slices.frames(base)
    run = unroll(g, frames, rollout=rollout)
    blocks, seen = slices.texts.tokens_BL.shape[1] // SIZE, 0
    for n, x in enumerate(data):
        for j in range(blocks):
            part = x.order_L[j * SIZE : (j + 1) * SIZE]
            commits = int((part >= 0).sum())
            row = n * blocks + j
            assert int(frames.text_SN[0, row]) == (0 if commits else -1)
            start = min(n % 2, max(0, commits - 2))
            for w in range(length - rollout):
                if not commits or start + w + rollout > commits:
                    continue
                state, commit = canvas_of(x, j, start + w)
                h_BLD = base.hidden(state)
                inside = slice(j * SIZE, min((j + 1) * SIZE, len(x.tokens_L)))
                wide = inside.stop - inside.start
                got = run.h_BLD[w * run.n + row, :wide]
                torch.testing.assert_close(got, h_BLD[0, inside], rtol=0, atol=5e-5)
                for k in range(1, rollout + 1):
                    tokens_L, masked_L = x.state(commit + k, 20)
                    masked_L = masked_L.clone()
                    if not masked_L[inside].any():
                        break  # the block is full: no step of g is compared there
                    state = replace(left_pad([tokens_L.tolist()]), masked_BL=masked_L[None])
                    h_BLD = g(h_BLD, state)
                    step = run.student[k - 1][w * run.n + row, :wide]
                    torch.testing.assert_close(step, h_BLD[0, inside], rtol=0, atol=5e-5)
                    seen += 1
    assert seen > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradient_are_those_of_one_block_at_a_time(family: str) -> None:
    base = tiny_base(family, block=SIZE, end_ids=(23,))
    data, rollout = texts(base)[:3], 2
    names = ("weights", "next_decay")
    settings: dict[str, Any] = dict(zip(names, ("next", 2.0), strict=True))
    g = tiny_sampler(base).requires_grad_(True)
    slices = pack_blocks(data, lambda n, commits: 0, SIZE + rollout, base)
    loss = unrolled_kl(base, unroll(g, slices.frames(base), rollout=rollout), (1, 2), **settings)
    loss.backward()
    own = {name: p.grad.clone() for name, p in g.named_parameters()}
    g.zero_grad()
    # One text and one block at a time, by whole canvases; a state is compared at its block's scoring columns.
    parts: dict[int, list[Tensor]] = {1: [], 2: []}
    for x in data:
        for j in range(-(-len(x.tokens_L) // SIZE)):
            inside = slice(j * SIZE, (j + 1) * SIZE)
            commits = int((x.order_L[inside] >= 0).sum())
            if not commits:
                continue
            first = canvas_of(x, j, 0)[1]
            whole = observe(base, pack([x], [first], commits + rollout, base.spec.pad_id))
            shown = [position - base.lag for position in range(inside.start, min(inside.stop, len(x.tokens_L)))]
            shown = [column for column in shown if column >= inside.start]
            rank_BL = torch.full_like(whole.rank_BL, -1)
            order_L = torch.nn.functional.pad(x.order_L, (0, base.lag), value=-1)[base.lag :]
            for c in range(commits + rollout):
                for column in shown:
                    rank_BL[c, column] = order_L[column] - first - c
            run = unroll(g, replace(whole, rank_BL=rank_BL), rollout=rollout)
            for k in (1, 2):
                for w in range(commits):
                    rank_L = run.rank[k - 1][w]
                    if bool((rank_L >= 0).any()):
                        one = replace(run, rank=[torch.full_like(r, -1) for r in run.rank])
                        one.rank[k - 1][w] = rank_L
                        parts[k].append(unrolled_kl(base, one, k, **settings))
    total = sum(torch.stack(part).mean() for part in parts.values()) / 2
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    total.backward()
    for name, p in g.named_parameters():
        torch.testing.assert_close(own[name], p.grad, rtol=1e-4, atol=1e-5)


def test_every_window_start_of_a_block_weighs_the_same() -> None:
    base = tiny_base("dream", block=SIZE, end_ids=(23,))
    data, rollout, length = texts(base), 1, 3
    count: Counter[tuple[int, int]] = Counter()
    for step in range(300):
        slices = random_blocks(data, [0], count=4, length=length, rollout=rollout, key=(1, step), base=base)
        masked = (slices.views.rank_BL >= 0).any(-1).view_as(slices.text_SN)
        for w in range(length - rollout):
            begun = (slices.text_SN[w] == 0) & (slices.text_SN[w + 1] == 0) & masked[w + 1]
            for m in begun.nonzero().flatten().tolist():
                count[m % (slices.texts.tokens_BL.shape[1] // SIZE), int(slices.views.start_N[m]) + w] += 1
    # Text 0 has BOS and 9 masks: blocks of 3, 4 and 2 commits, so 2, 3 and 1 windows.
    assert sorted(count) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    by_block = {j: [n for (b, _), n in count.items() if b == j] for j in range(3)}
    for j, (commits, seen) in enumerate(zip((3, 4, 2), by_block.values(), strict=True)):
        wide, own = length - rollout, commits - 1
        share = 1200 if wide >= own else 1200 * wide / (own + wide - 1)
        assert wide < own or seen == [1200] * own  # a slice that holds them all has them all
        assert all(abs(n - share) < 5 * share**0.5 for n in seen), (j, seen, share)


@pytest.mark.parametrize(("rollout", "length"), [(1, 2), (2, 4), (3, 4), (3, 5)])
def test_windows_of_slices_shorter_than_a_block_are_those_of_whole_ones(rollout: int, length: int) -> None:
    """Fewer than S + rollout - 1 states, from every start: ranks, states of g and of the base, and no other windows."""
    base = tiny_base("dream", block=SIZE, end_ids=(1,))
    data, g = texts(base), tiny_sampler(base)

    def windows(length: int, first: int) -> dict[tuple[int, int, int], list[Tensor]]:
        slices = pack_blocks(data, lambda n, commits: min(first, max(0, commits - 2)), length, base)
        run, out = unroll(g, slices.frames(base), rollout=rollout), {}
        for k in range(1, rollout + 1):
            shape = run.windows, run.n, SIZE
            rank, student, teacher = (
                part[k - 1].view(*shape, -1) for part in (run.rank, run.student, run.teacher)
            )  # fmt: skip
            for w, m in (rank >= 0).flatten(2).any(-1).nonzero().tolist():
                real = rank[w, m, :, 0] >= 0
                where = m, int(slices.views.start_N[m]) + w, k
                out[where] = [part[w, m][real] for part in (rank, student, teacher)]
        return out

    whole, seen = windows(SIZE + rollout - 1, 0), set()
    for first in range(1 - (length - rollout), SIZE - 1):
        for where, parts in windows(length, first).items():
            torch.testing.assert_close(parts, whole[where], rtol=0, atol=2e-5)
            seen.add(where)
    assert seen == whole.keys() and len(seen) > 30


def test_texts_without_commits_in_a_block_and_early_ends_count_nothing_there() -> None:
    base = tiny_base("llada", block=SIZE, end_ids=(1,))
    tokens, order = torch.tensor([2, 5, 6, 7, 8, 1, 1, 1, 1]), torch.tensor([-1, -1, -1, -1, 0, 1, -2, -2, -2])
    x = Trajectory(tokens, order, 0, 0)
    slices = pack_blocks([x], lambda n, commits: 0, 3, base)
    assert slices.text_SN.tolist() == [[-1, 0, -1]] * 3
    rank = slices.rank_BL.view(3, 3, SIZE)
    assert rank[0, 1, :2].tolist() == [0, 1] and bool((rank[0, 1, 2:] > 1000).all())
    assert bool((rank[2, 1] < 0).all())  # behind the end


@pytest.fixture(scope="module", params=[False, True], ids=["blocks", "causal"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformerBase, str]:
    base = tiny_base("dream", block=SIZE, end_ids=(1,), causal=request.param)
    folder = str(tmp_path_factory.mktemp("blocks") / "text")
    config = TrajectoriesConfig(output=folder, base="tiny", num=64, max_new_tokens=11, batch_size=8, shard_rows=8)
    make_trajectories(config, base)
    return base, folder


def test_training_on_a_block_base_lowers_the_heldout_divergence(stored: Any, tmp_path: Path) -> None:
    base, folder = stored
    settings: dict[str, Any] = {
        "trajectories": (folder,), "base": "tiny", "steps": 400, "reverse": 0.5, "slices": 8,
        "slice_states": 13 if base.spec.causal else 6, "rollout": 2, "heldout": 6, "heldout_texts": 6,
        "eval_every": 400, "checkpoint_every": 200, "warmup": 5, "features": (1,),
    }  # fmt: skip
    result = train(TrainConfig(output=str(tmp_path / "g"), **settings), base)
    assert result["finished"]
    assert result["heldout"]["kl_1"] < 0.8 * result["heldout"]["stale_1"]
    law = result["divergence"]
    assert law["adjust"]["kl_qp"] < law["parallel"]["kl_qp"]
    g = load_sampler(result["sampler"], base)
    out = decode(base, [[BOS]] * 3, DecodeConfig(tokens_per_step=3, max_new_tokens=11), decoder="adjust", sampler=g)
    assert int(out.base_calls_B.max()) <= 5
    with pytest.raises(InputError, match="fingerprint"):
        load_sampler(result["sampler"], tiny_base("dream", block=8, end_ids=(1,)))


def test_a_stopped_run_goes_on_bit_for_bit(stored: Any, tmp_path: Path) -> None:
    base, folder = stored
    settings: dict[str, Any] = {
        "trajectories": (folder,), "base": "tiny", "slices": 4, "slice_states": 5, "rollout": 2, "heldout": 4,
        "heldout_texts": 0, "eval_every": 100, "checkpoint_every": 3, "decay": 0.0,
    }  # fmt: skip
    train(TrainConfig(output=str(tmp_path / "a"), steps=6, **settings), base)
    train(TrainConfig(output=str(tmp_path / "b"), steps=3, **settings), base)
    saved = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=False)
    saved["run"]["steps"] = 6
    torch.save(saved, tmp_path / "b" / "checkpoint.pt")
    train(TrainConfig(output=str(tmp_path / "b"), steps=6, **settings), base)
    a, b = (load_sampler(tmp_path / run / "sampler", base).state_dict() for run in ("a", "b"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"one_pass": True, "trajectories": ()}, "one_pass decodes whole canvases; base 'dream' writes in blocks"),
        ({"compile": True}, "compile is true; base 'dream' writes in blocks"),
        ({"slice_states": 8}, "slice_states is 8; blocks of 4 have at most 7 states"),
    ],
)
def test_settings_that_blocks_do_not_know(stored: Any, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    base, folder = stored
    settings = {"trajectories": (folder,), "output": str(tmp_path / "g"), "slice_states": 6, "steps": 1, **changes}
    if base.spec.causal and "slice_states" in changes:  # those have no end
        assert train(TrainConfig(**settings, heldout=4, heldout_texts=0), base)["finished"]
        return
    with pytest.raises(InputError, match=said):
        train(TrainConfig(**settings), base)


def test_heldout_metrics_of_a_g_that_changes_nothing_are_those_of_the_stale_base() -> None:
    base = tiny_base("llada", block=SIZE, end_ids=(23,))
    data = texts(base)
    g = Sampler(base, SamplerConfig(output_norm_init=0.0)).eval()
    config = TrainConfig(rollout=2)
    found = held_out(base, g, data, [0, 1, 2], config, torch.no_grad())
    assert found["kl_1"] == pytest.approx(found["stale_1"], rel=1e-6)  # h' = h
    assert found["kl_2"] > found["kl_1"] > 0
