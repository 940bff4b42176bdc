"""No evaluation on training rows: what a sampler's file says of them, and that evaluation decodes others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adjust_dlm import cli
from adjust_dlm.artifacts import read_provenance, save_pretrained
from adjust_dlm.bases import Base
from adjust_dlm.bases import base as registry
from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.data import store
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.eval import generation, table
from adjust_dlm.eval.downstream import DownstreamConfig, Problem, Task, evaluate
from adjust_dlm.eval.frontier import FrontierConfig, make_frontier
from adjust_dlm.eval.generation import generate_rows
from adjust_dlm.eval.table import TableConfig, make_table
from adjust_dlm.sampler import CONFIG, load_sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed, trainer
from adjust_dlm.train.one_pass import PoolConfig
from adjust_dlm.train.record import UNKNOWN
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, tiny_base, words
from tiny_ar import chat_base, save_tiny

SHIPPED = Path(store.__file__).parents[1] / "models" / "smol-sampler" / CONFIG
NEW = 8


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base("dream")


def rows_of(base: Base, output: Path, **changes: Any) -> str:
    given = {"num": 12, "max_new_tokens": NEW, "suppress_eos": True, "batch_size": 4, "shard_rows": 4, **changes}
    make_trajectories(TrajectoriesConfig(base="tiny", output=str(output), **given), base)
    return str(output)


def train_two_steps(base: Base, output: Path, *folders: str, **changes: Any) -> list[dict[str, Any]]:
    """The record in the file of the sampler that comes out."""
    plain = {"steps": 2, "slices": 2, "slice_states": 5, "heldout": 2, "eval_every": 1, "suppress_eos": True, **changes}
    train(TrainConfig(base="tiny", trajectories=folders, output=str(output), **plain), base)
    return recorded(output / "sampler")


def recorded(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / CONFIG).read_text())["trained_on"]
    return found


def named(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["use"], r["seed"], r["first_row"], r["rows"], *r["temperatures"]) for r in records]


# The record ----------------------------------------------------------------------------------------------------


def test_a_sampler_names_the_rows_of_all_its_stages(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a second stage, a resumed run, `save_pretrained` and `adjust export`."""
    text, cold = rows_of(base, tmp_path / "text"), rows_of(base, tmp_path / "cold", temperature=(0.6,), seed=1)
    more = rows_of(base, tmp_path / "more", first_row=12, top_p=0.9, num=8)
    held = rows_of(base, tmp_path / "held", seed=12, num=4)
    apart = {"heldout_trajectories": (held,)}
    one = train_two_steps(base, tmp_path / "one", text, cold, **apart)
    assert named(one) == [("training", 0, 0, 12, 1.0), ("training", 1, 0, 12, 0.6), ("heldout", 12, 0, 4, 1.0)]
    facts = store.read_manifest(Path(text))
    assert one[0] == {
        "use": "training", "seed": 0, "first_row": 0, "rows": 12, "temperatures": [1.0],
        "prompts": {"kind": "unconditional", "count": 1, "sha256": facts["prompts"]["sha256"]}, "max_new_tokens": NEW,
        "top_p": 1.0, "top_k": 0, "order": "entropy", "order_on": "processed", "suppress_eos": True,
            "tokens_per_step": 1, "dtype": "float32",
    }  # fmt: skip
    second = {**apart, "init": str(tmp_path / "one" / "sampler")}
    two = train_two_steps(base, tmp_path / "two", text, more, **second)
    assert two[:3] == one and named(two[3:]) == [("training", 0, 12, 8, 1.0)] and two[3]["top_p"] == 0.9
    assert recorded(tmp_path / "two" / "sampler-best") == two
    assert "trained_on" not in json.loads((tmp_path / "two" / "sampler" / CONFIG).read_text())["started_from"]
    for stage in ("one", "two"):  # what a resumed run knows of stage one, it knows from its checkpoint
        (tmp_path / stage / "sampler" / CONFIG).unlink()
    assert train_two_steps(base, tmp_path / "two", text, more, **second) == two

    saved = save_pretrained(load_sampler(tmp_path / "two" / "sampler", base), tmp_path / "saved")
    assert read_provenance(saved)["trained_on"] == two
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register_base("tiny", "a random Dream")(lambda **_: tiny_base("dream"))
    assert cli.main(["export", "--base", "tiny", "--sampler", str(saved), "--output", str(tmp_path / "out")]) == 0
    assert recorded(tmp_path / "out") == two


def test_paths_stay_private(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("one\ntwo\n")
    base = chat_base(context=64)
    found = train_two_steps(base, tmp_path / "g", rows_of(base, tmp_path / "t", prompts=str(tmp_path / "secret.txt")))
    assert found[0]["prompts"]["kind"] == "file" and found[0]["prompts"]["count"] == 2
    assert "secret" not in json.dumps(found)


def test_a_sampler_without_a_record_is_no_sampler_without_rows(base: Base, tmp_path: Path) -> None:
    text = rows_of(base, tmp_path / "text")
    train_two_steps(base, tmp_path / "one", text)
    path = tmp_path / "one" / "sampler" / CONFIG
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "trained_on"}))
    two = train_two_steps(base, tmp_path / "two", text, init=str(path.parent))
    assert two[0] == UNKNOWN and named(two[1:]) == [("training", 0, 0, 12, 1.0)]


def test_a_pool_names_what_it_has_decoded(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 and 1 are held out; of the others all that any rank has begun are named, and no more."""
    pool = PoolConfig(rows=4, max_new_tokens=NEW, temperature=(1.0, 0.6))
    config = {"one_pass": True, "pool": pool, "seed": 3, "steps": 4}
    seen: list[int] = []
    frames = trainer.Pool.frames

    def watched(self: Any) -> Any:
        out = frames(self)
        seen.extend(row for lane in self.lanes for row in lane.canvas.rows_B.tolist())
        return out

    monkeypatch.setattr(trainer.Pool, "frames", watched)
    found = train_two_steps(base, tmp_path / "g", **config)
    last = max(seen)
    assert named(found) == [("training", 3, 2, last - 1, 1.0, 0.6), ("heldout", 3, 0, 2, 1.0, 0.6)]
    (tmp_path / "g" / "sampler" / CONFIG).unlink()
    assert train_two_steps(base, tmp_path / "g", **config) == found  # nothing is left to do
    behind = lambda items: [*items, 99] if type(items[0]) is int and items[0] else items  # noqa: E731
    monkeypatch.setattr(distributed, "from_all_ranks", behind)  # as if another rank had taken row 98
    assert named(train_two_steps(base, tmp_path / "far", **config))[0] == ("training", 3, 2, 97, 1.0, 0.6)


def test_the_sampler_that_ships_names_its_rows() -> None:
    facts = json.loads(SHIPPED.read_text())
    training = [r for r in facts["trained_on"] if r["use"] == "training"]
    assert sum(r["rows"] for r in training) == facts["training"]["trajectories"]
    assert ("training", 1, 0, 1024, 0.6) in named(training)


def test_rows_of_an_earlier_stage_are_not_held_out(base: Base, tmp_path: Path) -> None:
    """The same seed, row, prompt and temperature, though of another length."""
    text, other = rows_of(base, tmp_path / "text"), rows_of(base, tmp_path / "other", seed=4)
    train_two_steps(base, tmp_path / "one", text)
    init = str(tmp_path / "one" / "sampler")

    def second(name: str, **changes: Any) -> None:
        held = rows_of(base, tmp_path / name, **{"num": 4, "max_new_tokens": 6, **changes})
        train_two_steps(base, tmp_path / f"g-{name}", other, init=init, heldout_trajectories=(held,))

    said = r"sampler in .*one.sampler was trained on rows 10\.\.11 of seed 0, which are held out here; make held-out"
    with pytest.raises(InputError, match=said):
        second("held", first_row=10)
    assert not (tmp_path / "g-held").exists()
    second("behind", first_row=12)
    second("seed", seed=5)
    second("cold", temperature=(0.5,))


# Evaluation ----------------------------------------------------------------------------------------------------


def texts_of(folder: Path, decoder: str = "joint") -> dict[int, list[int]]:
    """The rows that an evaluation kept of a decoder."""
    lines = [json.loads(line) for file in (folder / "texts").glob("*.jsonl") for line in file.open()]
    return {line["row"]: line["tokens"] for line in lines if line["decoder"].startswith(decoder)}


def stored_texts(folder: str) -> dict[int, list[int]]:
    return {t.row: t.tokens_L[-NEW:].tolist() for t in TrajectoryStore(folder)}


@pytest.fixture
def trained(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """g of two steps on twelve rows of seed 1 at T = 0.6, which is what the evaluations below ask for."""
    folder = rows_of(base, tmp_path / "t", seed=1, temperature=(0.6,))
    train_two_steps(base, tmp_path / "g", folder)
    ar, _ = load_ar(str(save_tiny(tmp_path / "ar", vocab=base.spec.vocab_size)))
    monkeypatch.setattr(table, "load_ar", lambda *_, **__: (ar, words(BOS)))
    return load_sampler(tmp_path / "g" / "sampler", base), folder


def ask(kind: type[TableConfig], output: Path, **changes: Any) -> Any:
    given = {
        "tokens_per_step": (2,),
        "temperatures": (0.6,),
        "n": 6,
        "max_new_tokens": NEW,
        "buckets": 2,
        "divergence": 0,
        **changes,
    }
    return kind(output=str(output), device="cpu", **given)


def test_no_text_of_an_evaluation_is_a_training_row(base: Base, trained: tuple[Any, str], tmp_path: Path) -> None:
    """The table and the frontier, MAUVE's reference included: all decoders have the same rows, and no stored one."""
    g, folder = trained
    known = stored_texts(folder)
    out = make_table(ask(TableConfig, tmp_path / "table"), base, g)
    plan = ask(FrontierConfig, tmp_path / "frontier", variants=("adjust:tokens_per_step=4",), list_n=0, plot=False)
    assert out["first_row"] == make_frontier(plan, base, g)["first_row"] == EVALUATION_ROWS
    for where in ("table", "frontier"):
        joint, adjust = (texts_of(tmp_path / where, name) for name in ("joint", "adjust"))
        assert [*sorted(joint)] == [*range(EVALUATION_ROWS, EVALUATION_ROWS + 12)]
        assert [*sorted(adjust)] == [*range(EVALUATION_ROWS, EVALUATION_ROWS + 6)]
        assert not {*joint} & {*known} and [joint[r] for r in sorted(joint)] != [known[r] for r in sorted(known)]
    samples = [json.loads(line) for line in (tmp_path / "table" / "samples.jsonl").open()]
    assert [s["row"] for s in samples if s["decoder"] == "joint"] == [EVALUATION_ROWS + n for n in range(6)]


def test_rows_from_0_would_be_the_training_texts(
    base: Base, trained: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rule is for, and that the test above sees an evaluation without it."""
    g, folder = trained
    for module in (table, generation):
        monkeypatch.setattr(module, "EVALUATION_ROWS", 0)
    make_table(ask(TableConfig, tmp_path / "out"), base, g)
    assert texts_of(tmp_path / "out") == stored_texts(folder)


def test_a_downstream_task_has_rows_of_its_own(tmp_path: Path) -> None:
    base = chat_base(context=64)
    score = lambda problems, groups, config: [[{"ok": 1.0} for _ in group] for group in groups]  # noqa: E731
    task = Task("two", lambda _: [Problem(name, name, {}) for name in ("one", "two")], score)
    config = DownstreamConfig(
        output=str(tmp_path),
        decoders=("parallel",),
        tokens_per_step=(1, 2),
        max_new_tokens=4,
        device="cpu",
        num_samples=2,
    )
    assert evaluate(task, config, base)["first_row"] == EVALUATION_ROWS
    assert [*sorted(texts_of(tmp_path, "parallel"))] == [EVALUATION_ROWS + n for n in range(4)]


def test_training_rows_are_refused_by_name(base: Base) -> None:
    for row in (0, EVALUATION_ROWS - 1):
        with pytest.raises(InputError, match=f"first_row is {row}; rows below 4294967296 are for trajectories: g may"):
            generate_rows(base, {}, "joint", [[BOS]], DecodeConfig(max_new_tokens=2), first_row=row)


def test_no_trajectory_is_a_row_for_evaluation(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"the last row is {EVALUATION_ROWS}; those from 4294967296 on are for evalu"):
        TrajectoriesConfig(output="t", num=2, first_row=EVALUATION_ROWS - 1)
    folder = rows_of(base, tmp_path / "t", num=4, first_row=EVALUATION_ROWS - 4)
    assert len(TrajectoryStore(folder)) == 4
    monkeypatch.setattr(store, "EVALUATION_ROWS", EVALUATION_ROWS - 1)  # as if an older version had made them
    with pytest.raises(InputError, match=r"t has rows from 4294967295 on, which are for evaluation"):
        TrajectoryStore(folder)


def test_rows_for_evaluation_draw_numbers_of_their_own(base: Base) -> None:
    """Row ids beyond 32 bits are whole keys: row 2**32 is not row 0, nor 2**32 + 1 row 1."""
    config = DecodeConfig(max_new_tokens=32, suppress_eos=True)
    low, high = (
        decode(base, [[BOS]] * 4, config, decoder="joint", rows=[start + n for n in range(4)]).tokens_BL
        for start in (0, EVALUATION_ROWS)
    )
    assert len(np.unique(torch.cat([low, high]).numpy(), axis=0)) == 8
