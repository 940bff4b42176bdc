"""The K-table: every cell recomputed from its own texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.bases.family import DreamBase, dream_base, dream_config
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.divergence import observe
from adjust_dlm.eval import table
from adjust_dlm.eval.nll import gap_closed, score_nll, summarize
from adjust_dlm.eval.table import TableConfig, make_table
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, InputError
from helpers import words

N, NEW = 24, 6


@pytest.fixture(scope="module")
def base() -> DreamBase:
    torch.manual_seed(0)
    config = dream_config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    return dream_base(config, mask_id=49, end_ids=(48,), bos_id=47, head_weight=torch.randn(50, 32) / 2)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(table, "load_ar", lambda *_, **__: (model, words(47)))
    return model


def test_cells_are_what_their_texts_say(base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path) -> None:
    torch.manual_seed(2)
    sampler = Sampler(base).eval()
    config = TableConfig(
        base="dream", output=str(tmp_path), n=N, temperatures=(1.0,), tokens_per_step=(2,), max_new_tokens=NEW,
        batch_size=10, seed=3, divergence=0, device="cpu",
    )  # fmt: skip
    cells = {(c["decoder"], c["tokens_per_step"]): c for c in make_table(config, base, sampler)["cells"]}
    assert list(cells) == [("joint", 1), ("parallel", 2), ("adjust", 2)]
    scores = {}
    for decoder, k in cells:
        settings = DecodeConfig(tokens_per_step=k, max_new_tokens=NEW, seed=3, suppress_eos=True)
        numbers = list(range(EVALUATION_ROWS, EVALUATION_ROWS + N))
        made = decode(base, [[47]] * N, settings, decoder=decoder, sampler=sampler, rows=numbers)
        rows = made.tokens_BL[:, 1:].tolist()
        assert not any(48 in row for row in rows)  # no text ends early
        scores[decoder] = score_nll(judge, rows, condition_id=47, batch_size=5)
        assert cells[decoder, k]["nll"] == pytest.approx(scores[decoder].nll, rel=1e-6)
        assert cells[decoder, k]["n"] == N
    closed = gap_closed(scores["joint"], scores["parallel"], scores["adjust"])
    for key, value in closed.items():
        assert cells["adjust", 2][key] == (None if value is None else pytest.approx(value, rel=1e-3))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 20


def test_variants_stand_beside_the_fixed_k_with_their_own_passes(
    base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    sampler = Sampler(base).eval()
    config = TableConfig(
        base="dream", output=str(tmp_path), n=N, temperatures=(1.0, 1.0), tokens_per_step=(2, 2), max_new_tokens=NEW,
        seed=3, divergence=0, device="cpu",
        variants=("threshold:tau=2", "adaptive:gamma=99,most=3", "threshold:tau=2", "joint"),
    )  # fmt: skip
    made = make_table(config, base, sampler)["cells"]
    assert [c["decoder"] for c in made] == ["joint", "parallel", "adjust", *config.variants[:2]]  # none twice
    cells = {c["decoder"]: c for c in made}
    passes = {name: (c["base_calls"], c["sampler_calls"], c["tokens_per_pass"]) for name, c in cells.items()}
    assert passes == {
        "joint": (6, 0, 1), "parallel": (3, 0, 2), "adjust": (3, 3, 2), "threshold:tau=2": (6, 0, 1),
        "adaptive:gamma=99,most=3": (2, 4, 3),
    }  # fmt: skip
    for bad, said in (("threshold:tua=1", "has no option tua"), ("threshold:tau", "NAME=VALUE"), ("x", "unknown dec")):
        with pytest.raises(InputError, match=said):
            TableConfig(variants=(bad,))


def test_cells_begin_with_the_distance_to_the_joint_law_or_why_it_is_not_there(
    base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    sampler = Sampler(base).eval()
    config = TableConfig(
        base="dream", output=str(tmp_path), n=N, divergence=5, temperatures=(1.0, 0.0), tokens_per_step=(3,), seed=3,
        max_new_tokens=NEW, device="cpu", variants=("threshold:tau=0.5", "parallel:tokens_per_step=3,top_p=0.9"),
    )  # fmt: skip
    made = make_table(config, base, sampler)["cells"]
    cells = {(c["temperature"], c["decoder"]): c for c in made}
    settings = DecodeConfig(tokens_per_step=3, max_new_tokens=NEW, seed=3, suppress_eos=True)
    rows = [EVALUATION_ROWS + n for n in range(5)]
    for decoder, helper in (("parallel", None), ("adjust", sampler)):
        for source, name in (("own", "kl_qp"), ("base", "kl_pq")):
            how = {"decoder": decoder, "sampler": helper, "source": source, "rows": rows}
            direct = observe(base, [[47]] * 5, settings, **how).summary()
            assert cells[1.0, decoder][name] == pytest.approx(direct[name], rel=1e-5)
            assert cells[1.0, decoder][f"{name}_ci95"] == pytest.approx(direct[f"{name}_ci95"], rel=1e-5)
    share = 1 - cells[1.0, "adjust"]["kl_qp"] / cells[1.0, "parallel"]["kl_qp"]
    assert cells[1.0, "adjust"]["kl_qp_below_parallel"] == pytest.approx(share)
    assert abs(cells[1.0, "joint"]["kl_qp"]) < 1e-6
    narrow = cells[1.0, "parallel:tokens_per_step=3,top_p=0.9"]
    assert narrow["kl_qp"] > 0 and "kl_pq" not in narrow  # of one way only
    assert "by the tokens drawn there" in cells[1.0, "threshold:tau=0.5"]["no_divergence"]
    assert "at T = 0" in cells[0.0, "adjust"]["no_divergence"] and "kl_qp" not in cells[0.0, "adjust"]
    with pytest.raises(InputError, match="divergence is 1"):
        TableConfig(divergence=1)


def test_a_variant_that_names_its_k_is_measured_against_parallel_at_that_k(
    base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    same, other, open_ended = "adjust:tokens_per_step=2", "adjust:tokens_per_step=3", "threshold:tau=2"
    config = TableConfig(
        base="dream", output=str(tmp_path), n=N, temperatures=(1.0,), tokens_per_step=(2,), max_new_tokens=NEW,
        seed=3, divergence=0, device="cpu", variants=(same, other, open_ended, "parallel:tokens_per_step=2"),
    )  # fmt: skip
    cells = {c["decoder"]: c for c in make_table(config, base, Sampler(base).eval())["cells"]}
    assert [name for name, cell in cells.items() if "gap_closed" in cell] == ["adjust", same]
    for name in ("nll", "entropy", "gap_closed", "gap_closed_ci95"):
        assert cells[same][name] == cells["adjust"][name]


def test_texts_end_at_their_end_token_and_one_token_a_step_is_joint(
    base: DreamBase, judge: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Ends allowed: what stands behind an end, filler included, is neither scored nor embedded; K=1 adds no row."""
    torch.manual_seed(2)
    sampler = Sampler(base).eval()
    config = TableConfig(
        base="dream", output=str(tmp_path), n=N, temperatures=(1.0,), tokens_per_step=(1, 2), max_new_tokens=NEW,
        seed=3, divergence=0, device="cpu", suppress_eos=False, buckets=3,
    )  # fmt: skip
    cells = {(c["decoder"], c["tokens_per_step"]): c for c in make_table(config, base, sampler)["cells"]}
    assert list(cells) == [("joint", 1), ("parallel", 2), ("adjust", 2)]
    settings = DecodeConfig(max_new_tokens=NEW, seed=3)
    numbers = list(range(EVALUATION_ROWS, EVALUATION_ROWS + N))
    rows = decode(base, [[47]] * N, settings, decoder="joint", rows=numbers).tokens_BL[:, 1:].tolist()
    texts = [row[: [*row, 48].index(48)] for row in rows]
    assert texts != rows
    score = score_nll(judge, texts, condition_id=47, batch_size=5)
    joint = cells["joint", 1]
    assert (joint["nll"], joint["n"]) == (pytest.approx(score.nll, rel=1e-6), sum(map(bool, texts)))
    made = joint["mauve_settings"]
    assert made["n_q"] == joint["n"]
    assert (made["model"], made["pooling"], made["max_new_tokens"]) == ("smol", "mean", NEW)


def test_no_share_is_claimed_where_there_is_no_gap() -> None:
    at = lambda mean: summarize(np.full(50, 10 * mean) + np.arange(50) % 2, np.full(50, 10))  # noqa: E731
    joint = at(4.0)
    for parallel in (at(3.5), at(4.0), at(4.0 + joint.ci95)):
        assert gap_closed(joint, parallel, at(3.9)) == {"gap_closed": None, "gap_closed_ci95": None}
    share = gap_closed(joint, at(5.0), at(4.25))["gap_closed"]
    assert share == pytest.approx(0.75, rel=1e-6)


def test_a_missing_library_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"adjust-dlm\[eval\]"):
        make_table(TableConfig(base="no such base"))


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="n is 0"):
        TableConfig(n=0)
    with pytest.raises(InputError, match="tokens_per_step is"):
        TableConfig(tokens_per_step=(0,))
    with pytest.raises(InputError, match="device is 'abacus'"):
        make_table(TableConfig(base="exact", device="abacus"))
    with pytest.raises(InputError, match="temperatures"):
        TableConfig(temperatures=(float("nan"),))


def test_a_judge_of_another_vocabulary_is_refused(base: DreamBase, tmp_path: Path, judge: LlamaForCausalLM) -> None:
    judge.config.vocab_size = 40
    config = TableConfig(base="dream", output=str(tmp_path), n=2, max_new_tokens=2, device="cpu")
    with pytest.raises(InputError, match="judge"):
        make_table(config, base, Sampler(base).eval())


def test_load_ar_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing"):
        load_ar(str(tmp_path))
