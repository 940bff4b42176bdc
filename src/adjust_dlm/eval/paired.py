"""Decoders on the same problems: what differs, and whether it could be chance.

Problems are pairs, so what they have in common - some are hard for both - cancels. Several completions of a problem are
averaged first: the problem is what was drawn at random, not the completion.

Shape suffix: N problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import tyro

from adjust_dlm.eval.tasks.task_files import Row, read_rows
from adjust_dlm.types import require

DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True, kw_only=True)
class PairedConfig:
    """Settings of `adjust eval paired`.

    Attributes:
        files: samples-*.jsonl of one task: A, and each B that it is compared with; the difference is B - A.
        metric: which score.
        output: folder for result.json and run.yaml.
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    metric: str = ""
    output: str | None = None

    def __post_init__(self) -> None:
        require(len(self.files) >= 2, f"{len(self.files)} files; name A, and one B or more")


def run(config: PairedConfig) -> dict[str, Any]:
    """Reads the files and compares each with the first.

    Returns:
        `a`, `metric`, and `pairs`: for each other file `b`, and what `compare` says.
    """
    first, *others = config.files
    metric = config.metric or _only_metric(first)
    a = read_scores(first, metric)
    pairs = [{"b": other, **compare(*aligned(a, read_scores(other, metric), other))} for other in others]
    return {"a": first, "metric": metric, "pairs": pairs}


def compare(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """Scores of the same problems, in the same order.

    Returns:
        `n` problems; `mean_a`, `mean_b`; `difference`, mean_b - mean_a; `low`, `high`, its 95 % interval (percentiles
        of a bootstrap over problems); `least`, its one-sided 95 % bound from below: what B loses at most; `both`,
        `only_a`, `only_b`, `neither`: problems by who solved them, and `mcnemar_p`, all five None unless every score is
        0 or 1.

    Raises:
        InputError: no scores, lists of two lengths, or a score that is no finite number.
    """
    require(len(a) == len(b), f"A has {len(a)} scores and B {len(b)}; both need one for each problem")
    require(len(a) > 0, "there is nothing to compare")
    a_N, b_N = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference_N, n, rng = b_N - a_N, len(a_N), np.random.default_rng(0)
    require(bool(np.isfinite(difference_N).all()), "scores must be finite numbers")
    means = [difference_N[rng.integers(n, size=n)].mean() for _ in range(DRAWS)]
    low, least, high = np.percentile(means, [2.5, 5, 97.5])
    counts = [int(((a_N == x) & (b_N == y)).sum()) for x, y in ((1, 1), (1, 0), (0, 1), (0, 0))]
    solved = [*counts, mcnemar(*counts[1:3])] if sum(counts) == n else [None] * 5
    return {
        "n": n, "mean_a": float(a_N.mean()), "mean_b": float(b_N.mean()), "difference": float(difference_N.mean()),
        "low": float(low), "high": float(high), "least": float(least),
        **dict(zip(("both", "only_a", "only_b", "neither", "mcnemar_p"), solved, strict=True)),
    }  # fmt: skip


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test: a fair coin over the discordant problems.

    2 P(X <= min(only_a, only_b)), X ~ Binomial(only_a + only_b, 1/2), at most 1.
    """
    n, least = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return min(1.0, float(2 * tail / 2**n))  # whole numbers of any size divide exactly


def read_scores(file: str, metric: str) -> dict[str, float]:
    """Problem -> mean score over its completions, from a `samples-*.jsonl`, in the file's order.

    Raises:
        InputError: no such file, a row without id and scores, or one without this metric.
    """
    found: dict[str, list[float]] = {}
    for number, row in enumerate(read_rows(file, ("id", "scores")), start=1):
        where, scores = f"{file}, row {number}", _scores(row)
        require(metric in scores, f"{where} has no metric {metric!r}; it has {', '.join(scores) or 'none'}")
        score = scores[metric]
        require(isinstance(score, int | float), f"{where}: {metric} is {score!r}; a number is wanted")
        found.setdefault(str(row["id"]), []).append(float(score))
    return {name: sum(values) / len(values) for name, values in found.items()}


def _scores(row: Row) -> dict[str, Any]:
    return row["scores"] if isinstance(row["scores"], dict) else {}


def _only_metric(file: str) -> str:
    """The metric of a file; raises InputError where it has several, or none."""
    names = list(_scores(read_rows(file, ("id", "scores"))[0]))
    require(len(names) == 1, f"{file} has {len(names)} metrics ({', '.join(names) or 'none'}); name one with --metric")
    return str(names[0])


def aligned(a: Mapping[str, float], b: Mapping[str, float], name: str = "B") -> tuple[list[float], list[float]]:
    """Scores of the same problems, in A's order; `name` says in an error which B it was.

    Raises:
        InputError: a problem that only one of them has: the first one.
    """
    lost = next((problem for problem in [*a, *b] if problem not in a or problem not in b), None)
    said = f"problem {lost!r} is in {'A' if lost in a else name} alone; A has {len(a)} problems, {name} {len(b)}"
    require(lost is None, f"{said}, and they must be the same")
    return list(a.values()), [b[problem] for problem in a]
