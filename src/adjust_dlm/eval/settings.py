"""Settings of the commands that measure texts, checked without torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from adjust_dlm.checks import MOST, Bound, Checked, Count, NotNegative, Positive, TopP, Whole, require
from adjust_dlm.data.settings import check_prompts
from adjust_dlm.data.texts import read_text
from adjust_dlm.eval.plots import check_plot
from adjust_dlm.eval.tasks.task_files import local_file
from adjust_dlm.types import DEFAULT_BASE, DecodeConfig, OrderRule, Quantize, TokenSource
from adjust_dlm.variants import DECODERS, read_variant

Pooling = Literal["mean", "last"]
Split = Literal["line", "paragraph"]
Several = Annotated[int, Bound(2, MOST, "at least 2")]  # else there is no interval
OF_THE_LAW = ("max_new_tokens", "suppress_eos")  # with another value a variant is measured against another law


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
    """Settings of every command that decodes and measures.

    Attributes:
        base: name, folder or Hub id of the base.
        sampler: folder or Hub id of g; the base's own by default.
        output: where results, samples and texts go.
        tokens_per_step: K.
        max_new_tokens: masked positions behind each prompt.
        batch_size: rows decoded at once.
        seed: of every row.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8, fp8 or fp8-dynamic (see `adjust generate`).
    """

    base: str = DEFAULT_BASE
    sampler: str | None = None
    output: str = "runs/eval"
    tokens_per_step: tuple[Count, ...] = (2, 4, 8)
    max_new_tokens: Count = 128
    batch_size: Count = 256
    seed: int = 1
    device: str = "auto"
    quantize: Quantize | None = None

    def decode_config(self, **changes: Any) -> DecodeConfig:
        """What these settings say of decoding, but for K, with changes."""
        return DecodeConfig.from_settings(self, **{"tokens_per_step": 1} | changes)

    def at_every_k(self, decoders: Iterable[str]) -> list[str]:
        """Decoders at every K; K = 1 of parallel and ADJUST is joint decoding, and runs once.

        One that decides itself how many tokens a pass commits (`threshold:tau=0.9`), or that says its K, runs once.
        Settings of a variant (blocks, an order) hold at K = 1 too.
        """
        out = []
        for decoder in decoders:
            name, settings, _ = read_variant(decoder)
            if "tokens_per_step" in settings or not DECODERS[name].takes_k:
                out.append(decoder)
                continue
            shared = ",".join(f"{key}={value}" for key, value in settings.items() if key != "candidates")
            joint = f"joint:{shared}" if shared else "joint"
            start = f"{decoder}{',' if ':' in decoder else ':'}tokens_per_step="
            same = name in ("parallel", "adjust")
            out += [joint if k == 1 and same else f"{start}{k}" for k in self.tokens_per_step]
        return list(dict.fromkeys(out))


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(EvalConfig):
    """Settings of `adjust eval divergence`.

    q_i is what a decoder drew token i from, p_i the base looked at anew on the same canvas. The sum of KL(q_i || p_i)
    over the decoder's own tokens is the KL between the laws of whole texts, exact in expectation. With `quantize` the
    law is that of the quantized base.

    Attributes:
        decoders: names or variants ("adjust:candidates=0"), at every K unless they set their own.
        n: texts of each row and source of tokens.
        temperatures: of the law. A decoder has the same unless its variant says another: "parallel:temperature=0.8".
        sources: of tokens: the decoder's "own" for KL(q || p), drawn from the "base" at its positions for KL(p || q).
        prompts: unconditional, lists, questions, corpus:DIR, or a .jsonl or .txt file.
        chat: put each prompt of a file into the chat template.
        order: which position is next; the base's own rule by default.
        suppress_eos: never end a text.
        dtype: of base and g; bf16 on a GPU and fp32 on the CPU unless given.
    """

    output: str = "runs/divergence"
    decoders: tuple[str, ...] = ("joint", "parallel", "adjust")
    n: Several = 256
    temperatures: tuple[Positive, ...] = (1.0,)
    sources: tuple[TokenSource, ...] = ("own", "base")
    prompts: str = "unconditional"
    chat: bool = False
    order: OrderRule | None = None
    suppress_eos: bool = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    partner = None  # no decoder that asks one can be measured

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.temperatures), "temperatures is empty; give one or more")
        require(bool(self.sources), f"sources is empty; give one or both of {', '.join(get_args(TokenSource))}")
        for variant in self.decoders:
            for name, value in read_variant(variant).settings.items():
                require(
                    name not in OF_THE_LAW or value == getattr(self, name),
                    f"decoder {variant!r} has a {name} of its own, which is the law's too: set it for all",
                )
        require(bool(self.cells()), "decoders is empty, or tokens_per_step is empty and all take K; give at least one")

    def check_files(self) -> None:
        """Raises InputError unless the prompts are there."""
        check_prompts(self.prompts, chat=self.chat)

    def cells(self) -> list[tuple[float, str]]:
        """Temperature and full variant of each line."""
        found = self.at_every_k(self.decoders)
        return [(temperature, variant) for temperature in dict.fromkeys(self.temperatures) for variant in found]


@dataclass(frozen=True, kw_only=True)
class TableConfig(EvalConfig):
    """Settings of `adjust eval table`: unconditional text, the paper's Table 1.

    K = 1 of parallel and ADJUST adds nothing: it is the joint row. All cells have the same rows, and the n joint texts
    behind these are MAUVE's reference.

    Attributes:
        partner: autoregressive model for decoders that ask one; the base's own by default.
        n: texts per cell.
        divergence: texts of a cell that KL is measured on, both ways (see `adjust eval divergence`); 0 is none.
        temperatures: one block of the table each.
        variants: more rows: decoders with settings, such as "threshold:tau=0.9" or "edlm:tokens_per_step=4".
        top_p: nucleus mass.
        judge: autoregressive model that scores and embeds the texts: "smol" or a folder.
        buckets: k-means clusters of MAUVE; 0 takes n / 10.
        suppress_eos: never end a text, so that all have the same length.
        compile: compile the base (CUDA).
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    partner: str | None = None
    output: str = "runs/table"
    n: Several = 1024
    divergence: Whole = 256
    temperatures: tuple[NotNegative, ...] = (1.0, 0.6)
    variants: tuple[str, ...] = ()
    top_p: TopP = 1.0
    judge: str = "smol"
    buckets: Whole = 0
    suppress_eos: bool = True
    compile: bool = False
    eager: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.divergence != 1, "divergence is 1; give 0, or 2 texts or more")
        require(bool(self.temperatures), "temperatures is empty; give at least one")
        for variant in self.variants:
            read_variant(variant)


def _spread(forms: str) -> tuple[str, ...]:
    """`parallel:{|order=margin,}tokens_per_step={2|4}` -> a variant for every choice, four here."""
    parts = [re.split("[{}]", form) for form in forms.split()]
    return tuple("".join(words) for form in parts for words in itertools.product(*(part.split("|") for part in form)))


TEXT = _spread("""
    parallel:tokens_per_step={2|4|8}
    parallel:order=margin,tokens_per_step=4
    adjust:tokens_per_step={2|4|8|16}
    adjust:candidates=0,tokens_per_step={2|4|8}
    adjust:block_length=32,tokens_per_step={4|8}
    adjust:block_length=32,cache_period=8,tokens_per_step=4
    adaptive:gamma={6|12|24}
    threshold:{|score=likeliest,}tau={0.9|0.3|0.1}
    factor:f={0.5|2|4}
    entropy_bound:gamma={1|4|16}
    klass:tau=0.5,epsilon_kl=0.05
    edlm:tokens_per_step={2|4|8}
    apd:lookahead=32,mixture={0.5|0.8}
    verified
    dcd:tokens_per_step=16
""")
LISTS = _spread("""
    joint:block_length=16
    parallel:{|block_length=16,}tokens_per_step={2|4}
    adjust:{|block_length=16,}tokens_per_step={2|4}
    threshold:{|block_length=16,}tau={0.999|0.99|0.95|0.9|0.8}
    factor:{|block_length=16,}f={0.03|0.1|0.3|1}
    entropy_bound:{|block_length=16,}gamma={0.01|0.1|0.3|1}
    adaptive:{|block_length=16,}gamma={0.01|0.1}
    cascade:{|block_length=16,}tau={0.999|0.99|0.95|0.9}
    cascade:block_length=16,tau_g={0.95|0.99|0.999},tau={0.99|0.95|0.9}
    cascade:block_length=16,calls=1,tau_g=0.99,tau={0.99|0.9}
    verified:block_length=16,depth={4|8}
    klass:block_length=16
    apd:lookahead=16,mixture=0.8
""")
FORM = (
    "order", "block_length", "cache_period", "cache_window", "candidates", "rule", "correct", "tau_g",
    "calls", "most", "completions", "lookahead", "keep", "reference", "alpha", "history", "epsilon_kl", "depth",
    "match", "score", "temperature", "top_p",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FrontierConfig(TableConfig):
    """Settings of `adjust eval frontier`.

    Attributes:
        tokens_per_step: K of plain parallel and ADJUST rows beside the variants.
        variants: decoders with settings for text (see `adjust eval table`).
        list_variants: the same for list tasks, at T = 0.
        n: texts a variant; 0 leaves the text out.
        list_n: list tasks; 0 leaves them out.
        list_max_new_tokens: canvas of an answer.
        plot: draw frontier.png (needs matplotlib).
    """

    output: str = "runs/frontier"
    tokens_per_step: tuple[Count, ...] = ()
    variants: tuple[str, ...] = TEXT
    list_variants: tuple[str, ...] = LISTS
    n: Whole = 1024
    list_n: Whole = 400
    list_max_new_tokens: Count = 64
    plot: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n != 1, "n is 1; give 0, or 2 texts or more")
        for variant in self.list_variants:
            read_variant(variant)
        require(bool(self.n or self.list_n), "n and list_n are both 0: there is nothing to measure")
        check_plot(self.plot)


def check_clusters(seeds: Sequence[int], scale: float) -> None:
    """Raises InputError for what MAUVE cannot take, and where scikit-learn is not installed."""
    require(find_spec("sklearn") is not None, "MAUVE needs scikit-learn: pip install 'adjust-dlm[eval]'")
    require(scale > 0, f"scale is {scale}; it must be above 0")
    require(len(seeds) > 0, "seeds is empty; give at least one")
    require(all(0 <= seed < 2**32 for seed in seeds), f"seeds are {list(seeds)}; all must lie in 0..2**32-1")


def check_texts(file: str) -> None:
    """Raises InputError unless `read_texts` finds the file."""
    if is_lines(file):
        local_file(file)
    else:
        plain_text(file)


def plain_text(file: str) -> str:
    """What is in a file; raises InputError for nothing."""
    content = read_text(Path(file))
    require(bool(content.strip()), f"there is no text in {file}")
    return content


def is_lines(file: str) -> bool:
    """Whether a file holds objects, one a line."""
    return ".jsonl" in Path(file).suffixes[-2:]


@dataclass(frozen=True, kw_only=True)
class NllConfig(Checked):
    """Settings of `adjust eval nll`, which `adjust eval mauve` has, too.

    Attributes:
        files: .jsonl with `text` or `tokens`, or plain text.
        judge: autoregressive model: "smol", a folder, or a Hub id.
        start: token in front of every text, by its name; by default the judge's <|endoftext|>, start or end token.
        tokens_of: whose ids `tokens` are: the judge's own name, or the model (folder or Hub id) with whose tokenizer
            they become text first.
        split: what a text is in a plain file.
        max_tokens: of a text, the rest is left out; 0 is all.
        batch_size: texts per pass; changes no number beyond rounding.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the judge: auto (float32 on the CPU, bfloat16 on a GPU), float32 or bfloat16.
        output: folder for result.json and run.yaml.
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    judge: str = "smol"
    start: str = ""
    tokens_of: str = ""
    split: Split = "line"
    max_tokens: Whole = 0
    batch_size: Count = 32
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.files), "name at least one file of texts")

    def check_files(self) -> None:
        """Raises InputError unless the texts are there."""
        for file in self.files:
            check_texts(file)


@dataclass(frozen=True, kw_only=True)
class MauveConfig(NllConfig):
    """Settings of `adjust eval mauve`.

    Attributes:
        reference: file of the texts to compare with, in the same forms.
        buckets: k-means clusters; 0 takes a tenth of the smaller set.
        seeds: of k-means; one score each, of which the mean is told.
        scale: the constant c of exp(-c KL).
        pooling: a text's features: mean of its tokens' states, or the last one's.
    """

    reference: str = ""
    buckets: Whole = 0
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    scale: float = 5.0
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.reference), "name the texts to compare with: --reference FILE")
        check_clusters(self.seeds, self.scale)

    def check_files(self) -> None:
        """The reference, too."""
        super().check_files()
        check_texts(self.reference)
