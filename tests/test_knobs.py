"""Knobs of g and of its training: each by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.exact import ExactBase, load_exact
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.losses import kl_and_delta, row_shares, row_weights
from adjust_dlm.sampler import CONFIG, Sampler, SamplerConfig, load_sampler, start_sampler
from adjust_dlm.train.batches import batch_loss, depth_shares, lots, pack, random_slices
from adjust_dlm.train.trainer import Run, TrainConfig, train
from adjust_dlm.train.unroll import unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError
from helpers import MASK, left_pad, stopping, tiny_base, tiny_sampler, unroll_slices

CPU = torch.device("cpu")
ROWS = [[2, 5, MASK, 7, MASK, 9], [4, MASK, 6], [MASK]]


@pytest.fixture(scope="module")
def exact() -> ExactBase:
    return load_exact(device=CPU, dtype=torch.float32)


# g ---------------------------------------------------------------------------------------------------------------


def test_more_layers_are_applied_one_after_another() -> None:
    base, state = tiny_base("dream"), left_pad(ROWS)
    g, h_BLD = tiny_sampler(base, layers=3), base.hidden(state)
    e_BLD = base.to_frame(base.embed(state.tokens_BL), state)
    z_BLD = g.mix(torch.cat([g.norm_embed(e_BLD), g.norm_hidden(h_BLD)], -1))
    for layer in (g.layer, g.more[0], g.more[1]):
        z_BLD = layer(z_BLD, state)
    assert torch.equal(g(h_BLD, state), h_BLD + g.norm_out(z_BLD))
    assert len({layer.layer.mlp.up_proj.weight.data_ptr() for layer in (g.layer, *g.more)}) == 3


def test_mlp_scales_the_width_and_the_parameters_are_those_of_the_formula() -> None:
    base = tiny_base("dream")

    def count(**config: object) -> int:
        return sum(p.numel() for p in Sampler(base, SamplerConfig(**config)).parameters())  # type: ignore[arg-type]

    plain = count()
    layer = sum(p.numel() for p in Sampler(base).layer.parameters())
    assert count(layers=2) == plain + layer
    assert count(mlp=1.5) == plain + 3 * 32 * 32
    assert count(layers=2, mlp=0.5) == plain + layer - 2 * 3 * 32 * 32


def test_a_g_with_knobs_comes_back_and_an_older_file_loads(tmp_path: Path) -> None:
    base, state = tiny_base("dream"), left_pad(ROWS)
    tiny_sampler(base, layers=2, mlp=0.5).save(tmp_path / "new")
    again = load_sampler(tmp_path / "new", base)
    assert again.config == SamplerConfig(layers=2, mlp=0.5, output_norm_init=1.0)
    again.save(tmp_path / "twice")
    assert torch.equal(
        load_sampler(tmp_path / "twice", base)(base.hidden(state), state), again(base.hidden(state), state)
    )
    tiny_sampler(base).save(tmp_path / "old")
    facts = json.loads((tmp_path / "old" / CONFIG).read_text())
    for name in ("layers", "mlp", "features"):
        del facts["config"][name]
    (tmp_path / "old" / CONFIG).write_text(json.dumps(facts))
    assert load_sampler(tmp_path / "old", base).config == SamplerConfig(output_norm_init=1.0)
    (tmp_path / "old" / CONFIG).write_text(json.dumps({**facts, "config": {**facts["config"], "anchor": True}}))
    with pytest.raises(InputError, match=r"unknown settings \['anchor'\]"):
        load_sampler(tmp_path / "old", base)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"layers": 1.5}, "layers is 1.5; it must be a whole number"),
        ({"mlp": 0}, "mlp is 0; it must be a finite number above 0"),
        ({"mlp": float("inf")}, "mlp is inf; it must be a finite number above 0"),
        ({"norms": "no"}, "norms is 'no'; it must be true or false"),
        ({"residual": None}, "residual is None; it must be true or false"),
        ({"output_norm_init": float("nan")}, "output_norm_init is nan; it must be a finite number"),
        ({"features": 3}, "features is 3; it must be a list, each a whole number"),
    ],
)
def test_bad_knobs_of_g_are_named(config: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SamplerConfig(**config)  # type: ignore[arg-type]


def test_g_starts_from_another_sampler(tmp_path: Path) -> None:
    base = tiny_base("dream")
    other = tiny_sampler(base, seed=3)
    other.save(tmp_path)
    g = start_sampler(base, other.config, str(tmp_path))
    for name, weight in other.state_dict().items():
        assert torch.equal(g.state_dict()[name], weight.bfloat16().float())
    with pytest.raises(InputError, match="this run has"):
        start_sampler(base, SamplerConfig(layers=2), str(tmp_path))
    with pytest.raises(InputError, match="it must be fresh or the folder"):
        start_sampler(base, SamplerConfig(), "warm")


# Weights and depths ----------------------------------------------------------------------------------------------


def test_row_weights_with_another_decay_and_share_by_hand() -> None:
    rank = torch.tensor([[0, 2, -1]])
    near = torch.tensor([1.0, torch.e**-1, 0.0])
    expected = 0.5 * near / near.sum() + 0.5 * torch.tensor([0.5, 0.5, 0])
    torch.testing.assert_close(row_weights(rank, rank >= 0, "next", decay=2, share=0.5)[0], expected)


def test_depths_and_their_shares() -> None:
    assert depth_shares(TrainConfig(), (0,)) == {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}
    assert depth_shares(TrainConfig(loss="last"), (0,)) == {3: 1.0}


KEY = (4, 1)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"suppress_eos": True}, {"suppress_eos": True}),
        ({"weights": "uniform"}, {"weights": "uniform"}),
        ({"next_decay": 1.0}, {"next_decay": 1.0}),
        ({"next_share": 0.5}, {"next_share": 0.5}),
        ({"loss": "last"}, {"depths": (2,)}),
        ({"rows": 4}, {"rows": 4}),
    ],
    ids=str,
)
def test_every_setting_of_the_objective_reaches_loss_and_gradient(
    changes: dict[str, Any], counted: dict[str, Any]
) -> None:
    """Against the same parts called one by one; without the setting it is another gradient."""
    base = tiny_base("dream", end_ids=(1, 3, 4, 5))
    texts = decode(base, [[2, 5], [7], [2]], DecodeConfig(max_new_tokens=9), decoder="joint")
    slices = pack([texts.trajectory(b) for b in range(3)], [0, 1, 0], 4, 0)
    g = tiny_sampler(base).requires_grad_(True)

    def both(loss: Tensor) -> tuple[Tensor, Tensor]:
        return loss.detach(), torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(g.parameters()))])

    def by_hand(counted: dict[str, Any]) -> tuple[Tensor, Tensor]:
        run = unroll_slices(base, g, slices, rollout=2)
        how = {"depths": (1, 2), **counted}
        limit = how.pop("rows", None)
        if limit:
            how["share_BL"] = row_shares(run.rank_BL, limit, lots(run.rank_BL, 3, KEY, 5))
        return both(unrolled_kl(base, run, **how))

    config = TrainConfig(rollout=2, slice_states=4, slices=3, **changes)
    got = both(batch_loss(base, g, slices, config, key=KEY, delta=kl_and_delta, first=5))
    torch.testing.assert_close(got, by_hand(counted), rtol=1e-4, atol=1e-5)
    assert (by_hand({})[1] - got[1]).abs().max() > 1e-2


def test_lots_are_others_for_every_seed_step_and_slice() -> None:
    """Three slices of two states; the same for a slice behind more left pads, and in a micro-batch of its own."""
    rank = torch.zeros(6, 50, dtype=torch.long)
    drawn = [lots(rank, 3, key, first) for key, first in (((0, 0), 0), ((1, 0), 0), ((0, 1), 0), ((0, 0), 3))]
    numbers = torch.stack(drawn).flatten()
    assert len(numbers.unique()) == 4 * 6 * 50 and (numbers >= 0).all() and (numbers < 1).all()
    assert torch.equal(lots(torch.zeros(2, 60), 1, (0, 0), 4)[:, 10:], drawn[3][1::3])
    blocks = lots(torch.zeros(24, 50), 3, (0, 0), 3, blocks=4)  # of two states of three texts
    assert len(blocks.unique()) == 24 * 50 and torch.equal(blocks[::4], drawn[3])
    assert torch.equal(
        lots(torch.zeros(6, 50), 1, (0, 0), 4, blocks=3), blocks.view(2, 3, 4, 50)[:, 1, :3].flatten(0, 1)
    )


def test_the_store_knows_the_temperature_of_each_row(exact: ExactBase, tmp_path: Path) -> None:
    make_trajectories(
        TrajectoriesConfig(
            base="exact",
            num=6,
            output=str(tmp_path),
            max_new_tokens=4,
            temperature=(1.0, 0.5),
            batch_size=2,
            shard_rows=2,
        ),
        base=exact,
    )
    assert [x.temperature for x in TrajectoryStore(tmp_path)] == [1.0, 0.5] * 3


# The trainer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(exact: ExactBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trajectories")
    make_trajectories(
        TrajectoriesConfig(base="exact", num=512, output=str(out), max_new_tokens=4, batch_size=512), base=exact
    )
    return out


def settings(folder: Path, output: Path, **changes: object) -> TrainConfig:
    common = {
        "base": "exact", "slice_states": 4, "slices": 8, "heldout": 32, "warmup": 5, "steps": 9, "eval_every": 9,
        "checkpoint_every": 5,
    }  # fmt: skip
    return TrainConfig(trajectories=(str(folder),), output=str(output), **{**common, **changes})  # type: ignore[arg-type]


EVERYTHING: dict[str, object] = {
    "layers": 2, "mlp": 0.5,
    "next_decay": 1.0, "next_share": 0.5, "reverse": 0.5,
}  # fmt: skip


def test_a_run_with_every_knob_resumes_bit_for_bit(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    whole = train(settings(folder, tmp_path / "whole", **EVERYTHING), exact)

    first = train(settings(folder, tmp_path / "parts", **EVERYTHING), stopping(exact, 6))
    assert not first["finished"] and 0 < first["steps"] < 9
    assert train(settings(folder, tmp_path / "parts", **EVERYTHING), exact)["heldout"] == whole["heldout"]
    a, b = (torch.load(tmp_path / p / "checkpoint.pt", weights_only=True) for p in ("whole", "parts"))
    assert all(torch.equal(a["sampler"][k], b["sampler"][k]) for k in a["sampler"])
    files = [(tmp_path / p / "sampler" / "sampler.safetensors").read_bytes() for p in ("whole", "parts")]
    assert files[0] == files[1]


def test_the_reverse_share_is_that_of_the_loss(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """The same windows and the same fresh g: the first loss is linear in the share, and the step another one."""

    def first(share: float) -> float:
        train(settings(folder, tmp_path / f"{share}", reverse=share, steps=1, eval_every=1), exact)
        return float(json.loads((tmp_path / f"{share}" / "metrics.jsonl").read_text().splitlines()[0])["loss"])

    forward, mixed, backward = first(0.0), first(0.25), first(1.0)
    assert abs(forward - backward) > 0.01
    assert mixed == pytest.approx(0.75 * forward + 0.25 * backward, rel=1e-5)
    files = [(tmp_path / f"{share}" / "sampler" / "sampler.safetensors").read_bytes() for share in (0.0, 0.25, 1.0)]
    assert len(set(files)) == 3


def test_a_second_stage_goes_on_from_the_first_and_says_so(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(folder, one, steps=2, slice_states=8), exact)
    train(settings(folder, two, steps=1, rollout=5, slice_states=8, lr=1e-9, init=str(one / "sampler")), exact)
    facts = json.loads((two / "sampler" / CONFIG).read_text())
    before = json.loads((one / "sampler" / CONFIG).read_text())
    assert facts["trained_on"] == before.pop("trained_on")  # the same folder, once
    assert facts["started_from"] == before
    assert (facts["training"]["rollout"], facts["started_from"]["training"]["rollout"]) == (5, 3)
    first, second = (load_sampler(stage / "sampler", exact).state_dict() for stage in (one, two))
    for name in ("sampler", "sampler-best"):
        shutil.rmtree(one / name)  # a run that has begun needs it no more
    (two / "sampler" / CONFIG).unlink()
    assert train(settings(folder, two, steps=1, rollout=5, slice_states=8, lr=1e-9, init=str(one / "sampler")), exact)
    assert json.loads((two / "sampler" / CONFIG).read_text()) == facts
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": 7}, r"slice_states is 4; it must exceed the rollout \(7\)"),
        ({"reverse": 2.0}, r"reverse is 2.0; it must lie in"),
        ({"next_share": -0.1}, r"next_share is -0.1; it must lie in"),
        ({"next_decay": 0}, "next_decay is 0; it must be a finite number above 0"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
    ],
)
def test_bad_knobs_of_training_are_named(folder: Path, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        settings(folder, tmp_path, **changes)


def test_the_defaults_are_the_recipe_as_it_was() -> None:
    config = TrainConfig()
    assert config.sampler_config() == SamplerConfig()
    assert dataclasses.asdict(SamplerConfig()) == {
        "norms": True, "residual": True, "output_norm_init": 0.1, "pairing": "state", "layers": 1, "mlp": 1.0,
        "features": (),
    }  # fmt: skip
    assert (config.next_decay, config.next_share) == (3.0, 0.9)
    assert (config.init, config.reverse) == ("fresh", 0.0)


# Features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_features_are_states_of_earlier_layers_in_the_frame(family: str) -> None:
    """Layer 2 of 3, from the layers called one by one; padded rows; the states themselves do not change."""
    base, state = tiny_base(family, num_hidden_layers=3), left_pad(ROWS)
    body = base.model
    h_BLD, rotary = body.embed_tokens(state.tokens_BL), body.rotary(state.positions_BL, torch.float32)
    for layer in body.layers[:2]:
        h_BLD = layer(h_BLD, state.real_BL[:, None, None, :], rotary)
    twin = base.with_features((2,))
    got = twin.hidden(state)
    assert torch.equal(got, torch.cat([base.hidden(state), base.to_frame(h_BLD, state)], -1))
    assert torch.equal(twin.logits(got[0]), base.logits(base.hidden(state)[0]))
    assert base.with_features(()) is base and twin.fingerprint == base.fingerprint


def test_g_sees_features_at_every_step(tmp_path: Path) -> None:
    base, state = tiny_base("dream", num_hidden_layers=3), left_pad(ROWS)
    g = tiny_sampler(base, features=(1, 2))
    wide = g.on(base).hidden(state)
    h_0, f_1, f_2 = wide.split(32, -1)
    e_BLD = g.norm_embed(base.to_frame(base.embed(state.tokens_BL), state))

    def step(h_BLD: Tensor) -> Tensor:
        features = [g.norm_features[0](f_1), g.norm_features[1](f_2)]
        z_BLD = g.mix(torch.cat([e_BLD, g.norm_hidden(h_BLD), *features], -1))
        return h_BLD + g.norm_out(g.layer(z_BLD, state))

    two = g(g(wide, state), state)
    assert torch.equal(two, torch.cat([step(step(h_0)), f_1, f_2], -1))
    g.save(tmp_path)
    assert load_sampler(tmp_path, base).config == g.config
    assert sum(p.numel() for p in g.parameters()) == sum(p.numel() for p in Sampler(base).parameters()) + 2 * 33 * 32


@pytest.mark.parametrize("cache", [None, 3])
@pytest.mark.parametrize("decoder", ["adjust", "adaptive", "cascade", "verified"])
def test_decoders_give_g_its_features(decoder: str, cache: int | None) -> None:
    """With no weight on the features, the texts are those of the same g without them."""
    base = tiny_base("dream", num_hidden_layers=3)
    plain, seeing = tiny_sampler(base), tiny_sampler(base, features=(2,))
    weights = plain.state_dict()
    weights["mix.weight"] = torch.cat([weights["mix.weight"], torch.zeros(32, 32)], 1)
    seeing.load_state_dict(weights, strict=False)
    config = DecodeConfig(
        max_new_tokens=10, tokens_per_step=3 if decoder == "adjust" else 1, seed=3,
        cache_period=None if decoder == "verified" else cache,
    )  # fmt: skip
    one, other = (decode(base, [[2, 5], [7]], config, decoder=decoder, sampler=g) for g in (plain, seeing))
    assert torch.equal(one.tokens_BL, other.tokens_BL)
    assert torch.equal(one.order_BL, other.order_BL)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_with_features_trains_and_its_g_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The first loss is that of the unroll on a base with features; the caller's base stays as it is."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    base = tiny_base("dream", num_hidden_layers=3)
    source = TrajectoriesConfig(base="dream", num=16, output=str(tmp_path / "t"), max_new_tokens=8, suppress_eos=True)
    make_trajectories(source, base=base)
    config = settings(
        tmp_path / "t", tmp_path / "run", features=(1, 2), steps=2, eval_every=1, heldout=4,
        compile=compiled,
    )  # fmt: skip
    train(config, base)
    assert base.keep == () and not base.compiled
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        g = Sampler(base, config.sampler_config())
    store = TrajectoryStore(tmp_path / "t")
    rows = Run(config, base, g, store, 0, 1, CPU).rows(False)
    slices = random_slices(store, rows, count=8, length=4, rollout=3, key=(0, 0), pad_id=base.spec.pad_id)
    run = unroll_slices(g.on(base), g, slices, rollout=3)
    loss = sum(unrolled_kl(base, run, k).item() for k in (1, 2, 3)) / 3
    assert lines[0]["loss"] == pytest.approx(loss, rel=1e-4)
    trained = load_sampler(tmp_path / "run" / "sampler", base)
    result = decode(base, [[2]], DecodeConfig(tokens_per_step=2, max_new_tokens=8), sampler=trained)
    assert (result.base_calls_B.tolist(), result.sampler_calls_B.tolist()) == ([4], [4])


def test_features_that_a_base_does_not_have_are_refused(exact: ExactBase) -> None:
    base = tiny_base("dream", num_hidden_layers=3)
    for layers in ((0,), (3,), (2, 1), (1, 1)):
        with pytest.raises(InputError, match=r"has layers 1\.\.2 below its last, ascending"):
            Sampler(base, SamplerConfig(features=layers))
    with pytest.raises(InputError, match="gives no states of earlier layers"):
        Sampler(exact, SamplerConfig(features=(1,)))
    with pytest.raises(InputError, match=r"features is 1\.5; it must be a whole number"):
        SamplerConfig(features=(1.5,))  # type: ignore[arg-type]
