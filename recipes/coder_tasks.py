"""An autoregressive chat model on GSM8K, MATH, HumanEval and MBPP, and its replies to their training questions.

    python recipes/coder_tasks.py score AR --data DIR --output FILE       a line of JSON for each task, T = 0
    python recipes/coder_tasks.py replies AR --data DIR --output FILE.jsonl --samples 4 --temperature 0.7
    python recipes/coder_tasks.py prompts FILE.jsonl ... --output DIR     their questions, each once, in two files

DIR holds gsm8k/{train,test}.jsonl, math/{math500_test,math_train_part}.jsonl, humaneval/HumanEval.jsonl.gz and
mbpp/mbpp.jsonl. Scores are those of `adjust eval TASK --chat --shots 0`, in the model's own chat template. Replies are
kept where they end and are right, as `messages` for `adjust adapt --text-files`; no test question is asked: of MBPP the
problems 601 to 974, without the few that have the text or the code of a test problem. `--share i/n`: this process's
part of the replies. Programs of the model run on this machine (docs/code-execution.md).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adjust_dlm.data.ar import read_vocabulary
from adjust_dlm.eval.downstream import Problem, Task, cut_at_stop, summarize
from adjust_dlm.eval.tasks import code, gsm8k, maths

MBPP_TRAIN = range(601, 975)
MORE = {"mbpp": 4}  # times the samples, since it has few training questions
Asked = tuple[Task, Any, str]  # a task, its settings, and the metric that says what is right


def tasks(data: Path, *, train: bool, scratch: Path) -> list[Asked]:
    """Zero-shot chats: the test problems, or the training questions."""
    how: dict[str, Any] = {"shots": 0, "chat": True}
    grade = gsm8k.Gsm8kConfig(data=str(data / "gsm8k" / ("train.jsonl" if train else "test.jsonl")), **how)
    proof = maths.MathConfig(
        data=str(data / "math" / ("math_train_part.jsonl" if train else "math500_test.jsonl")), **how
    )
    run = {"allow_code_execution": True, **how}
    programs = str(train_programs(data, scratch) if train else data / "mbpp" / "mbpp.jsonl")
    out: list[Asked] = [
        (gsm8k.make_task(grade), grade, "value"), (maths.make_task(), proof, "math_verify"),
        (code.MBPP, code.MbppConfig(data=programs, **run), "pass@1"),
    ]  # fmt: skip
    if not train:
        tests = code.HumanEvalConfig(data=str(data / "humaneval" / "HumanEval.jsonl.gz"), **run)
        out.append((code.HUMANEVAL, tests, "pass@1"))
    return out


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


class Model:
    """The model behind its own chat template."""

    def __init__(self, ar: str, device: torch.device) -> None:
        """Half precision on a card."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(ar, dtype=dtype).to(device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(ar, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.ends = set(read_vocabulary(self.tokenizer, self.model.config).end_ids)  # as those of the base

    @torch.no_grad()
    def reply(
        self, prompts: Sequence[str], *, new_tokens: int, batch_size: int, **sampling: Any
    ) -> list[tuple[str, bool]]:
        """Texts up to their end, and whether there is one. Prompts of like lengths are asked together."""
        said = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in prompts
        ]
        order = sorted(range(len(said)), key=lambda n: len(said[n]))
        out = [("", False)] * len(said)
        for at in range(0, len(order), batch_size):
            members = order[at : at + batch_size]
            given = self.tokenizer(
                [said[n] for n in members], return_tensors="pt", padding=True, add_special_tokens=False
            )
            made = self.model.generate(
                **given.to(self.model.device), max_new_tokens=new_tokens, pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=sorted(self.ends), repetition_penalty=1.0, **sampling,
            )[:, given["input_ids"].shape[1] :]  # fmt: skip
            for n, row in zip(members, made.tolist(), strict=True):
                end = next((i for i, token in enumerate(row) if token in self.ends), None)
                out[n] = self.tokenizer.decode(row[:end]), end is not None
            sys.stderr.write(f"{at + len(members)} of {len(order)} replies\n")
        return out


def graded(asked: Asked, problems: Sequence[Problem], texts: Sequence[list[str]]) -> list[list[dict[str, float]]]:
    """Scores of completions that are cut at the task's stop words."""
    task, config, _ = asked
    return task.score(problems, [[cut_at_stop(text, task.stop) for text in group] for group in texts], config)


def score(model: Model, args: argparse.Namespace, scratch: Path) -> None:
    """One line a task: every metric, and how many replies did not end."""
    lines: list[str] = []
    for asked in tasks(args.data, train=False, scratch=scratch):
        task, config, metric = asked
        problems, began = task.problems(config)[: args.limit or None], time.monotonic()
        said = model.reply(
            [p.prompt for p in problems], new_tokens=args.new_tokens, batch_size=args.batch_size, do_sample=False
        )
        found = graded(asked, problems, [[text] for text, _ in said])
        line = {"task": task.name, "metric": metric, **summarize(problems, found)["metrics"]}
        line |= {"cut": sum(not ended for _, ended in said), "seconds": round(time.monotonic() - began)}
        lines.append(json.dumps(line))
        args.output.write_text("\n".join(lines) + "\n")
        sys.stdout.write(json.dumps(line) + "\n")


def replies(model: Model, args: argparse.Namespace, scratch: Path) -> None:
    """Right replies as chats, at most `samples` different ones of a question."""
    part, parts = map(int, args.share.split("/"))
    torch.manual_seed(part)
    with args.output.open("w") as file:
        for asked in tasks(args.data, train=True, scratch=scratch):
            task, config, metric = asked
            problems = task.problems(config)[: args.limit or None][part::parts]
            samples = args.samples * MORE.get(task.name, 1)
            prompts = [p.prompt for p in problems for _ in range(samples)]
            how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
            said = model.reply(prompts, new_tokens=args.new_tokens, batch_size=args.batch_size, **how)
            grouped = [said[at : at + samples] for at in range(0, len(said), samples)]
            found = graded(asked, problems, [[text for text, _ in group] for group in grouped])
            kept = 0
            for problem, group, scores in zip(problems, grouped, found, strict=True):
                whole = [ended and cut_at_stop(text, task.stop) == text for text, ended in group]
                right = [bool(s[metric]) and good for s, good in zip(scores, whole, strict=True)]
                for text in sorted({text for (text, _), good in zip(group, right, strict=True) if good}):
                    chat = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": text}]
                    file.write(json.dumps({"messages": chat}) + "\n")
                    kept += 1
            sys.stdout.write(json.dumps({"task": task.name, "asked": len(prompts), "kept": kept}) + "\n")
            sys.stdout.flush()


def prompts(files: Sequence[str], output: Path) -> None:
    """Questions of replies, each once, in an order of their own: the last tenth for held-out rows."""
    chats = [json.loads(line)["messages"][0] for name in files for line in Path(name).read_text().splitlines()]
    texts = sorted({chat["content"] for chat in chats})
    random.Random(0).shuffle(texts)
    first = len(texts) - len(texts) // 10
    for name, part in (("prompts", texts[:first]), ("heldout-prompts", texts[first:])):
        (output / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in part))


def main() -> None:
    """Scores, replies or prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("score", "replies", "prompts"))
    parser.add_argument("names", nargs="+", help="folder or Hub id of the model; files of replies")
    parser.add_argument("--data", type=Path, help="needed by scores and replies")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="problems of a task, the first ones")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4, help="of a question; four times as many of MBPP's")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--share", default="0/1", help="this process of so many")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "prompts":
        prompts(args.names, args.output)
        return
    if args.data is None or len(args.names) != 1:
        parser.error(f"{args.what} takes one model, and --data")
    model = Model(args.names[0], torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        (score if args.what == "score" else replies)(model, args, Path(scratch))


if __name__ == "__main__":
    main()
