"""HumanEval and MBPP: what is asked, what is taken from a reply, and what is counted."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adjust_dlm import cli
from adjust_dlm.bases import Base
from adjust_dlm.bases.family import dream_base
from adjust_dlm.eval import downstream, generation
from adjust_dlm.eval.downstream import Problem, Task, summarize
from adjust_dlm.eval.tasks import code
from adjust_dlm.eval.tasks.code import (
    HUMANEVAL,
    MBPP,
    CodeConfig,
    HumanEvalConfig,
    MbppConfig,
    humaneval_problems,
    humaneval_program,
    mbpp_problems,
    mbpp_program,
    pass_at_k,
    run,
)
from adjust_dlm.eval.tasks.extract import answered, bare_code, blocks, continued, cut_body, defines, fenced, preamble
from adjust_dlm.eval.tasks.task_files import read_rows
from adjust_dlm.types import InputError
from helpers import tiny_config
from tiny_ar import BOS, IM_END, MASK, tiny_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
REAL = os.environ.get("ADJUST_DATA", "")
real = pytest.mark.skipif(not REAL, reason="want the published data (ADJUST_DATA=FOLDER)")

PROMPT = '''import math
from typing import List


def area(r: float) -> float:
    """Of a circle."""
    return math.pi * r * r


def ring(radii: List[float]) -> float:
    """ Area between the outermost and the innermost circle.
    >>> ring([1.0, 1.0])
    0.0
    """
'''
BODY = "    radii = sorted(radii)\n    return area(radii[-1]) - area(radii[0])\n"
CHECK = """

METADATA = {}


def check(candidate):
    assert abs(candidate([1.0, 2.0]) - 3 * math.pi) < 1e-9
    assert candidate([1.0, 1.0]) == 0 and area(0) == 0
"""
RING = {"task_id": "Own/0", "prompt": PROMPT, "entry_point": "ring", "canonical_solution": BODY, "test": CHECK}
DOUBLE = {
    "task_id": "Own/1", "prompt": 'def double(x):\n    """Twice x."""\n', "entry_point": "double",
    "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}  # fmt: skip
WHOLE = PROMPT[PROMPT.index("def ring") :] + BODY
HELPERS = """import functools


def _ends(xs):
    return min(xs), max(xs)


def _between(low, high):
    return area(high) - area(low)


def ring(radii: List[float]) -> float:
    return functools.reduce(lambda f, x: f(x), [_ends(radii)], lambda pair: _between(*pair))
"""
TABS = "def ring(radii):\n\tlow = min(radii)\n\tif low:\n\t\treturn area(max(radii)) - area(low)\n\treturn 0\n"
PROSE, CLOSING = "Certainly! Here is the function:\n\n", "\nIt sorts nothing, since `min` and `max` suffice.\n"

CHAT_GOOD = {
    "prose, fence, two helpers, closing prose": f"{PROSE}```python\n{HELPERS}```\n{CLOSING}",
    "fence never closed": f"{PROSE}```python\n{HELPERS}",
    "fence never closed, prose behind": f"{PROSE}```python\n{HELPERS}\n\nThis works because area grows.\n",
    "whole prompt repeated in the fence": f"```python\n{PROMPT}{BODY}```",
    "whole prompt repeated without a fence": PROMPT + BODY,
    "two fences, the second an example of use": f"```python\n{HELPERS}```\nUse it so:\n```python\nring(input())\n```\n",
    "two fences, the first a draft": f"```python\ndef ring(r): return 0\n```\nBetter:\n```python\n{HELPERS}```\n",
    "a whole fence, then one cut short": f"```python\n{HELPERS}```\nOr:\n```python\ndef ring(radii):\n    ra",
    "a fence of another language first": f"```bash\npip install numpy\n```\n```python\n{HELPERS}```",
    "a fence of another language last": f"```python\n{HELPERS}```\n```text\n0.0\n```",
    "no language": f"```\n{HELPERS}```",
    "upper case": f"```Python\n{HELPERS}```",
    "tildes": f"~~~python\n{HELPERS}~~~",
    "indented in a list": "1. So:\n\n   ```python\n" + "".join(f"   {x}\n" for x in HELPERS.split("\n")) + "   ```\n",
    "tabs": f"```python\n{TABS}```",
    "only the body, fenced": f"```python\n{BODY}```",
    "only the body, fenced, at the left edge": "```python\nreturn area(max(radii)) - area(min(radii))\n```",
    "only the body, with tabs": "```python\n\tif radii:\n\t\treturn area(max(radii)) - area(min(radii))\n```",
    "only the body": BODY,
    "only the body, then prose": BODY + "\nThat is all.\n",
    "code without a fence between prose": PROSE + HELPERS + CLOSING,
    "a string with a fence in it": f"```python\nNOTE = '''\n  ``` is a fence\n'''\n{HELPERS}```",
    "carriage returns": f"{PROSE}```python\n{HELPERS}```\n".replace("\n", "\r\n"),
    "a main part that would fail": f"```python\n{HELPERS}\nif __name__ == '__main__':\n    ring(input())\n```",
    "a future import": f"```python\nfrom __future__ import annotations\n{HELPERS}```",
}  # fmt: skip
CHAT_BAD = {
    "empty": "",
    "spaces": " \n\n",
    "no code at all": "I cannot help with that.",
    "a wrong one": "```python\ndef ring(radii):\n    return 1\n```",
    "an empty fence": "```python\n```",
    "only the signature": "```python\ndef ring(radii):\n```",
    "another language": "```java\npublic double ring(List<Double> radii) { return 0; }\n```",
    "leaves before the tests": "```python\nimport os\nos._exit(0)\n```",
    "passes by exit": "```python\ndef ring(radii):\n    raise SystemExit(0)\n```",
}
BASE_GOOD = {
    "the body": BODY,
    "the body, unfinished line break": BODY.rstrip(),
    "another function behind": f"{BODY}\n\ndef other(x):\n    retu",
    "a class behind": f"{BODY}\nclass A:\n  x = (",
    "a comment and a test behind": f"{BODY}\n# test it\nassert ring([1]) == 5\n",
    "a main part behind": f"{BODY}\nif __name__ == '__main__':\n    ring(input())\n",
    "a print behind": f"{BODY}print(ring(input()))\n",
    "prose and a fence behind": f"{BODY}```\n\nThe function",
    "a line break first": f"\n{BODY}",
    "a bracket at the left edge": "    return (area(max(radii))\n- 0\n) - area(min(radii))\n".replace("\n- 0", ""),
    "a string at the left edge": f'    note = """\nfree text\n"""\n{BODY}',
    "the whole prompt again": PROMPT + BODY,
    "the whole prompt again and more": f"{PROMPT}{BODY}\nassert False\n",
    "the function again": f"{WHOLE}\n\nprint(ring(input()))\n",
}
BASE_BAD = {
    "empty": "",
    "prose": "This function returns the area.",
    "wrong": "    return 1\n",
    "cut short": "    radii = sorted(rad",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def human(tmp_path: Path, **changes: Any) -> HumanEvalConfig:
    return HumanEvalConfig(data=write(tmp_path / "h.jsonl", [RING, DOUBLE]), **changes)


def passes(task: Task, config: CodeConfig, problem: Problem, replies: list[str]) -> list[float]:
    """pass@1 of each reply to one problem."""
    return [group[0]["pass@1"] for group in task.score([problem] * len(replies), [[r] for r in replies], config)]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "base"])
def test_stored_replies_to_humaneval(chat: bool, tmp_path: Path) -> None:
    config = human(tmp_path, chat=chat)
    good, bad = (CHAT_GOOD, CHAT_BAD) if chat else (BASE_GOOD, BASE_BAD)
    problem = humaneval_problems(config)[0]
    made = dict(zip([*good, *bad], passes(HUMANEVAL, config, problem, [*good.values(), *bad.values()]), strict=True))
    assert [name for name in good if made[name] != 1.0] == []
    assert [name for name in bad if made[name] != 0.0] == []


def test_a_base_s_words_and_a_chat_s_words_are_not_mixed_up(tmp_path: Path) -> None:
    """What cut instruct replies to nothing: the rule of base models on a reply with a fence."""
    reply = CHAT_GOOD["prose, fence, two helpers, closing prose"]
    base, chat = human(tmp_path), human(tmp_path, chat=True)
    assert passes(HUMANEVAL, base, humaneval_problems(base)[0], [reply]) == [0.0]
    assert passes(HUMANEVAL, chat, humaneval_problems(chat)[0], [reply]) == [1.0]


def test_parts_of_a_reply() -> None:
    text = "a\n```py\nx = 1\n```\nb\n````\n```\ninner\n```\n````\n```\nlast"
    assert [(b.language, b.text, b.closed) for b in blocks(text)] == [
        ("py", "x = 1\n", True),
        ("", "```\ninner\n```\n", True),
        ("", "last\n", False),
    ]
    assert fenced("no code", {"f"}) is None and fenced("```bash\nls\n```", {"f"}) is None
    assert fenced("```py\nx = 1\n```\n```py\ny = 2\n```", {"f"}) == "y = 2\n"
    assert cut_body("    a\n\n    b\nc\n") == "    a\n\n    b\n" and cut_body("x\n") == ""
    assert bare_code("Hello.\nimport re\nx = 1\n\nBye now.\n") == "import re\nx = 1\n\n"
    assert bare_code("Hello.\n") == ""
    assert preamble(PROMPT, "ring") == PROMPT[: PROMPT.index("def ring")]
    assert defines("async def f(): ...", {"g", "f"}) and defines("f = lambda: 1", {"f"})
    assert not defines("f == 1", {"f"}) and not defines("    def f(): ...", {"f"}) and not defines("def ff(): 1", {"f"})


@pytest.mark.parametrize("odd", ["\f", "\v", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_only_line_ends_of_python_cut_code(odd: str) -> None:
    prompt, body = "def f(s):\n", f'    return s.split("a{odd}b")\n'
    code = prompt + body
    assert cut_body(body + "x\n") == body and bare_code(code) == code and fenced(f"```\n{code}```", {"f"}) == code
    assert continued(prompt, "f", body) == [code] and continued(prompt, "f", code) == ["", code]
    assert answered(prompt, "f", f"```\n{body}```") == [code] and answered(prompt, "f", body) == [code]
    assert blocks(code.replace("\n", "\r\n").join(["```\r\n", "```"]))[0].text == code


def test_a_page_break_in_a_body_does_not_end_it() -> None:
    assert cut_body("    a\n\f\n\f    b\n\fc\n") == "    a\n\f\n\f    b\n"


def test_what_humaneval_asks(tmp_path: Path) -> None:
    plain = humaneval_problems(human(tmp_path))
    assert [(p.id, p.prompt, p.turns) for p in plain] == [("Own/0", PROMPT, ()), ("Own/1", DOUBLE["prompt"], ())]
    chat = humaneval_problems(human(tmp_path, chat=True))[0]
    assert chat.prompt.endswith(f"\n\n```python\n{PROMPT.strip()}\n```")
    examples = write(tmp_path / "e.jsonl", [{**DOUBLE, "prompt": "def triple(x):\n"}])
    shown = humaneval_problems(human(tmp_path, shots=1, examples=examples))[1]
    assert shown.prompt == f"def triple(x):\n    return 2 * x\n\n\n{DOUBLE['prompt']}"
    turns = humaneval_problems(human(tmp_path, shots=1, examples=examples, chat=True))[1].turns
    assert len(turns) == 2 and turns[1] == "```python\ndef triple(x):\n    return 2 * x\n```"
    assert humaneval_program(plain[1], "    return 1\n", human(tmp_path))[-1] == "check(double)"
    with pytest.raises(InputError, match="no examples of its own"):
        humaneval_problems(human(tmp_path, shots=1))
    with pytest.raises(InputError, match="has 1 examples, 2 are asked for"):
        humaneval_problems(human(tmp_path, shots=2, examples=examples))
    bad = write(tmp_path / "b.jsonl", [DOUBLE | {"prompt": None}])
    with pytest.raises(InputError, match="row 1: prompt is None; text is wanted"):
        humaneval_problems(HumanEvalConfig(data=bad))
    with pytest.raises(InputError, match="problem Own/0 is among the examples of its own prompt"):
        humaneval_problems(human(tmp_path, shots=1, examples=write(tmp_path / "e.jsonl", [RING])))


def mbpp_rows(*, sanitized: bool = False) -> list[dict[str, Any]]:
    """Ids 1..12: add n to a number; 12 needs a set-up."""
    question, setup = ("prompt", "test_imports") if sanitized else ("text", "test_setup_code")
    rows = [
        {
            "task_id": n, question: f"Add {n}.", "code": f"def add(x):\r\n  return x + {n}",
            setup: [] if sanitized else "", "test_list": [f"assert add(1) == {n + 1}", f"assert add(0) == {n}"],
        }
        for n in range(1, 13)
    ]  # fmt: skip
    rows[11][setup] = ["import math"] if sanitized else "start = add(1)\r\nimport math"
    rows[11]["test_list"] = ["assert math.isclose(add(1), 13)"] + ([] if sanitized else ["assert start == 13"])
    return rows


def mbpp(tmp_path: Path, *, sanitized: bool = False, **changes: Any) -> MbppConfig:
    path = write(tmp_path / "m.jsonl", mbpp_rows(sanitized=sanitized))
    return MbppConfig(data=path, **changes)


def test_what_mbpp_asks(tmp_path: Path) -> None:
    first, last = mbpp_problems(mbpp(tmp_path))
    assert (first.id, last.id) == ("11", "12")

    def part(n: int) -> str:
        tests = f"assert add(1) == {n + 1}\nassert add(0) == {n}"
        return (
            f"You are an expert Python programmer, and here is your task: Add {n}. "
            f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
        )

    shown = "".join(f"{part(n)}def add(x):\n  return x + {n}\n[DONE]\n\n" for n in (2, 3, 4))
    assert first.prompt == shown + part(11)
    chat = mbpp_problems(mbpp(tmp_path, chat=True, shots=1))[0]
    assert len(chat.turns) == 2 and chat.turns[1] == "```python\ndef add(x):\n  return x + 2\n```"
    assert "[BEGIN]" not in chat.prompt and "Add 11." in chat.prompt
    assert "Add 1." in mbpp_problems(mbpp(tmp_path, shots=4))[0].prompt
    with pytest.raises(InputError, match="has 10 of MBPP's examples"):
        mbpp_problems(mbpp(tmp_path, shots=11))
    for changes, said in (
        ({"task_id": "eleven"}, "problem 'eleven' of .*: its task_id is no number"),
        ({"text": 5}, "problem 1 of .*: text is 5; text is wanted"),
        ({"code": None}, "row 1: code is None; text is wanted"),
        ({"test_list": "assert add(1) == 2"}, "test_list is 'assert .*'; a list of texts is wanted"),
        ({"test_setup_code": [1]}, r"test_setup_code is \[1\]; a list of texts is wanted"),
    ):
        data = write(tmp_path / "bad.jsonl", [mbpp_rows()[0] | changes])
        with pytest.raises(InputError, match=said):
            mbpp_problems(MbppConfig(data=data, shots=0))


@pytest.mark.parametrize("sanitized", [False, True])
def test_stored_replies_to_mbpp(sanitized: bool, tmp_path: Path) -> None:
    add = "def add(x):\n    return x + 12\n"
    other = "You are an expert Python programmer, and here is your task: X\n[BEGIN]\nassert 0"
    base = mbpp(tmp_path, sanitized=sanitized)
    good = [add, f"{add}[DONE]", f"[BEGIN]\n{add}[DONE]", f"{add}[DONE]\n\n{other}", add.replace("\n", "\r\n")]
    bad = ["", "[DONE]", "def add(x):\n    return x\n[DONE]", "I cannot", "def plus(x): return x + 12"]
    problem = mbpp_problems(base)[1]
    assert passes(MBPP, base, problem, [*good, *bad]) == [1.0] * len(good) + [0.0] * len(bad)
    chat = mbpp(tmp_path, sanitized=sanitized, chat=True)
    use = "```python\nprint(add(int(input())))\n```"
    good = [
        f"{PROSE}```python\nK = 12\ndef plus(x):\n    return x + K\n\ndef add(x):\n    return plus(x)\n```{CLOSING}",
        f"```python\n{add}", f"```python\n{add}```\nExample:\n{use}", f"{PROSE}{add}{CLOSING}", f"[BEGIN]\n{add}[DONE]",
        f"Sure.\n[BEGIN]\n```python\n{add}```\n[DONE]\n{other}", "```python\nadd = lambda x: x + 12\n```",
    ]  # fmt: skip
    bad = ["", "No.", use, f"```python\n{add}    )\n```"]
    assert passes(MBPP, chat, problem, [*good, *bad]) == [1.0] * len(good) + [0.0] * len(bad)
    assert mbpp_program(problem, add, base)[1:] == [problem.facts["setup"], "\n".join(problem.facts["tests"])]


RECORDED = json.loads((Path(__file__).parent / "fixtures" / "lm_eval" / "scores.json").read_text(encoding="utf-8"))
# The harness cuts at five words only (those in a string, too), runs a prompt that is written again behind itself, and
# takes a program that ends by itself for one that passed.
OTHERWISE = {
    "humaneval": {
        "prose behind it", "assert behind it", "import behind it", "decorator behind it", "fence behind it",
        "the whole prompt again", "function in a string", "ends by itself",
    },
    "mbpp": {"mark again", "ends by itself"},
}  # fmt: skip


@pytest.mark.parametrize("task", ["humaneval", "mbpp"])
def test_scores_are_those_of_lm_evaluation_harness(task: str, tmp_path: Path) -> None:
    cases, path = RECORDED[task], tmp_path / "problem.jsonl"
    assert RECORDED["versions"]["lm_eval"] == "0.4.13" and len(cases) >= 16
    path.write_text(json.dumps(RECORDED["problems"][task]))
    config = (
        HumanEvalConfig(data=str(path), allow_code_execution=True, num_samples=len(cases))
        if task == "humaneval"
        else MbppConfig(data=str(path), allow_code_execution=True, num_samples=len(cases), shots=0)
    )
    known = {"humaneval": code.HUMANEVAL, "mbpp": code.MBPP}[task]
    [scores] = known.score(known.problems(config), [[case["text"] for case in cases]], config)
    ours = {case["name"]: score["pass@1"] for case, score in zip(cases, scores, strict=True)}
    theirs = {case["name"]: case["pass@1"] for case in cases}
    assert {name for name in ours if ours[name] != theirs[name]} == OTHERWISE[task]


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for n in range(1, 6):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
                assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_scores_of_several_samples(tmp_path: Path) -> None:
    config = human(tmp_path, num_samples=4, ks=(1, 2, 4))
    problems = humaneval_problems(config)
    wrong, twice = "    return 0\n", "    return x + x\n"
    scores = HUMANEVAL.score(problems, [[wrong] * 4, [twice, wrong, twice, wrong]], config)
    assert [s["pass@1"] for s in scores[1]] == [1.0, 0.0, 1.0, 0.0]
    metrics = summarize(problems, scores)["metrics"]
    assert metrics["pass@1"]["mean"] == pytest.approx((0 + 2 / 4) / 2)
    assert metrics["pass@2"]["mean"] == pytest.approx((0 + (1 - 1 / 6)) / 2)  # 1 - C(2,2) / C(4,2)
    assert metrics["pass@4"]["mean"] == pytest.approx((0 + 1) / 2) and metrics["pass@4"]["n"] == 2
    with pytest.raises(InputError, match=r"every k must lie in 1\.\.4"):
        human(tmp_path, num_samples=4, ks=(1, 5))


def test_ranks_share_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = human(tmp_path, num_samples=2)
    problems = humaneval_problems(config)
    replies = [[BODY, ""], ["", "    return x + x\n"]]
    of_ranks: list[list[Any]] = []

    def gather(items: list[Any]) -> list[Any]:
        of_ranks.append(items)
        if len(of_ranks) < 2:
            raise InterruptedError  # rank 1 would wait here
        return [item for items in of_ranks for item in items]

    monkeypatch.setattr(generation.distributed, "from_all_ranks", gather)
    monkeypatch.setattr(generation, "place", lambda: (1, 2))
    with pytest.raises(InterruptedError):
        HUMANEVAL.score(problems, replies, config)
    monkeypatch.setattr(generation, "place", lambda: (0, 2))
    scores = HUMANEVAL.score(problems, replies, config)
    assert [[n for n, _ in items] for items in of_ranks] == [[1, 3], [0, 2]]
    assert [[s["pass@1"] for s in group] for group in scores] == [[1.0, 0.0], [0.0, 1.0]]


def test_paper_settings() -> None:
    h, m = HumanEvalConfig(), MbppConfig()
    assert (h.temperature, h.top_p, h.max_new_tokens) == (0.2, 0.9, 512)
    assert (m.temperature, m.top_p, m.max_new_tokens, m.shots) == (0.2, 1.0, 512, 3)


@pytest.fixture
def base() -> Base:
    torch.manual_seed(0)
    config = tiny_config("dream", vocab_size=104, max_position_embeddings=512)
    made = dream_base(config, mask_id=MASK, end_ids=(IM_END,), bos_id=BOS, token_limit=100)
    made.tokenizer = tiny_tokenizer()
    return made


def test_a_run_says_what_the_sandbox_did(base: Base, tmp_path: Path) -> None:
    config = human(
        tmp_path, output=str(tmp_path / "out"), allow_code_execution=True, decoders=("parallel",), tokens_per_step=(4,),
        max_new_tokens=8, device="cpu", num_samples=2, ks=(1, 2),
    )  # fmt: skip
    out = run(config, base)
    assert out["sandbox"]["limits"]["seconds"] == 15 and set(out["sandbox"]["protections"]) <= set(code.PROTECTIONS)
    assert set(out["rows"][0]["metrics"]) == {"pass@1", "pass@2"} and out["n"] == 2
    json.dumps(out)


@pytest.mark.parametrize("task", ["humaneval", "mbpp"])
def test_nothing_happens_without_consent(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded or ran something")

    monkeypatch.setattr(downstream, "load_base", never)
    monkeypatch.setattr(code, "run_programs", never)
    assert cli.main(["eval", task, "--output", str(tmp_path / "out")]) == 2
    assert "--allow-code-execution" in capsys.readouterr().err


def test_forms_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": 1, "b": ["x", "\u2028"]}, {"a": 2, "b": []}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (tmp_path / "r.jsonl").write_bytes(lines)
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "r.json").write_text(json.dumps(rows))
    (tmp_path / "full").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "full" / "test-0.parquet")
    for name in ("r.jsonl", "r.jsonl.gz", "r.json", "full/test-0.parquet"):
        assert read_rows(str(tmp_path / name), ("a", "b")) == rows
    asked: dict[str, Any] = {}
    hub: Callable[..., str] = lambda name, **more: asked.update(more, name=name) or str(tmp_path)  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert read_rows("org/set:full/*.parquet", ("a",)) == rows
    assert (asked["name"], asked["repo_type"], asked["allow_patterns"]) == ("org/set", "dataset", ["full/*.parquet"])
    with pytest.raises(InputError, match=r"has no file 'sanitized/\*\.parquet'"):
        read_rows("org/set:sanitized/*.parquet")


def test_bad_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for data, message in (
        ("", "no file"),
        ("org/set", "give a path, or owner/name:path"),
        ("org/set:x.json", "OSError: no network"),
        (str(tmp_path / "gone.jsonl"), "no file"),
        (broken("r.txt", b"x"), "give a .jsonl, .json or .parquet file"),
        (broken("r.jsonl", b'{"a": 1}\n{'), "line 2 is not JSON"),
        (broken("r.jsonl.gz", b"no gzip"), "cannot read"),
        (broken("r.parquet", b"PAR1"), "cannot read"),
        (broken("r.json", b'{"a": 1}'), "a JSON list of objects is wanted"),
        (broken("empty.jsonl", b"\n"), "holds no rows"),
        (broken("other.jsonl", b'{"b": 1}\n'), "row 1 has no a"),
    ):
        with pytest.raises(InputError, match=message):
            read_rows(data, ("a",))


@real
@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "base"])
def test_gold_solutions_of_humaneval_pass_and_nothing_else(chat: bool) -> None:
    config = HumanEvalConfig(data=f"{REAL}/humaneval/HumanEval.jsonl.gz", chat=chat)
    problems = humaneval_problems(config)
    gold = [row["canonical_solution"] for row in read_rows(config.data)]
    replies = [
        [f"{PROSE}```python\n{p.facts['prompt']}{g}```{CLOSING}" if chat else f"{g}\n\ndef more(:", ""]
        for p, g in zip(problems, gold, strict=True)
    ]
    scores = HUMANEVAL.score(problems, replies, config)
    assert len(scores) == 164 and {(a["pass@1"], b["pass@1"]) for a, b in scores} == {(1.0, 0.0)}


@real
@pytest.mark.slow
@pytest.mark.parametrize("file", ["mbpp.jsonl", "sanitized-mbpp.json"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "base"])
def test_gold_solutions_of_mbpp_pass_and_nothing_else(file: str, chat: bool) -> None:
    config = MbppConfig(data=f"{REAL}/mbpp/{file}", chat=chat)
    problems = mbpp_problems(config)
    gold = {str(row["task_id"]): row["code"] for row in read_rows(config.data)}
    replies = [[f"{PROSE}```python\n{gold[p.id]}\n```" if chat else f"{gold[p.id]}\n[DONE]", ""] for p in problems]
    scores = MBPP.score(problems, replies, config)
    assert len(scores) == (257 if file.startswith("sanitized") else 500)
    assert {(a["pass@1"], b["pass@1"]) for a, b in scores} == {(1.0, 0.0)}
