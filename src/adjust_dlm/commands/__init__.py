"""The commands of `adjust`: a table of names, and one module per command that imports nothing heavy.

A new command is one line here (its name may be two words, as `eval table`): the frozen dataclass that gives flags, help
and YAML keys, and the function that takes such an object, `run` beside it unless named. Only what the chosen command
needs is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Command(NamedTuple):
    """Its line of help, and where its settings and its function stand (see `named`).

    The function returns an `Outcome`, or a dict to be shown and stored. Its module may need torch: it is imported once
    the settings, whose module does not, have been checked.
    """

    help: str
    settings: str
    function: str


def named(where: str) -> Any:
    """What `module:name` stands for in this package."""
    module, _, name = where.partition(":")
    return getattr(import_module(f"adjust_dlm.{module}"), name)


_TABLE: dict[str, tuple[str, ...]] = {
    "bases": ("List bases and samplers, what is cached, sizes.", "commands.bases:ListConfig"),
    "fetch":
        ("Fetch the default base's autoregressive weights.", "commands.bases:FetchConfig", "commands.bases:run_fetch"),
    "generate": ("Write text with any decoder.", "commands.generate:GenerateConfig"),
    "chat": ("Talk to a base; its replies fill in live.", "commands.chat:ChatConfig"),
    "compare": ("Joint, parallel and ADJUST side by side on one prompt.", "commands.compare:CompareConfig"),
    "decoders":
        ("List decoders: what they do, their settings, what they need.",
         "commands.bases:ListConfig", "commands.decoders:run"),
    "serve":
        ("Serve a base to OpenAI's clients; infilling and a stream of every commit.", "commands.serve:ServeConfig"),
    "trajectories":
        ("Decode with K=1 and store the order: what training reads.",
         "data.settings:TrajectoriesConfig", "data.trajectories:make_trajectories"),
    "train": ("Train a sampler on trajectories.", "train.config:TrainConfig", "train.trainer:train"),
    "adapt":
        ("Turn an autoregressive model into a masked diffusion base.", "train.config:AdaptConfig", "train.adapt:adapt"),
    "eval divergence":
        ("How far every decoder's text is from the base's joint law: KL both ways.",
         "eval.settings:DivergenceConfig", "eval.divergence:run"),
    "eval paired":
        ("Decoders against a first one on its problems: difference, interval, McNemar.", "eval.paired:PairedConfig"),
    "eval nll":
        ("NLL of existing texts under any autoregressive judge.", "eval.settings:NllConfig", "eval.scores:run_nll"),
    "eval mauve":
        ("MAUVE of existing texts against a reference.", "eval.settings:MauveConfig", "eval.scores:run_mauve"),
    "eval table":
        ("NLL and MAUVE of every decoder and K: the paper's Table 1.",
         "eval.settings:TableConfig", "eval.table:make_table"),
    "eval frontier":
        ("Quality of every decoder against passes and time: one plot, one CSV.",
         "eval.settings:FrontierConfig", "eval.frontier:make_frontier"),
    "eval gsm8k":
        ("GSM8K with any decoder: strict and flexible accuracy.",
         "eval.tasks.settings:Gsm8kConfig", "eval.tasks.gsm8k:run"),
    "eval math":
        ("MATH with any decoder: the boxed answer, by its value.",
         "eval.tasks.settings:MathConfig", "eval.tasks.maths:run"),
    "eval humaneval":
        ("HumanEval: functions, run against their tests.",
         "eval.tasks.settings:HumanEvalConfig", "eval.tasks.code:run"),
    "eval mbpp": ("MBPP: programs, run against their tests.", "eval.tasks.settings:MbppConfig", "eval.tasks.code:run"),
    "eval parallelbench":
        ("Waiting lines, puzzles and sentences: what parallel decoding loses.",
         "eval.tasks.settings:ParallelBenchConfig", "eval.tasks.parallelbench:run_parallelbench"),
    "bench runtime":
        ("Tokens per second and components beside parallel decoding and the device's ceilings.",
         "bench.settings:RuntimeConfig", "commands.bench:run"),
    "export": ("Write a sampler as a repository for the Hub and transformers.", "commands.export:ExportConfig"),
    "report":
        ("Tables, figures and one page from result folders.", "bench.report:ReportConfig", "bench.report:make_report"),
}  # fmt: skip
COMMANDS = {
    name: Command(text, settings, *(function or [f"{settings.split(':')[0]}:run"]))
    for name, (text, settings, *function) in _TABLE.items()
}
GROUPS: dict[str, list[str]] = {
    "write text": ["generate", "chat", "compare", "serve"],
    "look around": ["bases", "decoders", "fetch"],
    "train": ["adapt", "trajectories", "train", "export"],
    "measure": [name for name in COMMANDS if name.split()[0] in ("eval", "bench", "report")],
}
# Boxes of a command's help: each is there where the command has the first of its flags. Other flags are its own.
FLAGS: dict[str, list[str]] = {box: flags.split() for box, flags in {
    "text": "max_new_tokens prompts temperature temperatures top_p top_k num_samples chat suppress_eos seed",
    "decoder": "tokens_per_step decoder decoders variants list_variants set order order_on schedule block_length"
    " candidates cache_period cache_window batch_size batch_sizes eager",
    "model": "base sampler partner load_partner judge device dtype quantize device_map revision compile",
    "corpus": "text chat lists questions text_files length corpus sample_batch sample_temperature sample_top_p"
    " share_text share_chat share_lists share_files share_questions",
    "training": "lr steps max_seconds optimizer warmup decay clip batch_size micro_batch slices slice_states accumulate"
    " loss rollout reverse weights next_decay next_share seed resume checkpoint_every checkpoint_every_seconds"
    " eval_every heldout heldout_trajectories heldout_texts",
    "output": "output json watch plot title samples track dry_run log_every",
}.items()}  # fmt: skip
