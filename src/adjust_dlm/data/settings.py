"""Settings of `adjust trajectories` and of a corpus, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from adjust_dlm.checks import MOST, Bound, Checked, Count, NotNegative, Seed, TopP, Whole, require
from adjust_dlm.types import DEFAULT_BASE, EVALUATION_ROWS, DecodeConfig, Dtype, OrderOn, OrderRule

if TYPE_CHECKING:
    from adjust_dlm.bases import Base

KINDS = ("text", "chat", "lists", "files", "questions")
SAMPLED = ("text", "chat", "lists", "questions")  # those that are made here
SPLITS = ("train", "heldout")
SHARD_ROWS = 4096  # canvases of a shard
MANIFEST = "manifest.json"  # of a corpus


def require_corpus(folder: Path) -> None:
    """Raises InputError unless a folder holds a corpus."""
    require((folder / MANIFEST).is_file(), f"no corpus at {folder} ({MANIFEST} is missing)")


def check_prompts(spec: str, *, chat: bool) -> None:
    """Raises InputError unless the source is one of those of `open_prompts`, and is there."""
    kind, _, folder = spec.partition(":")
    if spec == "unconditional":
        require(not chat, "unconditional prompts have no text for a chat template")
    elif kind == "corpus" and folder:
        require_corpus(Path(folder))
    elif spec not in ("lists", "questions"):
        require(
            Path(spec).suffix in (".jsonl", ".txt"),
            f"prompts {spec!r}: give unconditional, lists, questions, corpus:DIR, or a .jsonl or .txt file",
        )
        require(Path(spec).is_file(), f"prompt file {Path(spec)} does not exist")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """What texts of a base are decoded.

    Attributes:
        prompts: unconditional, lists, questions, corpus:DIR, or a file (.jsonl, .txt).
        chat: put each text of a file into the base's chat template (list tasks always are in it).
        max_new_tokens: masked positions after each prompt.
        temperature: one or more; with several, prompts and temperatures are crossed, row by row.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; 0 keeps all.
        order: rule that picks the next position; none takes the base's own.
        order_on: score the processed or the raw distribution; none takes the base's own.
    """

    prompts: str = "unconditional"
    chat: bool = False
    max_new_tokens: int = 128
    temperature: tuple[NotNegative, ...] = (1.0,)
    top_p: TopP = 1.0
    top_k: Whole = 0
    order: OrderRule | None = None
    order_on: OrderOn | None = None

    def check_files(self) -> None:
        """Raises InputError unless all that is to be read is there."""
        check_prompts(self.prompts, chat=self.chat)


@dataclass(frozen=True, kw_only=True)
class TrajectoriesConfig(TextConfig):
    """Settings of `adjust trajectories`.

    Attributes:
        output: folder for the shards and the manifest; an interrupted run continues there.
        base: name of a base, or the folder or Hub id of one.
        num: how many trajectories.
        sampler: folder of a g that then decodes by ADJUST, for a further stage of training; none decodes jointly.
        tokens_per_step: K of ADJUST, with a sampler.
        suppress_eos: never commit an end token.
        seed: with a row's number, the only source of randomness.
        first_row: number of the first row; another start makes new rows of the same seed and prompts.
        batch_size: rows decoded together; divides shard_rows, and does not change the result (but for bf16 rounding).
        shard_rows: rows per file, the unit of work and of loss when interrupted.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto is float32 on the CPU and bfloat16 on a GPU.
        compile: compile the layers of the base, once for all lengths (10-30 s at the first pass).
        engine: local (this process, or the ranks of torchrun) or ray (actors of Ray Data; the extra `ray`).
        actors: number of Ray actors; by default one a GPU, or one for four CPUs without any GPU.
    """

    output: str
    base: str = DEFAULT_BASE
    num: Count = 1024
    sampler: str | None = None
    tokens_per_step: int = 1
    suppress_eos: bool = False
    seed: Seed = 0
    first_row: Annotated[int, Bound(0, EVALUATION_ROWS - 1, "at least 0, and below 2**32")] = 0
    batch_size: Count = 64
    shard_rows: Count = 512
    device: str = "auto"
    dtype: Dtype = "auto"
    compile: bool = False
    engine: Literal["local", "ray"] = "local"
    actors: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.first_row + self.num - 1
        require(last < EVALUATION_ROWS, f"the last row is {last}; those from {EVALUATION_ROWS} on are for evaluation")
        require(1 <= self.max_new_tokens < 2**15, f"max_new_tokens is {self.max_new_tokens}; at most 32767 are stored")
        require(
            (self.tokens_per_step == 1) == (self.sampler is None),
            f"tokens_per_step is {self.tokens_per_step}; it must be 1 without a sampler, and at least 2 with one",
        )
        require(bool(self.temperature), "temperature is empty; give at least one")
        require(
            self.shard_rows % self.batch_size == 0,
            f"batch_size {self.batch_size} does not divide shard_rows {self.shard_rows}; for example 64 and 512",
        )
        require(
            self.engine == "ray" or self.actors is None,
            f"actors is {self.actors} but the engine is local; add engine ray",
        )
        require(
            self.engine == "local" or self.device in ("auto", "cpu", "cuda"),
            f"device is {self.device!r}; Ray hands out the GPUs, so give auto, cpu or cuda",
        )

    def decode_configs(self, base: Base) -> list[DecodeConfig]:
        """One configuration per temperature, with the base's own order filled in."""
        own = {"order": self.order or base.spec.order, "order_on": self.order_on or base.spec.order_on}
        return [DecodeConfig.from_settings(self, **own, temperature=temperature) for temperature in self.temperature]


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Checked):
    """What a corpus holds; a folder is resumed only with the same settings.

    Attributes:
        ar: the autoregressive model: `smol`, or a folder of Llama, Qwen2 or Qwen3 with tied embeddings.
        text: canvases of plain text to sample.
        chat: canvases of chat to sample.
        lists: canvases of list tasks to make.
        questions: canvases of short questions that the model answers right.
        heldout: canvases of each kind kept for evaluation; of the files one in fifty, and no more than this.
        text_files: your own: .txt files (one text each), .jsonl files with a `text` or a chat's `messages` in a line.
        length: tokens of a canvas, the start token included.
        sample_batch: rows sampled at a time.
        sample_temperature: temperature of the corpus.
        sample_top_p: nucleus of the corpus.
        seed: names the corpus (and, in training, the adapters' start, the order, the times and the masks).
    """

    ar: str = "smol"
    text: Whole = 120_000
    chat: Whole = 40_000
    lists: Whole = 60_000
    questions: Whole = 0
    heldout: Whole = 1024
    text_files: tuple[Path, ...] = ()
    length: Annotated[int, Bound(2, MOST, "at least 2")] = 129
    sample_batch: Count = 4096
    sample_temperature: NotNegative = 1.0
    sample_top_p: TopP = 0.95
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = sum(getattr(self, kind) for kind in SAMPLED) + len(self.text_files)
        require(asked > 0, "the corpus is empty; ask for some canvases")

    def check_files(self) -> None:
        """Raises InputError unless the files are there, and of a known kind."""
        lost = [str(path) for path in self.text_files if not path.is_file()]
        require(not lost, f"there is no file {', '.join(lost)}")
        for path in self.text_files:
            require(path.suffix in (".txt", ".jsonl"), f"{path}: text files end in .txt or .jsonl")

    def identity(self) -> dict[str, Any]:
        """The settings that a folder belongs to, files by their content."""
        from adjust_dlm.bases.adapted import file_digest

        same = {name: getattr(self, name) for name in ("ar", *SAMPLED, "heldout", "length", "seed")}
        sampled = {"temperature": self.sample_temperature, "top_p": self.sample_top_p, "shard_rows": SHARD_ROWS}
        return {**same, **sampled, "files": file_digest(*self.text_files) if self.text_files else None}

    def shards(self) -> dict[str, tuple[str, str, int, int]]:
        """File name -> (split, kind, shard number, rows) of all sampled shards."""
        out = {}
        for split, kind in product(SPLITS, SAMPLED):
            asked: int = getattr(self, kind)
            rows = asked if split == "train" else self.heldout if asked else 0
            for n, start in enumerate(range(0, rows, SHARD_ROWS)):
                out[f"{split}-{kind}-{n:05d}.parquet"] = split, kind, n, min(SHARD_ROWS, rows - start)
        return out
