"""Making trajectories: every state exact, no two rows alike, and nothing but (settings, row) shows in the result."""

import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adjust_dlm.bases import Base, load_base
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.bases.family import dream_base, dream_config, llada_base, llada_config
from adjust_dlm.data import store
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories, temperature_index
from adjust_dlm.decoders import Canvas, decode
from adjust_dlm.sampler import load_sampler
from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, InputError
from helpers import tiny_sampler

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
IDS: dict[str, Any] = {"mask_id": 49, "end_ids": (48, *range(40, 47)), "bos_id": 47}


def tiny(family: str = "dream", seed: int = 0) -> Base:
    """Random weights; the head is steep enough that no order hangs on the last bit of an entropy."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = {**IDS, "head_weight": torch.randn(50, 32) / 2}
        return dream_base(dream_config(**TINY), **ids) if family == "dream" else llada_base(llada_config(**TINY), **ids)


@pytest.fixture(scope="module")
def dream() -> Base:
    return tiny()


def settings(folder: Path, **changes: Any) -> TrajectoriesConfig:
    fields = {"num": 20, "max_new_tokens": 8, "batch_size": 4, "shard_rows": 8, **changes}
    return TrajectoriesConfig(output=str(folder), **fields)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


MIXED = PromptSource("mixed", [[47, *range(n)] for n in (3, 0, 6, 1, 3, 2, 5)])


# --- state(t) ----------------------------------------------------------------------------------------------------


def exact_with_ends() -> ExactBase:
    joint = torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    return ExactBase(joint, end_ids=(2,))


@pytest.mark.parametrize("name", ["exact", "exact with ends", "dream", "llada"])
def test_every_state_equals_the_canvas_of_that_moment(name: str, tmp_path: Path) -> None:
    bases = {"exact": lambda: load_base("exact"), "exact with ends": exact_with_ends}
    base = bases[name]() if name in bases else tiny(name, seed=5)
    source = MIXED if name in ("dream", "llada") else PromptSource("empty", [[]])
    new = 12 if name in ("dream", "llada") else 4
    make_trajectories(settings(tmp_path / "s", num=24, max_new_tokens=new, batch_size=8), base, source=source)
    opened = TrajectoryStore(tmp_path / "s")
    prompts, early = [source.ids(row) for row in range(24)], 0
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(canvas: Canvas) -> None:
        seen.append((canvas.tokens_BL.clone(), canvas.masked_BL.clone()))

    start = Canvas(base, prompts, DecodeConfig(max_new_tokens=new))
    watch(start)
    decode(base, prompts, DecodeConfig(max_new_tokens=new), decoder="joint", watch=watch)
    for row, trajectory in enumerate(opened):
        real_L = start.real_BL[row]
        for t in range(trajectory.commits):
            tokens_L, masked_L = trajectory.state(t, base.spec.mask_id)
            assert torch.equal(tokens_L, seen[t][0][row][real_L]), (row, t)
            assert torch.equal(masked_L, seen[t][1][row][real_L]), (row, t)
        assert torch.equal(trajectory.tokens_L, seen[-1][0][row][real_L])
        early += trajectory.commits < new
    assert (early > 0) == (name != "exact")  # the case of rows that end early is in here


def test_orders_are_rankings_and_prompts_are_given(dream: Base, tmp_path: Path) -> None:
    made = make_trajectories(settings(tmp_path / "s"), dream, source=MIXED)
    opened = TrajectoryStore(tmp_path / "s")
    commits = 0
    for row, trajectory in enumerate(opened):
        prompt = MIXED.ids(row)
        assert trajectory.tokens_L[: len(prompt)].tolist() == prompt
        assert opened.columns.prompt_len_N[row] == len(prompt)
        assert set(trajectory.order_L[: len(prompt)].tolist()) == {GIVEN}
        new = trajectory.order_L[len(prompt) :]
        assert sorted(new[new != MASKED].tolist()) == list(range(trajectory.commits))
        commits += trajectory.commits
    assert (made["rows_made"], made["shards_made"], made["complete"]) == (20, 3, True)
    assert made["tokens"] == made["base_calls"] == commits  # K=1: one pass a commit
    assert (
        made["lengths"]["committed_mean"] == round(commits / 20, 4) == opened.manifests[0]["lengths"]["committed_mean"]
    )


# --- H7: one prompt, one seed, no copies -------------------------------------------------------------------------


def test_two_ranks_of_one_seed_make_what_one_makes_and_no_row_twice(
    dream: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_trajectories(settings(one, max_new_tokens=16), dream)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    first = make_trajectories(settings(two, max_new_tokens=16), dream)
    assert (first["rows_made"], first["complete"]) == (8, False)
    monkeypatch.setenv("RANK", "0")
    second = make_trajectories(settings(two, max_new_tokens=16), dream)
    assert (second["rows_made"], second["complete"]) == (12, True)
    assert contents(one) == contents(two)
    texts = {tuple(t.tokens_L.tolist()) for t in TrajectoryStore(one)}
    assert len(texts) == 20  # 50 tokens to choose from at each of up to 16 positions


def test_uniform_coin_flips_differ_between_rows(tmp_path: Path) -> None:
    base = ExactBase(torch.ones((2,) * 12))
    make_trajectories(settings(tmp_path / "s", num=64, max_new_tokens=12, shard_rows=64, batch_size=64), base)
    tokens = torch.stack([t.tokens_L for t in TrajectoryStore(tmp_path / "s")])
    # 64 draws out of 4096 strings: 0.5 equal pairs are expected, more than 4 have a chance of 2e-4
    assert len({tuple(row.tolist()) for row in tokens}) >= 60
    # 768 fair flips: within 5 standard deviations (5 * sqrt(768) / 2 = 69) of 384
    assert abs(int(tokens.sum()) - 384) < 69


def test_another_first_row_continues_the_same_series(dream: Base, tmp_path: Path) -> None:
    make_trajectories(settings(tmp_path / "all", num=20), dream)
    make_trajectories(settings(tmp_path / "rest", num=12, first_row=8), dream)
    whole, rest = TrajectoryStore(tmp_path / "all"), TrajectoryStore(tmp_path / "rest")
    assert rest.columns.row_N.tolist() == list(range(8, 20))
    assert all(torch.equal(whole[8 + n].tokens_L, rest[n].tokens_L) for n in range(12))


def test_another_seed_makes_other_rows(dream: Base, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_trajectories(settings(tmp_path / str(seed), seed=seed), dream)
    pairs = zip(TrajectoryStore(tmp_path / "0"), TrajectoryStore(tmp_path / "1"), strict=True)
    assert not any(torch.equal(a.tokens_L, b.tokens_L) and a.order_L.equal(b.order_L) for a, b in pairs)


# --- only settings and rows decide -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 8])
def test_batch_size_does_not_show(dream: Base, tmp_path: Path, batch_size: int) -> None:
    make_trajectories(settings(tmp_path / "a"), dream, source=MIXED)
    make_trajectories(settings(tmp_path / "b", batch_size=batch_size), dream, source=MIXED)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


FILTERS = {"top_p": 0.9, "top_k": 3, "order": "margin", "order_on": "raw", "suppress_eos": True, "seed": 5}


@pytest.mark.parametrize("filters", [{}, FILTERS], ids=["plain", "filtered"])
def test_each_row_is_what_joint_makes_of_it_alone_at_its_own_temperature(
    dream: Base, tmp_path: Path, filters: dict[str, Any]
) -> None:
    """Settings and temperature of each row written out here; at the other temperature it would be another row."""
    source, moved = PromptSource("even", [MIXED.ids(n) for n in range(4)]), 0
    make_trajectories(settings(tmp_path / "s", temperature=(1.0, 0.6), **filters), dream, source=source)
    for row, stored in enumerate(TrajectoryStore(tmp_path / "s")):
        own, other = (1.0, 0.6) if (row % 4 + row // 4) % 2 == 0 else (0.6, 1.0)  # four prompts
        alone, moves = (
            decode(
                dream, [source.ids(row)], DecodeConfig(max_new_tokens=8, temperature=t, **filters), decoder="joint",
                rows=[row],
            ).trajectory(0)
            for t in (own, other)
        )  # fmt: skip
        assert torch.equal(alone.tokens_L, stored.tokens_L) and torch.equal(alone.order_L, stored.order_L)
        assert stored.temperature == own
        moved += not torch.equal(moves.tokens_L, stored.tokens_L)
        assert stored.commits == 8 or not filters  # no end token, so every position is committed
    assert moved >= 3


def test_every_prompt_meets_every_temperature() -> None:
    for prompts, temperatures in ((1, 2), (2, 2), (4, 2), (3, 3), (5, 3)):
        met = {(r % prompts, temperature_index(r, prompts, temperatures)) for r in range(prompts * temperatures)}
        assert len(met) == prompts * temperatures


def test_a_compiled_base_makes_the_same_rows(dream: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths; traced by dynamo, run eagerly."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    base = tiny()
    plain = make_trajectories(settings(tmp_path / "a"), dream, source=MIXED)
    made = make_trajectories(settings(tmp_path / "b", compile=True), base, source=MIXED)
    assert base.compiled and not dream.compiled
    assert all(plain[name] == made[name] for name in ("rows_made", "base_calls", "tokens"))
    for x, y in zip(*(TrajectoryStore(tmp_path / name) for name in ("a", "b")), strict=True):
        assert torch.equal(x.tokens_L, y.tokens_L) and torch.equal(x.order_L, y.order_L)


# --- interruptions (H19) -----------------------------------------------------------------------------------------


def test_lost_and_damaged_shards_are_made_again_and_nothing_else(dream: Base, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    make_trajectories(settings(folder, num=40), dream)
    before = contents(folder)
    (folder / "shard-00008-00016.parquet").unlink()
    damaged = folder / "shard-00024-00032.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    for rows in ("00008-00016", "00032-00040"):  # what a killed writer leaves
        (folder / f".shard-{rows}.parquet.0123.part").write_bytes(b"PAR1")
    kept = folder / "shard-00000-00008.parquet"
    stamp = kept.stat().st_mtime_ns
    again = make_trajectories(settings(folder, num=40, batch_size=8), dream)
    assert (again["shards_made"], again["rows_made"], again["complete"]) == (2, 16, True)
    assert contents(folder) == before
    assert kept.stat().st_mtime_ns == stamp
    assert make_trajectories(settings(folder, num=40), dream)["shards_made"] == 0


def test_a_stop_in_the_middle_of_a_shard_loses_that_shard_only(
    dream: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tmp_path / "s", tmp_path / "whole"
    make_trajectories(settings(whole), dream)
    base, passes = tiny(), 0
    hidden = base.hidden

    def stop_later(state: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes > 36:  # two shards take 32 passes at most
            raise KeyboardInterrupt
        return hidden(state)

    monkeypatch.setattr(base, "hidden", stop_later)
    with pytest.raises(KeyboardInterrupt):
        make_trajectories(settings(folder, suppress_eos=False), base)
    assert set(contents(folder)) == {"manifest.json", "shard-00000-00008.parquet", "shard-00008-00016.parquet"}
    with pytest.raises(InputError, match=r"lacks rows 16\.\.19"):
        TrajectoryStore(folder)
    assert make_trajectories(settings(folder), dream)["shards_made"] == 1
    assert contents(folder) == contents(whole)


ENDLESS = """
import sys
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
make_trajectories(TrajectoriesConfig(
    output=sys.argv[1], base="exact", num=100_000, max_new_tokens=4, batch_size=8, shard_rows=8))
"""


def test_sigterm_keeps_finished_shards(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(folder)])
    try:
        while len(store.find_shards(folder)) < 3 and process.poll() is None:
            time.sleep(0.02)
    finally:
        process.terminate()
    assert process.wait(timeout=60) == -signal.SIGTERM
    found = store.find_shards(folder)
    assert list(found) == [(8 * n, 8 * n + 8) for n in range(len(found))]
    assert store.missing(folder, store.shard_ranges(8 * len(found), 8)) == []
    make_trajectories(
        TrajectoriesConfig(
            output=str(tmp_path / "few"), base="exact", num=24, max_new_tokens=4, batch_size=8, shard_rows=8
        )
    )
    few = store.find_shards(tmp_path / "few")
    assert all(path.read_bytes() == found[rows].read_bytes() for rows, path in few.items())


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "seed was 0 and is now 7"),
        ({"max_new_tokens": 9}, "decode.max_new_tokens was 8 and is now 9"),
        ({"temperature": (0.6,)}, r"temperatures was \[1.0\] and is now \[0.6\]"),
        ({"num": 21}, "rows was 20 and is now 21"),
        ({"shard_rows": 16}, "shard_rows was 8 and is now 16"),
    ],
)
def test_a_folder_of_other_settings_is_refused(
    dream: Base, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_trajectories(settings(tmp_path / "s"), dream)
    before = contents(tmp_path / "s")
    with pytest.raises(InputError, match=message):
        make_trajectories(settings(tmp_path / "s", **change), dream)
    assert contents(tmp_path / "s") == before


def test_a_folder_of_another_base_or_other_prompts_is_refused(dream: Base, tmp_path: Path) -> None:
    make_trajectories(settings(tmp_path / "s"), dream)
    other = tiny(seed=1)
    with pytest.raises(
        InputError, match=f"base_fingerprint was '{dream.fingerprint}' and is now '{other.fingerprint}'"
    ):
        make_trajectories(settings(tmp_path / "s"), other)
    with pytest.raises(InputError, match=r"prompts\.source was 'unconditional' and is now 'mixed'"):
        make_trajectories(settings(tmp_path / "s"), dream, source=MIXED)


def test_shards_without_a_manifest_are_not_adopted(dream: Base, tmp_path: Path) -> None:
    make_trajectories(settings(tmp_path / "s"), dream)
    (tmp_path / "s" / store.MANIFEST).unlink()
    with pytest.raises(InputError, match=r"holds shards but no manifest\.json"):
        make_trajectories(settings(tmp_path / "s"), dream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "batch_size 3 does not divide shard_rows 8"),
        ({"num": 0}, "num is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"first_row": -8}, "first_row is -8"),
        ({"max_new_tokens": 40_000}, "max_new_tokens is 40000"),
        ({"temperature": ()}, "temperature is empty"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(tmp_path, **change)


def test_bad_runs_are_refused_before_anything_is_written(dream: Base, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompt 0 of unconditional has 1 tokens; with 64 new ones"):
        make_trajectories(settings(tmp_path / "s", max_new_tokens=64), dream)
    with pytest.raises(InputError, match="temperature is -1"):
        make_trajectories(settings(tmp_path / "s", temperature=(1.0, -1.0)), dream)
    with pytest.raises(InputError, match="base 'exact' cannot be compiled"):
        make_trajectories(settings(tmp_path / "s", max_new_tokens=4, compile=True), load_base("exact"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"empty\.txt holds no prompts"):
        make_trajectories(settings(tmp_path / "s", prompts=str(tmp_path / "empty.txt")), dream)
    assert not (tmp_path / "s").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a folder"):
        make_trajectories(settings(tmp_path / "file"), dream)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", "cuda:x"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"device is '{device}'"):
        make_trajectories(TrajectoriesConfig(output=str(tmp_path / "out"), device=device))
    assert not (tmp_path / "out").exists()


def test_ranks_come_from_the_environment(dream: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "2")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    make_trajectories(settings(tmp_path / "s"), dream)
    assert list(store.find_shards(tmp_path / "s")) == [(16, 20)]


# --- by ADJUST ---------------------------------------------------------------------------------------------------


def test_a_sampler_decodes_its_own_trajectories(dream: Base, tmp_path: Path) -> None:
    """Rows are those of `decode(adjust)`: its tokens, its order of commits; the manifest names K and the weights."""
    g = tiny_sampler(dream)
    g.save(tmp_path / "g")
    own = settings(tmp_path / "own", sampler=str(tmp_path / "g"), tokens_per_step=3, temperature=(0.7,))
    make_trajectories(own, base=dream, source=MIXED)
    found = TrajectoryStore(tmp_path / "own")
    config = DecodeConfig(tokens_per_step=3, max_new_tokens=8, temperature=0.7)
    loaded, joint = load_sampler(tmp_path / "g", dream), []
    for row, x in enumerate(found):
        prompts = [MIXED.ids(row)]
        result = decode(dream, prompts, config, decoder="adjust", sampler=loaded, rows=[row]).trajectory(0)
        assert torch.equal(x.tokens_L, result.tokens_L) and torch.equal(x.order_L, result.order_L)
        joint.append(decode(dream, prompts, config, decoder="joint", rows=[row]).trajectory(0))
    assert any(not torch.equal(x.order_L, other.order_L) for x, other in zip(found, joint, strict=True))
    manifest = store.read_manifest(tmp_path / "own")
    assert manifest["decode"]["tokens_per_step"] == 3
    assert (
        manifest["decode"]["sampler"]
        == hashlib.sha256((tmp_path / "g" / "sampler.safetensors").read_bytes()).hexdigest()
    )
    make_trajectories(own, base=dream, source=MIXED)  # complete already
    tiny_sampler(dream, seed=1).save(tmp_path / "g")
    with pytest.raises(InputError, match=r"decode\.sampler was"):
        make_trajectories(own, base=dream, source=MIXED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens_per_step": 4}, "tokens_per_step is 4; it must be 1 without a sampler"),
        ({"sampler": "g"}, "tokens_per_step is 1; it must be 1 without a sampler, and at least 2 with one"),
        ({"sampler": "nowhere", "tokens_per_step": 2}, "nowhere holds no sampler"),
    ],
)
def test_a_sampler_and_its_k_go_together(dream: Base, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_trajectories(settings(tmp_path / "x", **changes), base=dream)
    assert not (tmp_path / "x").exists()
