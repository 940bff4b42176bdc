"""Settings of the downstream tasks, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from adjust_dlm.checks import Bound, Count, NotNegative, PositiveOrInf, TopP, Whole, require
from adjust_dlm.data.texts import read_text
from adjust_dlm.eval.settings import EvalConfig
from adjust_dlm.eval.tasks.parallelbench_tasks import CONFIG, select
from adjust_dlm.eval.tasks.sandbox import Limits
from adjust_dlm.eval.tasks.task_files import local_file

NEW_TOKENS = {"waiting_line": 32, "waiting_line_n15": 128, "puzzle": 64, "words_to_sentence": 64}
Grammar = Literal["auto", "off", "languagetool"]


@dataclass(frozen=True, kw_only=True)
class DownstreamConfig(EvalConfig):
    """Settings that every downstream task has.

    Attributes:
        partner: autoregressive model for decoders that ask one; the base's own by default.
        data: file of the problems (.jsonl, .json, .parquet), or owner/name:path of one on the Hub.
        decoders: decoders, or variants of them (see `adjust eval table`); each runs at every K unless it sets its own.
        limit: problems at most, the first ones of the task's order; 0 is all.
        num_samples: completions of a problem.
        temperature, top_p: of decoding.
        block_length: blocks of decoding; by default one.
        shots: examples in the prompt.
        chat: put prompts into the base's chat template.
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    partner: str | None = None
    data: str = ""
    decoders: tuple[str, ...] = ("parallel", "adjust")
    tokens_per_step: tuple[Count, ...] = (1, 2, 4, 8)
    limit: Whole = 0
    num_samples: Count = 1
    max_new_tokens: Count = 256
    temperature: NotNegative = 0.0
    top_p: TopP = 1.0
    block_length: Count | None = None
    shots: Whole = 0
    chat: bool = False
    batch_size: Count = 16
    seed: int = 0
    eager: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.decoders and self.tokens_per_step), "name at least one decoder and one tokens_per_step")
        self.variants()  # read, and so checked

    def check_files(self) -> None:
        """Raises InputError unless problems and examples are there, or may be on the Hub."""
        named = (self.data, *(getattr(self, name, "") for name in ("shots_data", "examples") if self.shots))
        for spec in filter(None, named):
            local_file(spec)

    def variants(self) -> list[str]:
        """Every decoder at every K."""
        return self.at_every_k(self.decoders)


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig(DownstreamConfig):
    """Settings of `adjust eval gsm8k`; the defaults are the paper's for base models.

    `--data builtin` takes twelve problems of our own, and examples of our own with them: a first run, no measurement.

    Attributes:
        shots_data: file of the examples in the prompt: problems, or a list of question and target.
        form: cot for "The answer is 18.", hashes for "#### 18".
    """

    output: str = "runs/gsm8k"
    data: str = "openai/gsm8k:main/test-00000-of-00001.parquet"
    shots_data: str = "openai/gsm8k:main/train-00000-of-00001.parquet"
    shots: Whole = 8
    form: Literal["cot", "hashes"] = "cot"


@dataclass(frozen=True, kw_only=True)
class MathConfig(DownstreamConfig):
    """Settings of `adjust eval math`; the defaults are those of Minerva's evaluation of base models.

    Attributes:
        shots_data: file of the examples, of which the prompt shows the first; needed where shots are asked for.
        per_subject: problems of each subject at most, the first ones; 0 is all.
    """

    output: str = "runs/math"
    data: str = "HuggingFaceH4/MATH-500:test.jsonl"
    shots_data: str = ""
    shots: Whole = 4
    max_new_tokens: Count = 512
    per_subject: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.shots or bool(self.shots_data),
            f"{self.shots} examples are asked for and no file of them is named: give --shots-data FILE or --shots 0",
        )
        require(find_spec("math_verify") is not None, "MATH needs math-verify: pip install 'adjust-dlm[maths]'")


@dataclass(frozen=True, kw_only=True)
class CodeConfig(DownstreamConfig):
    """Settings of tasks whose answers are programs.

    Attributes:
        allow_code_execution: run the programs that the base writes on this machine; nothing runs without it.
        ks: k of every pass@k; each needs as many samples.
        timeout: seconds a program may run; the slowest solution of MBPP (123) takes 3.5 s alone on a core.
        memory_mb: memory of a program.
        workers: programs run at once; 0 is one per CPU.
    """

    temperature: NotNegative = 0.2
    max_new_tokens: Count = 512
    allow_code_execution: bool = False
    ks: tuple[int, ...] = (1,)
    timeout: PositiveOrInf = 15.0
    memory_mb: Count = 2048
    workers: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        right = self.ks and all(1 <= k <= self.num_samples for k in self.ks)
        require(bool(right), f"ks is {self.ks}; every k must lie in 1..{self.num_samples}, the num_samples")

    def check_files(self) -> None:
        """As for every task, and that programs may run: this machine is theirs to read, too."""
        name = type(self).__name__.removesuffix("Config").lower()
        require(
            self.allow_code_execution,
            f"{name} runs programs that the base writes on this machine; read docs/code-execution.md, then say "
            "--allow-code-execution",
        )
        super().check_files()

    def limits(self) -> Limits:
        """Of one program."""
        return Limits(seconds=self.timeout, memory_mb=self.memory_mb)


@dataclass(frozen=True, kw_only=True)
class HumanEvalConfig(CodeConfig):
    """Settings of `adjust eval humaneval`; the defaults are the paper's for Dream-Coder, but for its examples.

    Attributes:
        examples: file of the same form whose first problems, solved, are the `shots`; HumanEval has none of its own.
    """

    data: str = "openai/openai_humaneval:openai_humaneval/*.parquet"
    output: str = "runs/humaneval"
    top_p: TopP = 0.9
    examples: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        said = "HumanEval has no examples of its own; name a file of them with --examples"
        require(not self.shots or bool(self.examples), said)


@dataclass(frozen=True, kw_only=True)
class MbppConfig(CodeConfig):
    """Settings of `adjust eval mbpp`; the defaults are the paper's for base models.

    The smaller form that was checked by hand is google-research-datasets/mbpp:sanitized/*.parquet.
    """

    data: str = "google-research-datasets/mbpp:full/*.parquet"
    output: str = "runs/mbpp"
    shots: Whole = 3


@dataclass(frozen=True, kw_only=True)
class ParallelBenchConfig(DownstreamConfig):
    """Settings of `adjust eval parallelbench`.

    Attributes:
        tasks: names of tasks (copy, sudoku, easy, ...) or groups (waiting_line, puzzle, words_to_sentence, all).
        n: rows of every task; of files, spread evenly over each. 0 is 100 rows, or every row of the files.
        people: sizes of the lists in generated rows, in turn. Above 6 people, the group is called waiting_line_n<size>.
        task_seed: of generated rows; `seed` is that of decoding.
        grammar: LanguageTool for sentences (auto: where it starts; off; languagetool: an error where it does not).
        data: folder of the benchmark's own files; generated rows unless given.
        max_new_tokens: canvas of a reply; 0 is 32 for lists (128 above 6 people) and 64 for the others.
        shots: worked examples before a list or a puzzle.
        limit: problems of a group at most, the first ones; 0 is all. `n` keeps tasks and sizes balanced.
    """

    output: str = "runs/parallelbench"
    tasks: tuple[str, ...] = ("all",)
    n: Whole = 0
    people: tuple[int, ...] = (3, 4, 5, 6)
    task_seed: int = 0
    grammar: Grammar = "auto"
    max_new_tokens: Whole = 0
    shots: Annotated[int, Bound(0, 8, "0 to 8")] = 1
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tasks), "name at least one task, or all")
        good = bool(self.people) and all(2 <= size <= 100 for size in self.people)
        require(good, f"people is {list(self.people)}; give sizes from 2 to 100")
        select(self.tasks)

    def check_files(self) -> None:
        """Raises InputError unless the benchmark's folder, if it is named, is one."""
        for group in select(self.tasks) if self.data else ():
            read_text(Path(self.data) / self.group_name(group) / CONFIG)

    def for_group(self, name: str) -> ParallelBenchConfig:
        """Settings of one group's run, in its own folder."""
        tokens = self.max_new_tokens or NEW_TOKENS.get(name, NEW_TOKENS["waiting_line_n15"])
        return replace(self, max_new_tokens=tokens, output=str(Path(self.output) / name))

    def group_name(self, group: str) -> str:
        """`waiting_line_n15` for lists of 15 people."""
        most = max(self.people)
        return f"{group}_n{most}" if group == "waiting_line" and most > 6 else group
