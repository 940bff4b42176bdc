"""Training with sparse steps: the states are those of decoding, the gradient that of a plain form written out here."""

from __future__ import annotations

import functools
import importlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.exact import ExactBase, load_exact
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import canvas, decode
from adjust_dlm.losses import RowWeights
from adjust_dlm.sampler import CONFIG, Sampler
from adjust_dlm.train import preflight, trainer
from adjust_dlm.train.batches import pack
from adjust_dlm.train.metrics import held_out
from adjust_dlm.train.objective import drawn_sparse
from adjust_dlm.train.one_pass import Pool, PoolConfig, held_out_rows
from adjust_dlm.train.sparse import Sparse
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import Slices, Unrolled, observe, unroll, unroll_frames, unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError, Trajectory
from helpers import BOS, MASK, stopping, tiny_base, tiny_sampler
from test_train import settings

CPU = torch.device("cpu")
PROMPTS = [[BOS, 5, 7], [BOS], [BOS, 4, MASK, 9, 3, MASK], [MASK, 6]]  # one has its first position masked
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "two": {"layers": 2}, "features": {"features": (1,)},
    "all": {"layers": 2, "features": (1, 2), "anchor": True},
}  # fmt: skip
ROLLOUT = 3


def endless(family: str = "dream") -> TransformerBase:
    """Three layers; the end token is a padding row of the head, so that every row has all of its commits."""
    return tiny_base(family, end_ids=(23,), num_hidden_layers=3)


@pytest.fixture(scope="module")
def exact() -> ExactBase:
    return load_exact(device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(exact: ExactBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trajectories")
    config = TrajectoriesConfig(base="exact", num=512, output=str(out), max_new_tokens=4, batch_size=512)
    make_trajectories(config, base=exact)
    return out


def texts(base: Base, prompts: list[list[int]] = PROMPTS, new: int = 9) -> list[Trajectory]:
    """Joint decodes; random prompts of several lengths, in an order that jumps about."""
    config = DecodeConfig(max_new_tokens=new, order="random", seed=5)
    result = decode(base, prompts, config, decoder="joint")
    return [result.trajectory(b) for b in range(len(prompts))]


# States ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dream", "llada"])
@pytest.mark.parametrize("pairing", ["state", "token"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("candidates", [3, 5])
def test_states_are_those_of_decoding(
    monkeypatch: pytest.MonkeyPatch, family: str, pairing: str, form: str, candidates: int
) -> None:
    """Every step of every round of sparse decoding, all columns, against a window on the text that it wrote."""
    base = endless(family)
    g = tiny_sampler(base, pairing=pairing, **FORMS[form])
    place = torch.randperm(32, generator=torch.Generator().manual_seed(1)).float()

    def scores(_: Base, __: Tensor, canvas: Any) -> tuple[Tensor, None]:
        open_BL = canvas.open_BL & canvas.busy_B[:, None]
        return torch.where(open_BL, place[canvas.positions_BL], -torch.inf), None

    steps: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def spy(sampler: Sampler, h_BLD: Tensor, canvas: Any, keys: Any, k: int) -> Tensor:
        out = real(sampler, h_BLD, canvas, keys, k)
        steps.append((k, out, canvas.tokens_BL.clone(), canvas.commits_B.clone()))
        return out

    adjust = importlib.import_module("adjust_dlm.decoders.adjust")  # the package has a function of that name
    real = adjust.sparse_step
    monkeypatch.setattr(canvas, "_scores", scores)  # an order that does not depend on what g says
    monkeypatch.setattr(adjust, "sparse_step", spy)
    # Under "random" candidates go by the score alone, as in training.
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=ROLLOUT + 1, candidates=candidates, order="random")
    result = decode(base, PROMPTS, config, sampler=g, sparse=True)
    rows = [result.trajectory(b) for b in range(len(PROMPTS))]
    compared = 0
    for k, h_BLD, tokens_BL, commits_B in steps:
        start = [int(n) - k for n in commits_B]
        slices = pack(rows, start, ROLLOUT + 1, base.spec.pad_id)
        run = unroll(g.on(base), Sparse(g, candidates), slices, rollout=ROLLOUT)
        shown_BL = slices.states(MASK).tokens_BL[k * len(rows) : (k + 1) * len(rows)]
        for b, row in enumerate(rows):
            if start[b] % (ROLLOUT + 1) == 0 and int(commits_B[b]) < row.commits:  # others have nothing more to do
                assert torch.equal(shown_BL[b], tokens_BL[b])
                torch.testing.assert_close(run.student[k - 1][b], h_BLD[b], rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared == sum(n - 1 - (n - 1) // (ROLLOUT + 1) for n in (row.commits for row in rows))


def by_hand(row: Trajectory, t: int, candidates: int, length: int) -> list[int]:
    """Columns of the candidates at state t of a left-padded row."""
    pads = length - len(row.tokens_L)
    order = {pads + i: n if n >= 0 else 99 for i, n in enumerate(row.order_L.tolist()) if n >= t or n == -2}
    open_ = sorted(order, key=lambda i: (order[i], i))[: candidates + 1]
    rest = [i for i in reversed(range(pads, length)) if i not in open_]
    return sorted(open_ + rest[: candidates + 1 - len(open_)])


def test_candidates_are_what_the_text_reveals_first_and_only_they_are_compared() -> None:
    """A text that ended early keeps what it never revealed behind the rest; too few are filled up from the right."""
    base = endless()
    rows = texts(base)
    rows[1].order_L[rows[1].order_L > 5] = -2
    length, starts = max(len(x.tokens_L) for x in rows), [0, 2, 7, 4]
    slices = pack(rows, starts, ROLLOUT + 2, 0)
    run = unroll(base, Sparse(tiny_sampler(base), 4), slices, rollout=ROLLOUT)
    whole = unroll(base, tiny_sampler(base), slices, rollout=ROLLOUT)
    for w, (b, row) in ((w, x) for w in (0, 1) for x in enumerate(rows)):
        wanted = by_hand(row, starts[b] + w, 4, length)
        assert len(wanted) == 5
        for k in range(ROLLOUT):
            at = w * len(rows) + b
            expected = torch.full((length,), -1)
            expected[wanted] = whole.rank[k][at, wanted]
            assert torch.equal(run.rank[k][at].clamp_min(-1), expected.clamp_min(-1))


# Gradients -------------------------------------------------------------------------------------------------------


def turned(x_LHd: Tensor, base: TransformerBase) -> Tensor:
    """Rotary embedding of one row without pads, from its formula."""
    length, _, d = x_LHd.shape
    theta = base.layer_config.rope["rope_theta"]
    frequency = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle_L1F = torch.arange(length)[:, None, None] * frequency
    low, high = x_LHd.chunk(2, -1)
    cos, sin = angle_L1F.cos(), angle_L1F.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def plain_form(
    g: Sampler, base: TransformerBase, h_0: Tensor, tokens_KL: Tensor, candidates: list[int], every: int
) -> list[Tensor]:
    """Sparse steps of one window of a row without pads, all columns computed and most thrown away; no code of ours.

    Args:
        g: with `pairing` "state", in Dream's frame.
        base: for embedding and shape.
        h_0: [L, D and features].
        tokens_KL: x_0, x_1, ...
        candidates: columns.
        every: as `detach_every`.
    """
    width, length = base.width, len(h_0)
    parts = list(h_0.split(width, -1))
    extras = parts[1:] + ([parts[0]] if g.config.anchor else [])
    norms = [*g.norm_features, *([g.norm_anchor] if g.config.anchor else [])]
    before = [0, *range(length - 1)]  # the state of column i is that of token i - 1
    h, old, out = parts[0], [], []
    active = set(candidates)
    for k, x_L in enumerate(tokens_KL[1:], 1):
        if every and k > 1 and (k - 1) % every == 0:
            h, old = h.detach(), [(a.detach(), b.detach()) for a, b in old]
        new = [i for i in range(length) if tokens_KL[0, i] == MASK and x_L[i] != MASK]
        active |= {i for i in range(length) if before[i] in new}
        mine = torch.tensor([i in active for i in range(length)])[:, None, None]
        e = base.embed(x_L)[before]
        inputs = [g.norm_embed(e), g.norm_hidden(h), *(n(x) for n, x in zip(norms, extras, strict=True))]
        z = g.mix(torch.cat(inputs, -1))
        for n, part in enumerate(g.layers):
            layer = part.layer
            attention, u = layer.self_attn, layer.input_layernorm(z)
            d, heads = base.layer_config.head_dim, base.layer_config.num_attention_heads
            q, key, v = (
                p(u).view(length, -1, d) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )  # fmt: skip
            q, key = turned(q, base), turned(key, base)
            if k == 1:
                old.append((key, v))
            key, v = (torch.where(mine, a, b) for a, b in zip((key, v), old[n], strict=True))
            share = heads // key.shape[1]
            mixed = []
            for head in range(heads):
                chance_LL = (q[:, head] @ key[:, head // share].T / d**0.5).softmax(-1)
                mixed.append(chance_LL @ v[:, head // share])
            z = z + attention.o_proj(torch.cat(mixed, -1))
            m = layer.post_attention_layernorm(z)
            z = z + layer.mlp.down_proj(torch.nn.functional.silu(layer.mlp.gate_proj(m)) * layer.mlp.up_proj(m))
        h = torch.where(mine[..., 0], h + g.norm_out(z), h)
        out.append(torch.cat([h, *extras], -1))
    return out


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_that_of_the_plain_form(form: str, every: int) -> None:
    """In fp64, of random numbers on all states of all depths; two windows of each of two rows, four candidates of 14.

    Norms and rotary angles of ours go through fp32.
    """
    base = endless()
    base.model.double()
    base.head_matrix = base.head_matrix.double()
    g = tiny_sampler(base, **FORMS[form]).double().requires_grad_(True)
    rows = texts(endless(), [[BOS, 5, 7, 3, 6], [MASK, 6, 3, MASK, 4]])
    slices = pack(rows, [2, 3], ROLLOUT + 2, 0)
    seen = observe(g.on(base), slices)
    run = unroll_frames(Sparse(g, 3), seen, rollout=ROLLOUT, detach_every=every)
    made = torch.Generator().manual_seed(0)
    pull_KBLD = [torch.randn(h.shape, generator=made, dtype=torch.float64) for h in run.student]
    names = [name for name, _ in g.named_parameters()]
    ours = torch.autograd.grad(
        sum((h * p).sum() for h, p in zip(run.student, pull_KBLD, strict=True)), list(g.parameters())
    )
    total = torch.zeros((), dtype=torch.float64)
    for at in range(4):
        row, t = rows[at % 2], [2, 3][at % 2] + at // 2
        tokens_KL = seen.x.tokens_BL[at::2][: ROLLOUT + 1]
        states = plain_form(g, base, seen.h_BLD[at], tokens_KL, by_hand(row, t, 3, 14), every)
        for k, h in enumerate(states):
            torch.testing.assert_close(run.student[k][at], h, rtol=1e-5, atol=1e-5)
            total = total + (h * pull_KBLD[k][at]).sum()
    for name, a, b in zip(names, ours, torch.autograd.grad(total, list(g.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()), msg=name)


def test_keys_of_the_first_step_are_learned_through(exact: ExactBase) -> None:
    """A gradient through states alone would be another one."""
    base = endless()
    g = tiny_sampler(base).requires_grad_(True)
    frames = observe(base, pack(texts(base), [0, 2, 3, 1], ROLLOUT + 1, 0))

    def gradient(form: Any) -> Tensor:
        run = unroll_frames(form, frames, rollout=ROLLOUT)
        return torch.autograd.grad(unrolled_kl(base, run, (2, 3)), g.layer.layer.self_attn.v_proj.weight)[0]

    cut = Sparse(g, 3)
    cut.keys = lambda *given: tuple((k.detach(), v.detach()) for k, v in Sparse(g, 3).keys(*given))
    assert not torch.allclose(gradient(Sparse(g, 3)), gradient(cut), rtol=1e-2)


def loss_and_gradient(base: Base, g: Sampler, run: Unrolled, **changes: Any) -> list[Tensor]:
    loss = unrolled_kl(base, run, range(1, len(run.student) + 1), **changes)
    return [loss.detach(), *torch.autograd.grad(loss, list(g.parameters()))]


@pytest.mark.parametrize("pairing", ["state", "token"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [0, 1])
def test_candidates_for_all_columns_are_whole_steps(form: str, pairing: str, every: int) -> None:
    """States of all real columns, loss and gradient."""
    base = endless()
    g = tiny_sampler(base, pairing=pairing, **FORMS[form]).requires_grad_(True)
    slices = pack(texts(base), [0, -1, 4, 2], ROLLOUT + 3, 0)
    runs = [unroll(g.on(base), step, slices, rollout=ROLLOUT, detach_every=every) for step in (g, Sparse(g, 30))]
    real_BL = slices.real_NL.repeat(3, 1)
    for a, b, c, d in zip(runs[0].student, runs[1].student, runs[0].rank, runs[1].rank, strict=True):
        torch.testing.assert_close(a[real_BL], b[real_BL], rtol=1e-4, atol=1e-5)
        assert torch.equal(c >= 0, d >= 0)
    for a, b in zip(*(loss_and_gradient(base, g, run) for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_under_autocast_states_widen_as_whole_steps_let_them() -> None:
    """A half-precision base and an fp32 g, as on a card."""
    base = endless()
    base.model.bfloat16()
    base.head_matrix = base.head_matrix.bfloat16()
    g = tiny_sampler(base, **FORMS["all"]).requires_grad_(True)
    slices = pack(texts(endless()), [0, 2, 3, 1], ROLLOUT + 1, 0)
    with torch.autocast("cpu", torch.bfloat16):
        sparse, whole = (unroll(g.on(base), step, slices, rollout=ROLLOUT) for step in (Sparse(g, 30), g))
        loss = unrolled_kl(base, sparse, (1, 2, 3))
    loss.backward()
    for a, b in zip(sparse.student, whole.student, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a[slices.real_NL], b[slices.real_NL], rtol=0.1, atol=0.1)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in g.parameters())


# One pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["next", "uniform"])
@pytest.mark.parametrize("ends", [False, True])
def test_one_pass_has_the_gradient_of_stored_windows(ends: bool, weights: RowWeights) -> None:
    """With uniform rows, too, where a pool would otherwise know no commit ahead of its states."""
    base = tiny_base("dream", seed=1, end_ids=tuple(range(1, 12))) if ends else endless()
    source = PromptSource("mixed", [[BOS, *range(3, 3 + n)] for n in (3, 0, 6, 1)])
    config = PoolConfig(rows=4, max_new_tokens=12)
    pool = Pool(base, config, source, length=5, rollout=2, slices=2, seed=3, weights=weights, ahead=6)
    data = held_out_rows(base, config.trajectories(seed=3, suppress_eos=False), source, 60)
    g = tiny_sampler(base).requires_grad_(True)
    for _ in range(8):
        frames = pool.frames()
        windows = [(int(row), w * 2 + m) for w in range(3) for m, row in enumerate(frames.text_SN[w]) if row >= 0]
        starts = [
            int((data[row].order_L != -1).sum() - frames.x.masked_BL[at].sum()) for row, at in windows
        ]  # fmt: skip
        single = pack([data[row] for row, _ in windows], starts, 3, base.spec.pad_id)
        ours = loss_and_gradient(base, g, unroll_frames(Sparse(g, 6), frames, rollout=2), weights=weights)
        plain = loss_and_gradient(base, g, unroll(base, Sparse(g, 6), single, rollout=2), weights=weights)
        assert plain[0] > 0
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_pool_waits_for_the_candidates() -> None:
    base, source = endless(), PromptSource("one", [[BOS]])
    common: dict[str, Any] = {"length": 5, "rollout": 2, "slices": 2, "weights": "uniform"}
    config = PoolConfig(rows=4, max_new_tokens=40)
    assert [Pool(base, config, source, **common, ahead=m).wait for m in (0, 16, 99)] == [0, 16, 41]


# The trainer -----------------------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {"sparse": 2, "rollout": 2}


def test_training_brings_the_sparse_kl_down(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """Three candidates of four positions; sampler.json says how it was trained."""
    common = {**SPARSE, "steps": 300, "eval_every": 300, "slices": 32, "lr": 1e-2}
    held = train(settings(folder, tmp_path, **common), exact)["heldout"]
    for k in (1, 2):
        assert held[f"kl_{k}"] < 0.5 * held[f"stale_{k}"]
    facts = json.loads((tmp_path / "sampler" / CONFIG).read_text())
    assert (facts["training"]["sparse"], facts["training"]["sparse_share"]) == (2, 1.0)


def test_held_out_metrics_look_at_sparse_steps() -> None:
    """kl_k is the loss of the sparse unroll of the same windows, batch by batch of 16."""
    base = endless()
    data, g = texts(base), tiny_sampler(base)
    config = SimpleNamespace(
        rollout=2, seed=0, weights="next", next_decay=3.0, next_share=0.9, suppress_eos=False, sparse=4
    )
    got = held_out(base, g, data, range(4), config, torch.no_grad())
    config.sparse = 0
    whole = held_out(base, g, data, range(4), config, torch.no_grad())
    config.sparse = 40
    every = held_out(base, g, data, range(4), config, torch.no_grad())
    assert every == pytest.approx(whole, rel=1e-4)
    assert abs(got["kl_2"] - whole["kl_2"]) > 1e-3 and got["top1_1"] == pytest.approx(whole["top1_1"])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_sparse_run_resumes_bit_for_bit(exact: ExactBase, folder: Path, tmp_path: Path, share: float) -> None:
    knobs = {**SPARSE, "sparse_share": share, "layers": 2, "anchor": True, "detach_every": 1, "ema": 0.9}
    whole = train(settings(folder, tmp_path / "whole", **knobs), exact)

    first = train(settings(folder, tmp_path / "parts", **knobs), stopping(exact, 5))
    assert not first["finished"] and first["steps"] > 0
    assert train(settings(folder, tmp_path / "parts", **knobs), exact)["heldout"] == whole["heldout"]
    a, b = (torch.load(tmp_path / p / "checkpoint.pt", weights_only=True) for p in ("whole", "parts"))
    for name in ("sampler", "averaged"):
        assert all(torch.equal(a[name][k], b[name][k]) for k in a[name])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_micro_batch_has_the_form_that_its_key_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The losses of eight micro-batches, each against the unroll of its own form, compiled or not."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    base = endless()
    made = TrajectoriesConfig(base="dream", num=32, output=str(tmp_path / "t"), max_new_tokens=12)
    make_trajectories(made, base=base)
    config = settings(
        tmp_path / "t", tmp_path, sparse=4, sparse_share=0.5, compile=compiled, heldout=4, **FORMS["all"]
    )  # fmt: skip
    run = trainer._prepare(config, base, 0, 1)
    drawn: list[Slices] = []
    real = trainer.random_slices
    monkeypatch.setattr(trainer, "random_slices", lambda *a, **kw: drawn.append(real(*a, **kw)) or drawn[-1])  # type: ignore[func-returns-value]
    kinds = Counter[bool]()
    for micro in range(8):
        loss = trainer._micro_loss(run, micro)
        sparse = drawn_sparse(config, (config.seed, 0, micro))
        gradient = torch.autograd.grad(loss, run.sampler.mix.weight)[0]
        step = Sparse(run.sampler, 4) if sparse else run.sampler
        wanted = unrolled_kl(base, unroll(run.base, step, drawn[-1], rollout=3), (1, 2, 3))
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)
        expected = torch.autograd.grad(wanted, run.sampler.mix.weight)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)
        kinds[sparse] += 1
    assert min(kinds[True], kinds[False]) >= 1
    shares = [drawn_sparse(TrainConfig(sparse=9, sparse_share=0.3), (0, step, 0)) for step in range(3000)]
    assert sum(shares) / 3000 == pytest.approx(0.3, abs=0.03)
    assert all(drawn_sparse(TrainConfig(sparse=9), (0, step, 0)) for step in range(100))


@pytest.mark.parametrize(("sparse", "form"), [(4, "plain"), (9, "all"), (40, "two")])
def test_activations_by_formula_bound_what_autograd_keeps(tmp_path: Path, sparse: int, form: str) -> None:
    """Beside the base's pass, each storage once: 75 to 100 % of the formula."""
    base = endless()
    made = TrajectoriesConfig(base="dream", num=32, output=str(tmp_path / "t"), max_new_tokens=30, suppress_eos=True)
    make_trajectories(made, base=base)
    config = settings(
        tmp_path / "t", tmp_path / "run", heldout=4, slice_states=6, slices=4, sparse=sparse, **FORMS[form]
    )
    run = trainer._prepare(config, base, 0, 1)
    own = {w.untyped_storage().data_ptr() for w in [*run.sampler.parameters(), base.head_matrix]}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer._micro_loss(run, 0)
    size = sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in own)
    passed = 4 * 6 * preflight.longest(run) * (4 * 32 + 3 * 64) * 4
    graph = preflight.activation_bytes(run) - passed
    assert 0.75 * graph < size <= graph


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparse": 2}, r"sparse is 2; give at least the rollout \(3\) candidates"),
        ({"sparse": 5, "rollouts": (3, 7), "slice_states": 11}, r"sparse is 5; give at least the rollout \(7\)"),
        ({"sparse": -1}, "sparse is -1"),
        ({"sparse": 2.5}, "sparse is 2.5; it must be a whole number"),
        ({"sparse": 8, "sparse_share": 0.0}, "sparse_share is 0.0; it is a share above 0, up to 1"),
        ({"sparse": 8, "sparse_share": 1.5}, "sparse_share is 1.5; it is a share"),
        ({"sparse_share": 0.5}, "sparse_share is 0.5 without sparse steps; set sparse too"),
        ({"sparse": 8, "on_policy": 0.5}, "leave on_policy or sparse out"),
    ],
)
def test_bad_values_are_named(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        settings(folder, tmp_path, **changes)


def test_a_function_knows_no_sparse_steps() -> None:
    with pytest.raises(InputError, match="a function knows no sparse steps; they take a Sampler"):
        Sparse(lambda h, _: h, 4)  # type: ignore[arg-type]
