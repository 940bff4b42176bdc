"""`adjust eval nll` and `eval mauve`: what is read, what reaches the judge, and the numbers of known judges."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from adjust_dlm import cli
from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.eval import nll, scores
from adjust_dlm.eval.mauve import features, mauve
from adjust_dlm.eval.scores import (
    Judge,
    MauveConfig,
    NllConfig,
    end_ids,
    load_judge,
    read_texts,
    run_mauve,
    run_nll,
    start_of,
)
from adjust_dlm.types import InputError
from test_nll import bigram
from tiny_ar import BOS, IM_END, IM_START, save_tiny, tiny_tokenizer

TEXTS = ["the cat sat", "on", "", "a much longer text, with many tokens in it", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return load_judge(NllConfig(files=("-",), judge=str(folder)))


def jsonl(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def texts(file: Path, items: list[str] = TEXTS) -> str:
    return jsonl(file, [{"text": item} for item in items])


def naive(model: Any, ids: list[int], start: int) -> list[float]:
    """One forward a token, float64 from the logits on."""
    out = []
    for n, token in enumerate(ids):
        logits = model(torch.tensor([[start, *ids[:n]]])).logits[0, -1].double().numpy()
        out.append(float(np.log(np.exp(logits).sum()) - logits[token]))
    return out


# NLL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_nll_is_that_of_a_naive_loop_over_the_judges_own_tokens(judge: Judge, tmp_path: Path, batch_size: int) -> None:
    lists = [judge.tokenizer.encode(item, add_special_tokens=False) for item in TEXTS]
    values = [value for ids in lists for value in naive(judge.model, ids, BOS)]
    out = run_nll(NllConfig(files=(texts(tmp_path / "a.jsonl"),), batch_size=batch_size), judge)
    (row,) = out["rows"]
    assert row["nll"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert (row["n"], row["n_empty"], row["n_tokens"]) == (4, 1, len(values))
    assert out["rule"] == (
        "every token up to the first end token, given <|endoftext|> (id 0), what its line says was given, and those "
        "before it"
    )


def test_what_a_text_continues_is_seen_and_not_scored(judge: Judge, tmp_path: Path) -> None:
    """Of two lines one has a prompt, a special token in it; a limit on tokens is one on the text."""
    encode, given = judge.tokenizer.encode, "<|im_start|>the cat"
    before, text, alone = (encode(x, add_special_tokens=False) for x in (given, "sat on", "the"))
    assert before[0] == IM_START
    values = [*naive(judge.model, [*before, *text[:4]], BOS)[len(before) :], *naive(judge.model, alone, BOS)]
    file = jsonl(tmp_path / "a.jsonl", [{"text": "sat on", "given": given}, {"text": "the"}])
    (row,) = run_nll(NllConfig(files=(file,), max_tokens=4), judge)["rows"]
    assert row["nll"] == pytest.approx(sum(values) / len(values), rel=1e-5) and row["n_tokens"] == 4 + len(alone)


def test_h12_the_mean_is_over_tokens(judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {3: [0.1, 0.2, 0.1], 5: [0.3, 0.5, 0.1, 0.4, 0.2]}
    monkeypatch.setattr(
        nll, "_sum_nll", lambda _m, _ids, real_BL: torch.tensor([sum(stored[int(n)]) for n in real_BL.sum(-1)])
    )
    file = texts(tmp_path / "a.jsonl", ["abc", "abcde"])
    for batch_size in (1, 2):
        (row,) = run_nll(NllConfig(files=(file,), batch_size=batch_size), judge)["rows"]
        assert row["nll"] == pytest.approx(0.2375, abs=1e-7)
        assert row["perplexity"] == pytest.approx(1.2681, abs=5e-5)


def test_h12_a_judge_without_a_start_token_and_a_text_of_one_token(tmp_path: Path) -> None:
    words = tiny_tokenizer()
    words.bos_token = None
    model = bigram([(BOS, 4 + ord("a") - 33, 0.5)], size=104)  # after <|endoftext|> an "a" costs 0.5
    model.device = torch.device("cpu")
    known = Judge("known", model, words, start_of(words, model.config), end_ids(words, model))
    (row,) = run_nll(NllConfig(files=(texts(tmp_path / "a.jsonl", ["a"]),)), known)["rows"]
    assert (row["nll"], row["n_tokens"]) == (pytest.approx(0.5, abs=1e-6), 1)
    assert math.isnan(row["nll_ci95"])  # one text has no spread


def tokens(bos: int | None, eos: int | None, **vocab: int) -> Any:
    return SimpleNamespace(bos_token_id=bos, eos_token_id=eos, get_vocab=lambda: vocab)


@pytest.mark.parametrize(
    ("tokenizer", "config", "start"),
    [
        (tokens(7, 8), {}, 7),  # a start token
        (tokens(None, 8), {}, 8),  # an end token only
        (tokens(7, 8, **{"<|endoftext|>": 3}), {}, 3),  # chat models: the end of text, not of a turn
        (tokens(None, None), {"bos_token_id": 5}, 5),
        (tokens(None, None), {"bos_token_id": None, "eos_token_id": [6, 9]}, 6),
        (tokens(0, 8), {}, 0),  # id 0 is an id
    ],
)
def test_the_token_in_front_of_a_text(tokenizer: Any, config: dict[str, Any], start: int) -> None:
    assert start_of(tokenizer, SimpleNamespace(**config)) == start
    assert start_of(tokens(7, 8, here=4), SimpleNamespace(), "here") == 4


def test_no_token_to_put_in_front_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="neither a start nor an end token; name a token with --start"):
        start_of(tokens(None, None), SimpleNamespace())
    with pytest.raises(InputError, match="has no token 'there'"):
        start_of(tokens(1, 2), SimpleNamespace(), "there")


def test_nothing_behind_an_end_token_counts(judge: Judge, tmp_path: Path) -> None:
    whole = ["the cat", "on"]
    ended = ["the cat<|im_end|> and more", "on<|endoftext|><|endoftext|>"]
    rows = [
        run_nll(NllConfig(files=(texts(tmp_path / f"{n}.jsonl", items),)), judge)["rows"][0]
        for n, items in enumerate((whole, ended))
    ]
    assert {**rows[0], "file": ""} == {**rows[1], "file": ""}
    assert judge.end_ids == {BOS, IM_END} and judge.start_id == BOS


def test_a_start_token_and_a_length_may_be_named(folder: Path, judge: Judge, tmp_path: Path) -> None:
    file = texts(tmp_path / "a.jsonl", ["abcdef", "ghi"])
    config = NllConfig(files=(file,), judge=str(folder), start="<|im_start|>", max_tokens=4)
    other = load_judge(config)
    (row,) = run_nll(config, other)["rows"]
    lists = [judge.tokenizer.encode(item) for item in ("abcd", "ghi")]
    values = [value for ids in lists for value in naive(judge.model, ids, IM_START)]
    assert row["nll"] == pytest.approx(sum(values) / 7, rel=1e-5)


# Files ---------------------------------------------------------------------------------------------------------


def items_of(path: Path, split: Any = "line") -> dict[str, list[Any]]:
    return {group: [line.item for line in lines] for group, lines in read_texts(str(path), split).items()}


def test_what_a_text_is(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("    one\n\ntwo \u2028 still two\r\n  \nthree\n", encoding="utf-8")
    assert items_of(plain) == {"": ["    one", "", "two \u2028 still two", "", "three"]}
    plain.write_text("  one\nmore of it\n\n \n\ntwo\n")
    assert items_of(plain, "paragraph") == {"": ["  one\nmore of it", "two"]}
    lines = [
        {"text": "a\u2028b", "decoder": "joint", "tokens_per_step": 1, "temperature": 0.6, "tokens": [1, 2]},
        {"text": "c", "decoder": "adjust", "tokens_per_step": 4},
        {"text": "", "decoder": "adjust", "tokens_per_step": 4},
        {"text": "d", "decoder": "threshold:tau=0.9", "tokens_per_step": 0},
    ]
    jsonl(tmp_path / "b.jsonl", lines)
    assert items_of(tmp_path / "b.jsonl") == {
        "joint K=1 T=0.6": ["a\u2028b"], "adjust K=4": ["c", ""], "threshold:tau=0.9": ["d"],
    }  # fmt: skip
    jsonl(tmp_path / "c.jsonl", [{"row": 0, "tokens": [4, 5]}, {"text": None, "tokens": []}])
    assert items_of(tmp_path / "c.jsonl") == {"": [[4, 5], []]}
    for tokens in ([True], [-1], [1.0]):
        jsonl(tmp_path / "c.jsonl", [{"tokens": tokens}])
        with pytest.raises(InputError, match="row 1 has neither `text` nor `tokens`"):
            read_texts(str(tmp_path / "c.jsonl"))


def test_decoders_of_one_file_are_scored_apart(judge: Judge, tmp_path: Path) -> None:
    items = {"joint": "the cat", "parallel": "catcat the the"}
    both = jsonl(tmp_path / "both.jsonl", [{"text": text, "decoder": name} for name, text in items.items()])
    rows = run_nll(NllConfig(files=(both,)), judge)["rows"]
    alone = [run_nll(NllConfig(files=(texts(tmp_path / f"{n}.jsonl", [n_]),)), judge)["rows"][0]["nll"] for n, n_ in
             items.items()]  # fmt: skip
    assert [(row["decoder"], row["nll"]) for row in rows] == list(zip(items, alone, strict=True))


def test_token_files_need_to_say_whose_tokens_they_are(folder: Path, judge: Judge, tmp_path: Path) -> None:
    ids = judge.tokenizer.encode("the cat sat")
    kept = jsonl(tmp_path / "kept.jsonl", [{"row": 0, "tokens": ids}])
    expected = run_nll(NllConfig(files=(texts(tmp_path / "t.jsonl", ["the cat sat"]),)), judge)["rows"][0]["nll"]
    with pytest.raises(InputError, match="holds token ids; say whose they are with --tokens-of"):
        run_nll(NllConfig(files=(kept,)), judge)
    own = NllConfig(files=(kept,), judge=str(folder), tokens_of=str(folder))
    assert run_nll(own, judge)["rows"][0]["nll"] == expected
    # Another model's ids become text first: here a vocabulary in which every id is one higher.
    other = tmp_path / "other"
    other.mkdir()
    described = json.loads((folder / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {"<unused>": 0} | {word: n + 1 for word, n in vocab.items()}
    for token in described["added_tokens"]:
        token["id"] += 1
    (other / "tokenizer.json").write_text(json.dumps(described))
    moved = jsonl(tmp_path / "moved.jsonl", [{"tokens": [n + 1 for n in ids]}])
    foreign = NllConfig(files=(moved,), judge=str(folder), tokens_of=str(other))
    assert run_nll(foreign, judge)["rows"][0]["nll"] == expected
    with pytest.raises(InputError, match="there is no tokenizer in"):
        run_nll(NllConfig(files=(kept,), judge=str(folder), tokens_of=str(tmp_path)), judge)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "none.jsonl": (lambda f: None, "no file .*none.jsonl"),
    "empty.txt": (lambda f: f.write_text("\n \n"), "there is no text in .*empty.txt"),
    "blank.jsonl": (lambda f: texts(f, ["", ""]), "none of the 2 texts in .*blank.jsonl has a token"),
    "given.jsonl": (lambda f: jsonl(f, [{"text": "a", "given": 3}]), "row 1: given is 3; it must be a text"),
    "odd.jsonl": (lambda f: f.write_text('{"text": "a"}\n{"words": "a"}\n'), "row 2 has neither `text` nor `tokens`"),
    "broken.jsonl": (lambda f: f.write_text('{"text'), "line 1 is not JSON"),
    "bytes.txt": (lambda f: f.write_bytes(b"\xff\xfe\xff"), r"bytes\.txt is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name: str, judge: Judge, tmp_path: Path) -> None:
    write, message = BAD[name]
    write(tmp_path / name)
    with pytest.raises(InputError, match=message):
        run_nll(NllConfig(files=(str(tmp_path / name),)), judge)


def test_settings_that_make_no_sense() -> None:
    for make, message in (
        (lambda: NllConfig(), "name at least one file"),
        (lambda: NllConfig(files=("a",), batch_size=0), "batch_size is 0"),
        (lambda: NllConfig(files=("a",), max_tokens=-1), "max_tokens is -1"),
        (lambda: MauveConfig(files=("a",)), "--reference FILE"),
        (lambda: MauveConfig(files=("a",), reference="b", buckets=-1), "buckets is -1"),
    ):
        with pytest.raises(InputError, match=message):
            make()


# MAUVE ---------------------------------------------------------------------------------------------------------


def written(seed: int, n: int = 40) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abc "), size=12)) for _ in range(n)]


def test_h23_mauve_of_files_is_that_of_their_features(judge: Judge, tmp_path: Path) -> None:
    one, two = texts(tmp_path / "p.jsonl", written(0)), texts(tmp_path / "q.jsonl", ["", *written(1)])
    out = run_mauve(MauveConfig(files=(one, two), reference=one, batch_size=7), judge)
    p, q = (features(judge.model, [judge.tokenizer.encode(t) for t in written(seed)], batch_size=7) for seed in (0, 1))
    same, other = out["rows"]
    assert same["mauve"] == pytest.approx(1, abs=1e-9)
    expected = mauve(p, q)
    assert other["per_seed"] == expected["per_seed"] and len(other["per_seed"]) == 5
    assert {name: other[name] for name in expected} == expected | {"settings": other["settings"]}
    assert (other["n"], other["n_reference"], other["n_empty"]) == (40, 40, 1)
    settings = other["settings"]
    assert settings["model"] == judge.name and settings["buckets"] == 4 and settings["seeds"] == [0, 1, 2, 3, 4]
    assert [line.split(" is ")[0] for line in settings["warnings"]] == ["MAUVE of 40 and 40 texts"]


def test_a_reference_of_several_decoders_is_refused(judge: Judge, tmp_path: Path) -> None:
    mixed = jsonl(tmp_path / "m.jsonl", [{"text": "a", "decoder": name} for name in ("joint", "adjust")])
    with pytest.raises(InputError, match=r"texts of 2 decoders \(joint, adjust\); it must have one"):
        run_mauve(MauveConfig(files=(mixed,), reference=mixed), judge)


# The commands and the Hub --------------------------------------------------------------------------------------


def test_both_commands_write_what_they_found(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n".join(written(2)) + "\n")
    words = [str(file), "--judge", str(folder), "--device", "cpu"]
    assert cli.main(["eval", "nll", *words, "--output", str(tmp_path / "n")]) == 0
    assert cli.main(["eval", "mauve", *words, "--reference", str(file), "--output", str(tmp_path / "m")]) == 0
    found = [json.loads((tmp_path / name / "result.json").read_text()) for name in "nm"]
    assert found[0]["results"]["rows"][0]["n"] == 40
    assert found[1]["results"]["rows"][0]["mauve"] == pytest.approx(1, abs=1e-9)
    assert f"{found[0]['results']['rows'][0]['nll']:.4g}" in capsys.readouterr().out
    report = ["report", str(tmp_path / "n"), str(tmp_path / "m"), "--output", str(tmp_path / "r"), "--no-plot"]
    assert cli.main(report) == 0
    assert f"{found[0]['results']['rows'][0]['nll']:.6g}" in (tmp_path / "r" / "scored.csv").read_text()


def cached(folder: Path, cache: Path, name: str) -> None:
    """A folder as the Hub library keeps a repository."""
    repository, commit = cache / f"models--{name.replace('/', '--')}", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(folder)


def test_a_judge_by_hub_id_comes_from_the_cache(
    folder: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no folder 'me/judge' here, and the Hub gave none"):
        load_ar("me/judge")
    cached(folder, tmp_path / "cache", "me/judge")
    config = NllConfig(files=(texts(tmp_path / "a.jsonl"),), judge="me/judge", tokens_of="me/judge", device="cpu")
    assert run_nll(config)["rows"] == run_nll(config, judge)["rows"]
    assert scores._tokenizer("me/judge").encode("ab") == judge.tokenizer.encode("ab")
    with pytest.raises(InputError, match=r"no autoregressive model at 'nowhere' \(config.json is missing\)"):
        load_ar("nowhere")


def test_packed_files_are_read(tmp_path: Path) -> None:
    line = '{"text": "one", "decoder": "joint"}\n'
    for name, pack in (("a.jsonl.xz", lzma.compress), ("a.jsonl.gz", gzip.compress), ("a.jsonl", bytes)):
        (tmp_path / name).write_bytes(pack(line.encode()))
        assert items_of(tmp_path / name) == {"joint": ["one"]}
    (tmp_path / "b.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(InputError, match="cannot read"):
        read_texts(str(tmp_path / "b.jsonl.xz"))
