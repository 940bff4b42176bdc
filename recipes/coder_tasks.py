"""Replies of an autoregressive chat model to the training questions of GSM8K, MATH and MBPP, and to its own.

    python recipes/coder_tasks.py replies AR --data DIR --output FILE.jsonl --samples 4 --invented 16384
    python recipes/coder_tasks.py prompts FILE.jsonl ... --output DIR     their questions, each once, in two files
    python recipes/coder_tasks.py rows FILE.jsonl ... --base BASE --output DIR     the replies themselves, to train g on

DIR holds gsm8k/{train,test}.jsonl, math/{math500_test,math_train_part}.jsonl, humaneval/HumanEval.jsonl.gz and
mbpp/mbpp.jsonl. Replies are in the model's own chat template, graded as `adjust eval TASK --chat --shots 0` does. They
are kept where they end and are right, as `messages` for `adjust adapt --text-files`; of a question without a right one
the first that ends. No test question is asked: of MBPP the problems 601 to 974, without the few that have the text or
the code of a test problem. `--share i/n`: this process's part of the replies. Programs of the model run on this machine
(docs/code-execution.md).

`--invented N` also asks questions of the model's own. N user turns are sampled behind the chat's context and a word of
`OPENERS`, in turn; those that close (or open the next turn) and are new are asked, each once, and replies that end are
kept, but for those that end in a question or are a part of the user's turn: they say it again. Some turns are a
function without its body, in the wording of `adjust eval humaneval --chat`. A turn or reply that holds a test problem,
or a part of one of `RUN` letters and digits, is dropped.

A base of causal blocks draws a text as the model does, and from left to right. So the replies are trajectories of it,
and `rows` writes them as such (`adjust train --trajectories`), but for those of held-out questions.

Replies go on where they stopped. FILE.asked, beside them, has a line for each batch that was graded; a question in it
is not asked again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adjust_dlm import load_base
from adjust_dlm.bases.tokenizers import chat_ids
from adjust_dlm.data import store
from adjust_dlm.data.ar import CHAT_USER, ar_sample, chat_context
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.questions import asks_held_out
from adjust_dlm.data.settings import TrajectoriesConfig
from adjust_dlm.data.trajectories import manifest_of
from adjust_dlm.eval.downstream import Problem, Task, cut_at_stop
from adjust_dlm.eval.tasks import code, gsm8k, maths
from adjust_dlm.eval.tasks.task_files import read_rows
from adjust_dlm.types import GIVEN, MASKED, Trajectory, require

MBPP_TRAIN = range(601, 975)
CALL = 4  # batches of a call: a row that ends gives its place to the next
MORE = {"mbpp": 4}  # times the samples, since it has few training questions
RUN = 40  # so many letters and digits in a row of a test problem are the problem
TURN: dict[str, Any] = {"new_tokens": 96, "temperature": 1.0, "top_p": 0.95}  # of invented user turns
LEAST_WORDS = 3  # of an invented user turn
COMPLETE = code.ask_to_complete("").removesuffix("\n```")  # a turn that begins so is a function without its body
OPENERS = (
    "", "How", "What", "Write", "Can", "I", "Please", "Explain", "Create", "Given", "Why", "Is", "Tell", "A", "If",
    "Solve", "There are", "Write a Python function",
    "You are an expert Python programmer, and here is your task: Write a function to",
    *12 * [f"{COMPLETE}def"], *5 * [f"{COMPLETE}from typing import List\n\n\ndef"],
    *2 * [f"{COMPLETE}import math\n\n\ndef"],
)  # fmt: skip
Said = tuple[str, bool]  # a text, and whether it has ended
Asked = tuple[Task, Any, str]  # a task, its settings, and the metric that says what is right


def tasks(data: Path, scratch: Path) -> list[Asked]:
    """The training questions as zero-shot chats."""
    how: dict[str, Any] = {"shots": 0, "chat": True}
    grade = gsm8k.Gsm8kConfig(data=str(data / "gsm8k" / "train.jsonl"), **how)
    proof = maths.MathConfig(data=str(data / "math" / "math_train_part.jsonl"), **how)
    run = code.MbppConfig(data=str(train_programs(data, scratch)), allow_code_execution=True, **how)
    return [
        (code.MBPP, run, "pass@1"), (gsm8k.make_task(grade), grade, "value"), (maths.make_task(), proof, "math_verify"),
    ]  # fmt: skip


def train_programs(data: Path, scratch: Path) -> Path:
    """MBPP's training problems under numbers of the test, which is what the task reads."""
    rows = [json.loads(line) for line in (data / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    tested = {_plain(row[key]) for row in rows if row["task_id"] in code.TEST_IDS for key in ("text", "code")}
    own = [
        row for row in rows if row["task_id"] in MBPP_TRAIN and not tested & {_plain(row["text"]), _plain(row["code"])}
    ]
    kept = [row | {"task_id": row["task_id"] - 590} for row in own]
    path = scratch / "mbpp.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


class Tested:
    """The test problems' texts, of which nothing may be trained on."""

    def __init__(self, data: Path) -> None:
        """Their letters and digits: all runs of `RUN`, and shorter texts as a whole."""
        mbpp = [row for row in read_rows(str(data / "mbpp" / "mbpp.jsonl")) if row["task_id"] in code.TEST_IDS]
        texts = [row["question"] for row in read_rows(str(data / "gsm8k" / "test.jsonl"))]
        texts += [row["problem"] for row in read_rows(str(data / "math" / "math500_test.jsonl"))]
        texts += [row["prompt"] for row in read_rows(str(data / "humaneval" / "HumanEval.jsonl.gz"))]
        texts += [row[key] for row in mbpp for key in ("text", "code")]
        plain = {_plain(text) for text in texts} - {""}
        self.short = [text for text in plain if len(text) < RUN]
        self.runs = {run for text in plain for run in _runs(text)}

    def hold(self, text: str) -> bool:
        """Whether a text has a test problem in it, or is a part of one."""
        plain = _plain(text)
        return any(short in plain for short in self.short) or not self.runs.isdisjoint(_runs(plain))


def _runs(plain: str) -> Iterator[str]:
    return (plain[at : at + RUN] for at in range(len(plain) - RUN + 1))


class Model:
    """The model behind its own chat template."""

    def __init__(self, ar: str) -> None:
        """On a card if there is one."""
        self.base = load_base(ar, device="auto")
        self.tokenizer = self.base.tokenizer

    def reply(self, prompts: Sequence[str], **how: Any) -> list[Said]:
        """Replies to prompts of a user; see `go_on`."""
        chats = [[{"role": "user", "content": text}] for text in prompts]
        write = self.tokenizer.apply_chat_template
        return self.go_on([write(chat, tokenize=False, add_generation_prompt=True) for chat in chats], **how)

    def go_on(self, starts: Sequence[str], *, rows: Sequence[int] = (), **how: Any) -> list[Said]:
        """What follows each text, up to its end, and whether there is one; `how` is that of `ar_sample`."""
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in starts]
        made, ends = ar_sample(self.base, ids, rows=rows or range(len(ids)), **how), self.base.spec.end_ids
        sys.stderr.write(f"{len(made)} more texts\n")
        texts = self.tokenizer.batch_decode([row[:-1] if row[-1] in ends else row for row in made])
        return [(text, row[-1] in ends) for text, row in zip(texts, made, strict=True)]


class Replies:
    """A file of chats, and beside it what was asked for them: the settings, then a line for each batch."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """Goes on behind the last whole batch.

        Raises:
            InputError: what is there was made otherwise.
        """
        self.output, self.beside = output, output.with_suffix(".asked")
        text = self.beside.read_text() if self.beside.is_file() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # one may be torn
        self.batches: list[dict[str, Any]] = lines[1:]
        size, there = self.batches[-1]["bytes"] if self.batches else 0, output.stat().st_size if output.is_file() else 0
        good = lines[0] == settings and there >= size if lines else there == 0
        require(good, f"{output} is of other settings than {settings}, or {self.beside} is not its own; remove both")
        self.beside.write_text("".join(json.dumps(line) + "\n" for line in [settings, *self.batches]))
        output.touch()
        os.truncate(output, size)

    def of(self, task: str) -> list[dict[str, Any]]:
        """The batches of a task."""
        return [batch for batch in self.batches if batch["task"] == task]

    def asked(self, task: str) -> list[str]:
        """The questions of a task so far."""
        return [name for batch in self.of(task) for name in batch["asked"]]

    def add(self, task: str, asked: Sequence[str], chats: Sequence[tuple[str, str]], **counts: int) -> None:
        """A batch: its questions, the chats that it gave, how many samples it took (`tried`), and what else counts."""
        with self.output.open("a") as file:
            for prompt, text in chats:
                said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": said}) + "\n")
        size = self.output.stat().st_size
        self.batches.append({"task": task, "asked": list(asked), "kept": len(chats), **counts, "bytes": size})
        with self.beside.open("a") as file:
            file.write(json.dumps(self.batches[-1]) + "\n")

    def report(self, task: str) -> None:
        """A line of JSON: samples, questions and chats of a task."""
        total = {key: sum(batch.get(key, 0) for batch in self.of(task)) for key in ("tried", "kept", "right")}
        line = {"task": task, "questions": len(self.asked(task)), **total}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def graded(asked: Asked, problems: Sequence[Problem], texts: Sequence[list[str]]) -> list[list[dict[str, float]]]:
    """Scores of completions that are cut at the task's stop words."""
    task, config, _ = asked
    return task.score(problems, [[cut_at_stop(text, task.stop) for text in group] for group in texts], config)


def replies(model: Model, args: argparse.Namespace, scratch: Path) -> None:
    """Replies to training questions, see `keep`; then the invented ones."""
    part, parts = map(int, args.share.split("/"))
    names = ("samples", "temperature", "top_p", "new_tokens", "share", "limit")
    file = Replies(args.output, {"model": args.names[0], **{name: getattr(args, name) for name in names}})
    how = {"new_tokens": args.new_tokens, "temperature": args.temperature, "top_p": args.top_p}
    how |= {"batch_size": args.batch_size}
    for seed, asked in enumerate(tasks(args.data, scratch)):
        task, config, _ = asked
        samples, done = args.samples * MORE.get(task.name, 1), set(file.asked(task.name))
        numbered = list(enumerate(task.problems(config)[: args.limit or None]))[part::parts]
        left = [pair for pair in numbered if pair[1].id not in done]
        left.sort(key=lambda pair: len(model.tokenizer.encode(pair[1].prompt)))
        size = max(1, CALL * args.batch_size // samples)
        batches = [left[at : at + size] for at in range(0, len(left), size)]
        random.Random(0).shuffle(batches)  # if the time is over, short questions are not all
        with ThreadPoolExecutor(1) as card:  # which samples on while this thread has proofs and programs graded
            jobs = (
                card.submit(
                    model.reply, [problem.prompt for _, problem in batch for _ in range(samples)], seed=seed,
                    rows=[number * samples + n for number, _ in batch for n in range(samples)], **how,
                )
                for batch in batches
            )  # fmt: skip
            job = next(jobs, None)
            for batch in batches:
                assert job is not None
                said, job = job.result(), next(jobs, None)
                keep(file, asked, [problem for _, problem in batch], said)
        file.report(task.name)
    invent(model, file, Tested(args.data), range(part, args.invented, parts), how)


def keep(file: Replies, asked: Asked, problems: Sequence[Problem], said: list[Said]) -> None:
    """Adds the different replies of each problem that end, without a stop word, and are right.

    Where none is right, the first that ends: the base is to learn how the model writes, of every question.
    """
    task, _, metric = asked
    samples = len(said) // len(problems)
    grouped = [said[at : at + samples] for at in range(0, len(said), samples)]
    found = graded(asked, problems, [[text for text, _ in group] for group in grouped])
    chats, right = [], 0
    for problem, group, scores in zip(problems, grouped, found, strict=True):
        whole = [(text, s[metric]) for (text, ended), s in zip(group, scores, strict=True)
                 if ended and cut_at_stop(text, task.stop) == text]  # fmt: skip
        good = sorted({text for text, is_right in whole if is_right})
        chats += [(problem.prompt, text) for text in good or [text for text, _ in whole[:1]]]
        right += len(good)
    file.add(task.name, [p.id for p in problems], chats, tried=len(said), right=right)


def invent(model: Model, file: Replies, tested: Tested, rows: range, how: dict[str, Any]) -> None:
    """User turns of the model's own, each with one reply."""
    name, start = "invented", chat_context(model.tokenizer) + CHAT_USER
    seen = {_key(text) for text in file.asked(name)}
    rows, many = rows[sum(batch["tried"] for batch in file.of(name)) :], CALL * how["batch_size"]
    for mine in (rows[at : at + many] for at in range(0, len(rows), many)):
        words = [OPENERS[row % len(OPENERS)] for row in mine]
        turns = model.go_on([start + w for w in words], rows=mine, seed=8, batch_size=how["batch_size"], **TURN)
        fresh: dict[str, tuple[int, str]] = {}
        for row, word, (rest, ended) in zip(mine, words, turns, strict=True):
            text = _turn(word, rest, ended)
            key = _key(text)
            new = len(text.split()) >= LEAST_WORDS and key not in seen and not asks_held_out(text)
            if new and _usable(text, tested):
                fresh.setdefault(key, (row, text.strip(" \t\r\n\ufeff")))
        seen |= fresh.keys()
        texts = [text for _, text in fresh.values()]
        said = model.reply(texts, rows=[row for row, _ in fresh.values()], seed=9, **how)
        pairs = zip(texts, said, strict=True)
        chats = [(text, reply) for text, (reply, ended) in pairs if ended and _answers(reply, text, tested)]
        file.add(name, texts, chats, tried=len(mine))
    if file.of(name):
        file.report(name)


def _turn(word: str, rest: str, ended: bool) -> str:
    """A user turn that closes, up to where the next one opens; of a function up to its docstring; else nothing."""
    if word.startswith(COMPLETE):
        head, *more = (word + rest).split('"""')
        good = len(more) > 1 and head.rstrip().endswith(":") and "\n```" not in head[len(word) :] + more[0]
        return f'{head}"""{more[0]}"""\n```' if good else ""
    text, next_turn, _ = (word + rest).partition("<|im_start|>")
    return text if ended or next_turn else ""


def _key(text: str) -> str:
    """What tells turns apart: how they begin."""
    return _plain(text.removeprefix(COMPLETE))[:RUN]


def _answers(reply: str, text: str, tested: Tested) -> bool:
    says_it_again = reply.rstrip().endswith("?") or (len(reply) > RUN and _plain(reply) in _plain(text))
    return _usable(reply, tested) and not says_it_again


def _usable(text: str, tested: Tested) -> bool:
    """Whether a text says something, without marks of the template and without a test problem."""
    return bool(_plain(text)) and "<|" not in text and not tested.hold(text)


def prompts(files: Sequence[str], output: Path) -> None:
    """Questions of replies, each once, in an order of their own: the last tenth for held-out rows."""
    chats = [json.loads(line)["messages"][0] for name in files for line in Path(name).read_text().splitlines()]
    texts = sorted({chat["content"] for chat in chats})
    random.Random(0).shuffle(texts)
    first = len(texts) - len(texts) // 10
    for name, part in (("prompts", texts[:first]), ("heldout-prompts", texts[first:])):
        (output / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in part))


def rows(files: Sequence[str], name: str, output: Path, args: argparse.Namespace) -> None:
    """A trajectory of each different reply, or of `limit` of them, cut at `new_tokens` tokens."""
    base = load_base(name, device="cpu")
    require(base.spec.causal, f"base {name!r} has no causal blocks, so these replies are no draws of it")
    kept = {json.loads(line)["prompt"] for line in (output.parent / "prompts.jsonl").read_text().splitlines()}
    lines = dict.fromkeys(line for file in files for line in Path(file).read_text().splitlines())
    chats = [chat for chat in (json.loads(line)["messages"] for line in lines) if chat[0]["content"] in kept]
    chats = random.Random(0).sample(chats, min(len(chats), args.limit or len(chats)))
    asked = [base.encode_messages(chat[:1]) for chat in chats]
    source = PromptSource("replies", asked)
    new, one = args.new_tokens, {"temperature": (args.temperature,), "top_p": args.top_p, "shard_rows": len(chats)}
    config = TrajectoriesConfig(output=str(output), base=name, num=len(chats), batch_size=1, max_new_tokens=new, **one)
    source.check_fits(base, new)
    texts = []
    for row, (chat, prompt) in enumerate(zip(chats, asked, strict=True)):
        said = chat_ids(base.tokenizer, lambda messages: messages[0]["content"], chat[1:])
        said = [*said, base.spec.end_ids[0]][:new]
        order = [GIVEN] * len(prompt) + list(range(len(said))) + [MASKED] * (new - len(said))
        tokens = prompt + said + [base.spec.mask_id] * (new - len(said))
        texts.append(Trajectory(torch.tensor(tokens), torch.tensor(order), row, config.seed, args.temperature))
    output.mkdir(parents=True, exist_ok=True)
    manifest = manifest_of(config, base, source)
    if (output / store.MANIFEST).is_file():
        store.check_same_run(output, manifest)
    store.write_manifest(output, manifest)
    store.write_shard(output, (0, len(texts)), texts, [len(prompt) for prompt in asked])


def main() -> None:
    """Replies, prompts or rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("replies", "prompts", "rows"))
    parser.add_argument("names", nargs="+", help="folder or Hub id of the model; files of replies")
    parser.add_argument("--data", type=Path, help="needed by replies")
    parser.add_argument("--base", help="needed by rows, with the output of prompts beside its own")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="problems of a task, the first ones; rows, any")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4, help="of a question; four times as many of MBPP's")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--invented", type=int, default=0, metavar="N", help="samples of user turns, of all processes")
    parser.add_argument("--share", default="0/1", help="this process of so many")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "prompts":
        prompts(args.names, args.output)
        return
    if args.what == "rows":
        if args.base is None:
            parser.error("rows need --base")
        rows(args.names, args.base, args.output, args)
        return
    if args.data is None or len(args.names) != 1:
        parser.error("replies take one model, and --data")
    with tempfile.TemporaryDirectory() as scratch:
        replies(Model(args.names[0]), args, Path(scratch))


if __name__ == "__main__":
    main()
