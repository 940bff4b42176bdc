"""Two decoders on the same problems: what differs, and whether it could be chance.

Problems are pairs, so what they have in common - some are hard for both - cancels. Several completions of a problem are
averaged first: the problem is what was drawn at random, not the completion.

Shape suffixes: N problems, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import tyro

from adjust_dlm.eval.tasks.task_files import json_value, read_text
from adjust_dlm.types import require

DRAWS = 10_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """A comparison of B with A.

    Attributes:
        n: problems.
        mean_a, mean_b: of the scores.
        difference: mean_b - mean_a.
        low, high: its 95 % interval: percentiles of a bootstrap over problems.
        both, only_a, only_b, neither: problems by who solved them; None unless all scores are 0 or 1.
        mcnemar_p: exact two-sided p-value that only_a and only_b are equally likely; None with them.
        draws, seed: of the bootstrap.
    """

    n: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    both: int | None
    only_a: int | None
    only_b: int | None
    neither: int | None
    mcnemar_p: float | None
    draws: int
    seed: int


def compare(a: Sequence[float], b: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Paired:
    """Scores of the same problems, in the same order.

    Raises:
        InputError: no scores, lists of two lengths, or a score that is no finite number.
    """
    require(len(a) == len(b), f"A has {len(a)} scores and B {len(b)}; both need one for each problem")
    require(len(a) > 0, "there is nothing to compare")
    require(draws >= 1, f"draws is {draws}; it must be at least 1")
    a_N, b_N = np.asarray(a, np.float64), np.asarray(b, np.float64)
    require(bool(np.isfinite(a_N).all() and np.isfinite(b_N).all()), "scores must be finite numbers")
    means = bootstrap(b_N - a_N, seed=seed, draws=draws)
    low, high = np.percentile(means, [2.5, 97.5])
    votes = bool(np.isin(a_N, (0, 1)).all() and np.isin(b_N, (0, 1)).all())
    both, only_a, only_b, neither = (int(((a_N == x) & (b_N == y)).sum()) for x, y in ((1, 1), (1, 0), (0, 1), (0, 0)))
    return Paired(
        n=len(a_N),
        mean_a=float(a_N.mean()),
        mean_b=float(b_N.mean()),
        difference=float((b_N - a_N).mean()),
        low=float(low),
        high=float(high),
        both=both if votes else None,
        only_a=only_a if votes else None,
        only_b=only_b if votes else None,
        neither=neither if votes else None,
        mcnemar_p=mcnemar(only_a, only_b) if votes else None,
        draws=draws,
        seed=seed,
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test: a fair coin over the discordant problems.

    2 P(X <= min(only_a, only_b)), X ~ Binomial(only_a + only_b, 1/2), at most 1.
    """
    n, least = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return min(1.0, float(2 * tail / 2**n))  # whole numbers of any size divide exactly


def bootstrap(difference_N: Floats, *, seed: int, draws: int) -> Floats:
    """Means [S] of N differences drawn with replacement; the same for one seed, whatever the memory at hand."""
    n = len(difference_N)
    rng = np.random.default_rng(seed)
    return np.array([difference_N[rng.integers(n, size=n)].mean() for _ in range(draws)])


# Files ---------------------------------------------------------------------------------------------------------


def read_scores(file: Path, metric: str) -> dict[str, float]:
    """Problem -> mean score over its completions, from a `samples-*.jsonl`, in the file's order.

    Raises:
        InputError: no such file, a line without id and scores, or one without this metric.
    """
    found: dict[str, list[float]] = {}
    for number, line in enumerate(_lines(file), start=1):
        where = f"{file}, line {number}"
        value = json_value(line, where)
        good = isinstance(value, dict) and "id" in value and isinstance(value.get("scores"), dict)
        require(good, f"{where} has no id and scores; samples-*.jsonl of a downstream task are wanted")
        scores: Mapping[str, Any] = value["scores"]
        require(metric in scores, f"{where} has no metric {metric!r}; it has {', '.join(scores) or 'none'}")
        score = scores[metric]
        require(isinstance(score, int | float), f"{where}: {metric} is {score!r}; a number is wanted")
        found.setdefault(str(value["id"]), []).append(float(score))
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def _lines(file: Path) -> list[str]:
    """At least one; cut at line feeds alone, because a JSON text may hold what else Python takes for a line end."""
    content = read_text(file)
    require(bool(content.strip()), f"{file} is empty")
    return content.removesuffix("\n").split("\n")


def aligned(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Scores of the same problems, in A's order.

    Raises:
        InputError: a problem that only one of them has: the first one.
    """
    for has, lacks, here, there in (("A", "B", a, b), ("B", "A", b, a)):
        lost = next((name for name in here if name not in there), None)
        counts = f"A has {len(a)} problems, B {len(b)}"
        require(lost is None, f"problem {lost!r} is in {has} and not in {lacks}; {counts}, and they must be the same")
    return list(a.values()), [b[name] for name in a]


# The command ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairedConfig:
    """Settings of `adjust eval paired`.

    Attributes:
        files: two samples-*.jsonl of one task, A and B; the difference is B - A.
        metric: which score.
        draws: of the bootstrap.
        seed: of the bootstrap.
        output: folder for result.json and run.yaml.
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    metric: str = ""
    draws: int = DRAWS
    seed: int = 0
    output: str | None = None

    def __post_init__(self) -> None:
        """Checks what can be refused before anything is read."""
        require(len(self.files) == 2, f"{len(self.files)} files; name two, A and B")
        require(self.draws >= 1, f"draws is {self.draws}; it must be at least 1")
        require(self.seed >= 0, f"seed is {self.seed}; it must be at least 0")


def run(config: PairedConfig) -> dict[str, Any]:
    """Reads both files and compares them.

    Returns:
        `a`, `b`, `metric`, and the fields of `Paired`.
    """
    first, second = map(Path, config.files)
    metric = config.metric or _only_metric(first)
    scores = aligned(read_scores(first, metric), read_scores(second, metric))
    found = compare(*scores, seed=config.seed, draws=config.draws)
    return {"a": config.files[0], "b": config.files[1], "metric": metric, **vars(found)}


def _only_metric(file: Path) -> str:
    """The metric of a file that has one.

    Raises:
        InputError: it has several, or none.
    """
    value = json_value(_lines(file)[0], f"{file}, line 1")
    scores = value.get("scores") if isinstance(value, dict) else None
    names = list(scores) if isinstance(scores, dict) else []
    require(len(names) == 1, f"{file} has {len(names)} metrics ({', '.join(names) or 'none'}); name one with --metric")
    return str(names[0])
