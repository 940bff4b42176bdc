"""The commands of `adjust`: a table of names, and one module per command that imports nothing heavy.

A new command is one line here (its name may be two words, as `eval table`): a module, the frozen dataclass in it that
gives flags, help and YAML keys, and the function that takes such an object. Only the module of the chosen command is
imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    Attributes:
        help: one line for `adjust --help`.
        module: what to import.
        config: name of its settings dataclass.
        function: settings -> `Outcome`, or -> dict, which then becomes `result.json` and the table on stdout.
    """

    help: str
    module: str
    config: str
    function: str = "run"


COMMANDS: dict[str, Command] = {
    "bases": Command("List bases and samplers, what is cached, sizes.", "adjust_dlm.commands.bases", "BasesConfig"),
    "fetch": Command(
        "Fetch the default base's autoregressive weights.", "adjust_dlm.commands.fetch", "FetchConfig"
    ),
    "generate": Command("Write text with any decoder.", "adjust_dlm.commands.generate", "GenerateConfig"),
    "compare": Command(
        "Joint, parallel and ADJUST side by side on one prompt.", "adjust_dlm.commands.compare", "CompareConfig"
    ),
    "serve": Command(
        "Serve a base to OpenAI's clients; infilling and a stream of every commit.",
        "adjust_dlm.commands.serve", "ServeConfig",
    ),
    "trajectories": Command(
        "Decode with K=1 and store the order: what training reads.",
        "adjust_dlm.data.trajectories", "TrajectoriesConfig", "make_trajectories",
    ),
    "train": Command("Train a sampler on trajectories.", "adjust_dlm.train.trainer", "TrainConfig", "train"),
    "adapt": Command(
        "Turn an autoregressive model into a masked diffusion base.",
        "adjust_dlm.train.adapt", "AdaptConfig", "adapt",
    ),
    "eval divergence": Command(
        "How far every decoder's text is from the base's joint law: KL both ways.",
        "adjust_dlm.eval.divergence", "DivergenceConfig",
    ),
    "eval paired": Command(
        "Two decoders on the same problems: difference, interval, McNemar's test.",
        "adjust_dlm.eval.paired", "PairedConfig", "run",
    ),
    "eval nll": Command(
        "NLL of existing texts under any autoregressive judge.", "adjust_dlm.eval.scores", "NllConfig", "run_nll"
    ),
    "eval mauve": Command(
        "MAUVE of existing texts against a reference.", "adjust_dlm.eval.scores", "MauveConfig", "run_mauve"
    ),
    "eval table": Command(
        "NLL and MAUVE of every decoder and K: the paper's Table 1.",
        "adjust_dlm.eval.table", "TableConfig", "make_table",
    ),
    "eval frontier": Command(
        "Quality of every decoder against passes and time: one plot, one CSV.",
        "adjust_dlm.eval.frontier", "FrontierConfig", "make_frontier",
    ),
    "eval gsm8k": Command(
        "GSM8K with any decoder: strict and flexible accuracy.", "adjust_dlm.eval.tasks.gsm8k", "Gsm8kConfig"
    ),
    "eval math": Command(
        "MATH with any decoder: the boxed answer, by its value.", "adjust_dlm.eval.tasks.maths", "MathConfig"
    ),
    "eval humaneval": Command(
        "HumanEval: functions, run against their tests.", "adjust_dlm.eval.tasks.code", "HumanEvalConfig"
    ),
    "eval mbpp": Command(
        "MBPP: programs, run against their tests.", "adjust_dlm.eval.tasks.code", "MbppConfig"
    ),
    "eval parallelbench": Command(
        "Waiting lines, puzzles and sentences: what parallel decoding loses.",
        "adjust_dlm.eval.tasks.parallelbench", "ParallelBenchConfig", "run_parallelbench",
    ),
    "bench runtime": Command(
        "Tokens per second and components beside parallel decoding and the device's ceilings.",
        "adjust_dlm.commands.bench", "RuntimeConfig",
    ),
    "export": Command(
        "Write a sampler as a repository for the Hub and transformers.", "adjust_dlm.commands.export", "ExportConfig"
    ),
    "report": Command(
        "Tables, figures and one page from result folders.",
        "adjust_dlm.bench.report", "ReportConfig", "make_report",
    ),
}  # fmt: skip
