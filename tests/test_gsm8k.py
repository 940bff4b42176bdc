"""GSM8K: what counts as the answer of a completion, the harness' own scores, prompts, files, and whole runs."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from adjust_dlm import cli
from adjust_dlm.eval.tasks import gsm8k
from adjust_dlm.eval.tasks.gsm8k import Gsm8kConfig, clean, find_answers, grade, make_task, problems, written
from adjust_dlm.eval.tasks.task_files import read_rows
from adjust_dlm.types import InputError
from scripted import answer_with

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "lm_eval" / "scores.json").read_text(encoding="utf-8"))
REAL = os.environ.get("ADJUST_DATA")
real = pytest.mark.skipif(REAL is None, reason="want the published data (ADJUST_DATA=FOLDER)")

ROWS = [
    {"question": "A shelf has 3 rows of 4 jars. How many?", "answer": "Rows are <<3*4=12>>12 jars.\n#### 12"},
    {"question": "Rent is $700 a month. How much for 2?", "answer": "It is $<<2*700=1400>>1400.\n#### 1,400"},
    {"question": "It was 2 degrees and fell by 5. And now?", "answer": "2 - 5 = <<2-5=-3>>-3\n#### -3"},
]
TRAIN = [
    {"question": "Two and two?", "answer": "First 2.\nThen 2 + 2 = <<2+2=4>>4.\n#### 4"},
    {"question": "Six less one?", "answer": "6 - 1 = <<6-1=5>>5\n#### 5"},
]

# (completion, form, strict, flexible), case H11 first
ANSWERS = [
    ("Six twice ... #### 12\n\nQuestion: next ... #### 35", "hashes", "12", "12"),
    ("Answer: $18 per day.", "hashes", None, "18"),
    ("#### 7<|endoftext|>garbage 99 99", "hashes", "7", "7"),
    ("#### 7</s>garbage 99 99", "hashes", "7", "7"),
    ("#### 7<|im_end|>99", "hashes", "7", "7"),
    ("So #### 1,234,500.", "hashes", "1234500", "1234500"),
    ("#### $36", "hashes", None, "36"),
    ("#### -3", "hashes", "-3", "-3"),
    ("#### 2.50", "hashes", "2.50", "2.50"),
    ("#### 20%", "hashes", "20", "20"),
    ("#### 8 no #### 9", "hashes", "8", "9"),
    ("The answer is 9.", "hashes", None, "9"),
    ("3 * 4 = 12. The answer is 12.\n\nQ: more?\nA: The answer is 35.", "cot", "12", "12"),
    ("The answer is $1,400.", "cot", None, "1400"),
    ("The answer is 1,400 dollars, not 7", "cot", "1400", "7"),
    ("The answer is 18", "cot", "18", "18"),
    ("The answer is .5.", "cot", ".5", ".5"),
    ("The answer is ... 4 ... it is 4...", "cot", None, "4"),
    ("#### 12", "cot", None, "12"),
    ("The answer is unknown...", "cot", None, None),
    ("from 5.-3 to $-4", "cot", None, "-4"),
    ("..,5", "cot", None, "..5"),
    ("." * 100_000, "cot", None, None),  # and takes no minutes
    ("", "cot", None, None),
]

# Where lm-evaluation-harness says something else: (task, completion, metric) -> why
DIFFERENCES = {
    ("gsm8k", "dots at the end", "flexible"): "two dots count as a number there",
    ("gsm8k", "number and dots", "flexible"): "only one of the periods behind a number is dropped there",
    ("gsm8k", "dots at the marker", "strict"): "dots count as a number there",
    ("gsm8k_cot", "dots first", "strict"): "dots count as a number there",
    ("gsm8k_cot", "no period, end of text", "strict"): "its pattern wants a character behind the number: 18 becomes 1",
    ("gsm8k_cot", "no period, new line", "strict"): "its pattern wants a character behind the number: 18 becomes 1",
    ("gsm8k_cot", "no period, one digit", "strict"): "its pattern wants a character behind the number: 6 is not found",
}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "test.jsonl").write_text(lines(ROWS))
    (tmp_path / "train.jsonl").write_text(lines(TRAIN))
    return {"data": str(tmp_path / "test.jsonl"), "shots_data": str(tmp_path / "train.jsonl")}


@pytest.mark.parametrize(("text", "form", "strict", "flexible"), ANSWERS)
def test_what_a_completion_answers(text: str, form: str, strict: str | None, flexible: str | None) -> None:
    assert find_answers(text, form) == (strict, flexible)


def test_scores_of_one_completion() -> None:
    assert grade("#### 18.00", "18", "hashes") == {"strict": 0.0, "flexible": 0.0, "value": 1.0}
    assert grade("#### 18", "18", "hashes") == {"strict": 1.0, "flexible": 1.0, "value": 1.0}
    assert grade("It is $18.", "18", "hashes") == {"strict": 0.0, "flexible": 1.0, "value": 1.0}
    assert grade("in 1.2.3", "18", "hashes") == {"strict": 0.0, "flexible": 0.0, "value": 0.0}
    assert grade("none", "18", "hashes") == {"strict": 0.0, "flexible": 0.0, "value": 0.0}
    assert clean("$1,450.") == "1450"


@pytest.mark.parametrize(
    ("text", "number", "last"),  # by value, and as the harness' flexible reads it
    [
        ("#### 1{,}234", "1234", "234"),
        (r"so $12\,345\,678$", "12345678", "678"),
        ("#### 1\u00a0234", "1234", "234"),
        ("#### 1\u202f234\u202f567.50", "1234567.5", "567.50"),
        ("#### \u22125", "-5", "5"),
        ("It is \u2212$1{,}000.", "-1000", "000"),
        ("3\u00a05", "5", "5"),  # no group of three
        ("1\u00a02345", "2345", "2345"),
        ("in 2019\u00a0300", "300", "300"),
        ("f(1{,}23)", "23", "23"),
        ("1, 234", "234", "234"),
        ("#### 1'234", "1234", "234"),
        ("#### 15/3", "5", "3"),
        (r"so $\frac{15}{3}$", "5", "3"),
        ("#### 2^5", "32", "5"),
        ("#### 2e3", "2000", "3"),
        ("$30 / 4", "7.5", "4"),
        ("5/0", "5/0", "0"),  # no number at all
        ("10^100", "10^100", "100"),  # too large to be one
        ("two 5 or 6", "6", "6"),
    ],
)
def test_value_reads_a_number_as_a_reader_does(text: str, number: str, last: str) -> None:
    assert grade(text, number, "hashes")["value"] == 1.0
    assert find_answers(text, "hashes")[1] == last
    if number != last:
        assert grade(text, last, "hashes") | {"strict": 0.0} == {"strict": 0.0, "flexible": 1.0, "value": 0.0}


def test_a_gold_answer_may_be_written_so_too() -> None:
    assert grade("#### -1234", "\u22121{,}234", "hashes") == {"strict": 0.0, "flexible": 0.0, "value": 1.0}


@pytest.mark.parametrize(("task", "form"), [("gsm8k", "hashes"), ("gsm8k_cot", "cot")])
def test_scores_are_those_of_lm_evaluation_harness(task: str, form: str) -> None:
    assert RECORDED["versions"]["lm_eval"] == "0.4.13" and len(RECORDED[task]) >= 18
    other = set()
    for case in RECORDED[task]:
        scores = grade(case["text"], clean(case["gold"]), form)
        other |= {(task, case["name"], m) for m in ("strict", "flexible") if scores[m] != case["cut"][m]}
    assert other == {key for key in DIFFERENCES if key[0] == task}


def test_a_tail_that_is_not_cut_changes_the_harness_score_and_not_ours() -> None:
    case = next(case for case in RECORDED["gsm8k"] if case["name"] == "next question")
    assert (case["whole"]["flexible"], case["cut"]["flexible"]) == (0.0, 1.0)
    assert grade(case["text"], case["gold"], "hashes")["flexible"] == 1.0


def test_prompts_with_examples(files: dict[str, str]) -> None:
    made = problems(Gsm8kConfig(**files, shots=2))
    assert [problem.facts["gold"] for problem in made] == ["12", "1400", "-3"]
    assert made[0].prompt == (
        "Q: Two and two?\nA: First 2. Then 2 + 2 = 4. The answer is 4.\n\n"
        "Q: Six less one?\nA: 6 - 1 = 5 The answer is 5.\n\n"
        "Q: A shelf has 3 rows of 4 jars. How many?\nA:"
    )
    assert problems(Gsm8kConfig(**files, shots=1, form="hashes"))[2].prompt == (
        "Question: Two and two?\nAnswer: First 2.\nThen 2 + 2 = 4.\n#### 4\n\n"
        "Question: It was 2 degrees and fell by 5. And now?\nAnswer:"
    )
    chat = problems(Gsm8kConfig(**files, shots=1, chat=True))[0]
    assert chat.turns == ("Q: Two and two?\nA:", "First 2. Then 2 + 2 = 4. The answer is 4.")
    assert chat.prompt == "Q: A shelf has 3 rows of 4 jars. How many?\nA:"
    bare = problems(Gsm8kConfig(data=files["data"], shots_data="nowhere", shots=0))[0]
    assert (bare.prompt, bare.turns) == (chat.prompt, ())


def test_examples_of_ones_own(files: dict[str, str], tmp_path: Path) -> None:
    own = tmp_path / "shots.json"
    own.write_text(json.dumps([{"question": "One and six?", "target": "Seven. The answer is 7."}]))
    first = problems(Gsm8kConfig(data=files["data"], shots_data=str(own), shots=1))[0]
    assert first.prompt.startswith("Q: One and six?\nA: Seven. The answer is 7.\n\nQ: A shelf")
    with pytest.raises(InputError, match="has no '#### N', which form hashes wants"):
        problems(Gsm8kConfig(data=files["data"], shots_data=str(own), shots=1, form="hashes"))
    with pytest.raises(InputError, match="has 1 examples, 2 are asked for"):
        problems(Gsm8kConfig(data=files["data"], shots_data=str(own), shots=2))
    with pytest.raises(InputError, match="problem 1 is among the examples"):
        problems(Gsm8kConfig(data=files["data"], shots_data=files["data"], shots=1))


def test_files_of_every_kind(tmp_path: Path) -> None:
    text = lines(ROWS)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.xz", "a.jsonl.gz", "a.json", "a.parquet"):
        assert read_rows(str(tmp_path / name), ("question", "answer")) == ROWS, name


def test_bad_files_are_named(tmp_path: Path) -> None:
    bad = {
        "a.txt": ("x", "give a .jsonl, .json or .parquet file"),
        "a.jsonl": ('{"question": "x"}\n{"question": 3\n', "a.jsonl, line 2 is not JSON"),
        "b.jsonl": ('{"question": "x"}\n', "row 1 has no answer; it has question"),
        "c.jsonl": ("[1]\n", "row 1: an object is wanted"),
        "i.jsonl": (
            r'{"question": "a\ud83c\udf0d", "answer": "a\ud83d"}',
            r"i.jsonl, line 1 holds half a character: .ud83d",
        ),
        "j.json": (r'[{"question": "a\uD83D", "answer": "a"}]', r"j.json holds half a character: .ud83d"),
        "d.json": ('{"question": "x"}', "a JSON list of objects is wanted"),
        "e.jsonl.xz": ("no xz", "cannot read"),
        "f.jsonl.gz": ("no gz", "cannot read"),
        "g.parquet": ("no parquet", "cannot read"),
    }
    for name, (text, said) in bad.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=said):
            read_rows(str(tmp_path / name), ("question", "answer"))
    for row, said in (
        ({"question": 5, "answer": "#### 2"}, "row 2: question is 5; text is wanted"),
        ({"question": "q", "answer": 2}, "row 2: answer is 2; text is wanted"),
        ({"question": "q", "answer": None}, "row 2: answer is None; text is wanted"),
        ({"question": "q", "answer": "#### 2", "target": ["x"]}, r"row 2: target is \['x'\]; text is wanted"),
    ):
        (tmp_path / "h.jsonl").write_text(lines([{"question": "a", "answer": "#### 1"}, row]))
        data = str(tmp_path / "h.jsonl")
        with pytest.raises(InputError, match=said):
            problems(Gsm8kConfig(data=data, shots=0))
        with pytest.raises(InputError, match=said):
            problems(Gsm8kConfig(data=data, shots_data=data, shots=2))
    with pytest.raises(InputError, match=r"no file 'nowhere.jsonl'; give a path, or owner/name:path"):
        read_rows("nowhere.jsonl")
    with pytest.raises(InputError, match="x, row 3: its answer does not end in '#### number'"):
        written({"question": "x", "answer": "5"}, "cot", "x, row 3")


def test_a_file_of_the_hub_comes_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "datasets--some--sums", "0" * 40
    (repo / "snapshots" / commit / "main").mkdir(parents=True)
    (repo / "snapshots" / commit / "main" / "test.jsonl").write_text(lines(ROWS))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert read_rows("some/sums:main/test.jsonl") == ROWS
    with pytest.raises(InputError, match=r"data set 'some/sums' has no file 'main/other.jsonl'"):
        read_rows("some/sums:main/other.jsonl")
    with pytest.raises(InputError, match="the Hub gave none"):
        read_rows("some/more:main/test.jsonl")


def test_a_run_of_the_command(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gold, gold in the other form with a tail, and nothing."""
    texts = [" 12 jars. The answer is 12.", " $700 twice\n#### 1400\n\nQ: 5?\nA: The answer is 9.", ""]
    seen = answer_with(monkeypatch, texts)
    flags = ["--data", files["data"], "--shots-data", files["shots_data"], "--shots", "2", "--base", "tiny"]
    run = ["eval", "gsm8k", *flags, "--decoders", "parallel", "--tokens-per-step", "4", "--output", str(tmp_path / "o")]
    assert cli.main(run) == 0
    results = json.loads((tmp_path / "o" / "result.json").read_text())["results"]
    scores = {name: value["mean"] for name, value in results["rows"][0]["metrics"].items()}
    assert scores == {"strict": pytest.approx(1 / 3), "flexible": pytest.approx(2 / 3), "value": pytest.approx(2 / 3)}
    row, shown = results["rows"][0], capsys.readouterr().out
    assert (row["strict"], row["strict_ci95"]) == (scores["strict"], row["metrics"]["strict"]["ci95"])
    assert row["tokens_per_pass"] == pytest.approx(sum(map(len, texts)) / (3 * 256))  # no end token, no tail
    assert "+-" in shown and "0.6667" in shown
    assert "The answer is" in results["about"]["strict"]
    assert len(seen) == 3 and seen[0].startswith("<|endoftext|>Q: Two and two?") and seen[0].endswith("How many?\nA:")


def test_a_zero_shot_chat(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], tmp_path: Path) -> None:
    seen = answer_with(monkeypatch, ["The answer is 12."] * 3)
    flags = ["--data", files["data"], "--shots", "0", "--chat", "--temperature", "0.1", "--top-p", "0.9"]
    run = ["eval", "gsm8k", *flags, "--decoders", "parallel", "--tokens-per-step", "2", "--output", str(tmp_path / "o")]
    assert cli.main(run) == 0
    assert seen[0] == "<|im_start|>u:Q: A shelf has 3 rows of 4 jars. How many?\nA:<|im_end|><|im_start|>a:"


def check_gold_and_empty(config: Gsm8kConfig, rows: list[dict[str, Any]]) -> None:
    asked = problems(config)
    gold = [[written(row, config.form, "")] for row in rows]
    made = gsm8k.score(asked, gold, config)
    assert len(made) == len(rows) and all(group == [{"strict": 1.0, "flexible": 1.0, "value": 1.0}] for group in made)
    empty = gsm8k.score(asked, [[""]] * len(rows), config)
    assert all(group == [{"strict": 0.0, "flexible": 0.0, "value": 0.0}] for group in empty)


@pytest.mark.parametrize("form", ["cot", "hashes"])
def test_gold_answers_score_one_and_empty_ones_nothing(form: Any, files: dict[str, str]) -> None:
    check_gold_and_empty(Gsm8kConfig(**files, shots=0, form=form), ROWS)


@real
@pytest.mark.parametrize("form", ["cot", "hashes"])
def test_all_published_gold_answers_score_one(form: Any) -> None:
    folder = Path(str(REAL)) / "gsm8k"
    rows = read_rows(str(folder / "test.jsonl"))
    assert len(rows) == 1319
    config = Gsm8kConfig(data=str(folder / "test.jsonl"), shots_data=str(folder / "train.jsonl"), form=form)
    check_gold_and_empty(config, rows)


def test_defaults_are_the_papers_for_base_models() -> None:
    config = Gsm8kConfig()
    assert (config.shots, config.max_new_tokens, config.temperature, config.chat) == (8, 256, 0.0, False)
    assert make_task(config).stop[0] == "Q:" and make_task(Gsm8kConfig(form="hashes")).stop[0] == "Question:"


@pytest.mark.parametrize("form", ["cot", "hashes"])
def test_our_own_problems_are_right_by_their_own_steps_and_no_example_is_one(form: Any) -> None:
    problems = read_rows("builtin", ("question", "answer"))
    examples = read_rows("builtin-examples", ("question", "answer"))
    assert len(problems) == 12 and len(examples) == 8
    assert not {row["question"] for row in problems} & {row["question"] for row in examples}
    for row in problems + examples:
        steps, _, gold = row["answer"].partition("\n#### ")
        sums = re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", steps)
        assert sums and all(eval(left) == int(right) for left, right in sums), row
        assert gold == re.findall(r"\d+", steps)[-1]
    config = gsm8k.Gsm8kConfig(data="builtin", form=form)
    made = gsm8k.problems(config)
    assert len(made) == 12 and [problem.facts["gold"] for problem in made] == [
        row["answer"].rsplit(" ", 1)[1] for row in problems
    ]
    for row in examples:
        assert gsm8k.grade(gsm8k.written(row, form, "x"), row["answer"].rsplit(" ", 1)[1], form)["strict"] == 1
        assert row["question"] in str(made[0])
