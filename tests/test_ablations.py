"""The ablation recipe as a whole, on a tiny base: two variants trained, decoded, scored, and never twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adjust_dlm.bases.family import DreamBase
from adjust_dlm.bases.shape import Shape
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.eval import table
from adjust_dlm.eval.nll import gap_closed, score_nll
from adjust_dlm.sampler import Sampler, SamplerConfig, load_sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, END, VOCAB, load_recipe, tiny_base, words

N, NEW = 16, 10


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("ablations")


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny_base("dream")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(table, "load_ar", lambda *_, **__: (model, words(BOS)))
    return model


def command(folder: Path, *more: str) -> list[str]:
    return [
        "--base", "dream", "--trajectories", str(folder / "t"), "--output", str(folder / "out"), "--slices", "2",
        "--heldout", "4", "--n", str(N), "--ks", "2", "4", "--max-new-tokens", str(NEW), "--batch-size", "8", *more,
    ]  # fmt: skip


def test_the_recipe_trains_decodes_and_scores_each_variant_once(
    recipe: ModuleType, base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    make_trajectories(
        TrajectoriesConfig(base="dream", num=16, output=str(tmp_path / "t"), max_new_tokens=NEW, suppress_eos=True),
        base=base,
    )
    (tmp_path / "v.yaml").write_text("small: {mlp: 0.5}\ndeep: {layers: 2, rollout: 2}\n")
    argv = command(tmp_path, "--variants", str(tmp_path / "v.yaml"), "--steps", "3")
    shown = recipe.main(argv, base)
    (lines,) = [[json.loads(x) for x in p.read_text().splitlines()] for p in (tmp_path / "out").glob("results-*.jsonl")]
    assert [line["variant"] for line in lines] == ["small", "deep"]
    for line in lines:
        g = load_sampler(tmp_path / "out" / line["key"] / "sampler", base)
        assert line["parameters"] == sum(p.numel() for p in g.parameters())
        rollout = 2 if line["variant"] == "deep" else 3
        assert (line["steps"], line["windows"]) == (3, 3 * 2 * (11 - rollout))
        assert {f"kl_{d}" for d in range(1, 8)} <= line["depths"].keys()
        assert_cells_are_those_of_the_texts(base, g, judge, line["cells"])
    assert [row.split(" | ")[0] for row in shown.splitlines()[:4]] == ["| variant", "| ---", "| small", "| deep"]
    assert shown.count("parallel K=") == 2
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert recipe.main(argv, base) == shown  # nothing is made again
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


def assert_cells_are_those_of_the_texts(base: DreamBase, g: Any, judge: Any, cells: dict[str, Any]) -> None:
    """NLL and share of the gap, from decoding anew."""

    def nll(decoder: str, k: int) -> Any:
        config = DecodeConfig(tokens_per_step=k, max_new_tokens=NEW, seed=1, suppress_eos=True)
        numbers = list(range(EVALUATION_ROWS, EVALUATION_ROWS + N))
        rows = decode(base, [[BOS]] * N, config, decoder=decoder, sampler=g, rows=numbers).tokens_BL[:, 1:].tolist()
        assert not any(END in row for row in rows)
        return score_nll(judge, rows, condition_id=BOS, batch_size=5)

    assert list(cells) == ["2", "4"]
    for k, cell in cells.items():
        joint, parallel, ours = nll("joint", 1), nll("parallel", int(k)), nll("adjust", int(k))
        assert cell["nll"] == pytest.approx(ours.nll, rel=1e-6)
        assert 0 < cell["mauve"] <= 1 and cell["n"] == N
        if cell["gap_closed"] is not None:
            assert cell["gap_closed"] == pytest.approx(gap_closed(joint, parallel, ours)["gap_closed"], rel=1e-3)


def test_a_budget_by_the_clock_leaves_the_first_steps_out(
    recipe: ModuleType, base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Two shares, one variant each; share 1 finds the texts of share 0; a variant that fails does not stop the rest."""
    make_trajectories(
        TrajectoriesConfig(base="dream", num=16, output=str(tmp_path / "t"), max_new_tokens=NEW, suppress_eos=True),
        base=base,
    )
    (tmp_path / "v.yaml").write_text("a: {}\nb: {reverse: 0.5}\nbroken: {trajectories: [nowhere]}\n")
    common = ["--variants", str(tmp_path / "v.yaml"), "--seconds", "0.2", "--untimed", "2", "--candidates", "3"]
    shown = recipe.main(command(tmp_path, *common, "--share", "0/2"), base)
    assert "failed: broken" in shown
    recipe.main(command(tmp_path, *common, "--share", "1/2"), base)
    a, b = recipe.finished(tmp_path / "out").values()
    assert (a["variant"], b["variant"]) == ("a", "b")
    assert all(0.2 <= x["train_seconds"] < 2 and x["steps"] > 2 for x in (a, b))
    assert a["cells"]["4"]["base_calls"] == -(-NEW // 4)  # candidates never shorten a round
    assert len(list((tmp_path / "out" / "texts").glob("*.jsonl"))) == 4 + 2 * 2  # joint twice, two K; two K of two g
    assert recipe.main(command(tmp_path, *common, "--only", "a", "--stop-after", "0"), base).count("| a |") == 1


def parameters(config: SamplerConfig) -> int:
    """Of a g on the default model's shape; nothing is allocated."""
    shape = Shape.of({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    })  # fmt: skip
    base: Any = SimpleNamespace(
        fingerprint="", embed=None, to_frame=None, width=576, layer_config=shape, with_features=lambda _: None, lag=0,
        spec=SimpleNamespace(name="stub", block=None, causal=False),
    )  # fmt: skip
    with torch.device("meta"):
        return sum(p.numel() for p in Sampler(base, config).parameters())


def test_every_built_in_variant_is_a_valid_setting(recipe: ModuleType, tmp_path: Path) -> None:
    args = recipe.arguments(command(tmp_path, "--steps", "10"))
    made = {name: recipe.training(args, name, changes) for name, changes in recipe.VARIANTS.items()}
    assert len(made) >= 14
    assert len({config.output for config in made.values()}) == len(made)
    assert max(parameters(config.sampler_config()) for config in made.values()) <= 0.06 * 134_515_008
    with pytest.raises(InputError, match="unknown setting wings"):
        recipe.training(args, "bad", {"wings": 2})
    with pytest.raises(InputError, match="unknown variant nobody"):
        recipe.main(command(tmp_path, "--steps", "10", "--only", "nobody"))
