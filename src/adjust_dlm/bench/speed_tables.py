"""Rows of `adjust bench runtime`: columns, Markdown and a plot; ratios are formed within one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
COLUMNS = (
    "run", "part", "form", "decoder", "tokens_per_step", "batch", "new_tokens", "n", "seconds", "seconds_low",
    "seconds_high", "cpu_seconds", "tokens", "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high",
    "over_parallel",
    "over_parallel_low", "over_parallel_high", "speed_over_joint", "speed_over_public", "ms_per_round", "rounds",
    "sampler_passes", "captures", "setup_seconds", "tflops", "share_of_gemm", "share_of_copy", "share_of_roofline",
    "memory_gib",
)  # fmt: skip
_PLACE = ("run", "batch", "new_tokens")


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Adds what compares decodes of the same run.

    `over_parallel`: seconds over those of plain parallel decoding at the same form, K, B and L, with the widest range
    of the quartiles; `speed_over_joint`: tokens/s over joint decoding's at the same form, B and L;
    `speed_over_public`: over the public loop's at the same K, B and L, parallel's for parallel and ADJUST's for others.
    """
    rows = list(rows)
    decodes = [row for row in rows if row["part"] == "decode"]

    def found(row: Row, *same: str, **wanted: str) -> Row | None:
        keys = (*_PLACE, *same)
        return next(
            (
                other for other in decodes
                if all(other[k] == row[k] for k in keys) and all(other[k] == v for k, v in wanted.items())
            ),
            None,
        )  # fmt: skip

    for row in decodes:
        if row["tokens_per_step"] and (other := found(row, "form", "tokens_per_step", decoder="parallel")):
            row["over_parallel"] = row["seconds"] / other["seconds"]
            row["over_parallel_low"] = row["seconds_low"] / other["seconds_high"]
            row["over_parallel_high"] = row["seconds_high"] / other["seconds_low"]
        if other := found(row, "form", decoder="joint"):
            row["speed_over_joint"] = row["tokens_per_second"] / other["tokens_per_second"]
        public = "parallel" if row["decoder"].partition(":")[0] == "parallel" else "adjust"
        if row["tokens_per_step"] and (other := found(row, "tokens_per_step", form="public", decoder=public)):
            row["speed_over_public"] = row["tokens_per_second"] / other["tokens_per_second"]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*out, *("| " + " | ".join(line) + " |" for line in lines), ""]


def _number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


def _range(row: Row, column: str, form: str, factor: float = 1.0) -> str:
    """Median (quartiles)."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if row.get(column) is None:
        return ""
    middle = format(factor * row[column], form)
    if low is None or high is None or row["n"] < 2:
        return middle
    return f"{middle} ({format(factor * low, form)}-{format(factor * high, form)})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def markdown(out: Row) -> str:
    """Decodes, components, what was left out, and what they were measured on."""
    decodes = [row for row in out["rows"] if row["part"] == "decode"]
    parts = [row for row in out["rows"] if row["part"] != "decode"]
    most, machine = out["ceilings"], out["machine"]
    lines = [
        f"{machine['card'] or 'CPU'}, {machine['threads']} threads, torch {machine['torch']}, {machine['dtype']}"
        + (f", {machine['quantized']} weights" if machine["quantized"] else "")
        + f"; measured ceilings: {most['gemm_tflops']:.4g} TFLOP/s of a large product, "
        + (f"{most['fp8_tflops']:.4g} TFLOP/s of one in fp8, " if most["fp8_tflops"] else "")
        + f"{most['copy_gb_per_second']:.4g} GB/s of a large copy. Medians (quartiles) of n.", "",
    ]  # fmt: skip
    head = [
        "form", "decoder", "K", "B", "L", "n", "tokens/s", "s", "CPU s", "time / parallel", "speed / joint",
        "speed / public", "ms a round", "of the roofline", "of GEMM", "of copy", "GiB", "set-up s", "captures",
    ]  # fmt: skip
    if decodes:
        lines += _table(head, [
            [
                row["form"], f"`{row['decoder']}`", str(row["tokens_per_step"] or ""), str(row["batch"]),
                str(row["new_tokens"]), str(row["n"]), _range(row, "tokens_per_second", ".1f"),
                _range(row, "seconds", ".3f"), _number(row["cpu_seconds"], ".2f"), _range(row, "over_parallel", ".2f"),
                _number(row["speed_over_joint"], ".2f"), _number(row["speed_over_public"], ".2f"),
                _number(row["ms_per_round"], ".2f"), _share(row["share_of_roofline"]), _share(row["share_of_gemm"]),
                _share(row["share_of_copy"]), _number(row["memory_gib"], ".1f"), _number(row["setup_seconds"], ".1f"),
                str(row["captures"]),
            ]
            for row in decodes
        ])  # fmt: skip
    if parts:
        head = ["form", "part", "K", "B", "L", "n", "ms", "TFLOP/s", "of the roofline", "of GEMM", "of copy"]
        lines += _table(head, [
            [
                row["form"], row["part"], str(row["tokens_per_step"]), str(row["batch"]), str(row["new_tokens"]),
                str(row["n"] or "difference"), _range(row, "seconds", ".3f", 1000), _number(row["tflops"]),
                _share(row["share_of_roofline"]), _share(row["share_of_gemm"]), _share(row["share_of_copy"]),
            ]
            for row in parts
        ])  # fmt: skip
    if out["left_out"]:
        lines += _table(["left out", "reason"], [[item["cell"], item["reason"]] for item in out["left_out"]])
    return "\n".join(lines)


def draw(rows: Sequence[Row]) -> Any:
    """Tokens/s of every decode (left) and time over parallel decoding's (right), bars by decoder, groups by K, B, L."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    decodes = [row for row in rows if row["part"] == "decode"]
    groups = list(dict.fromkeys(_group(row) for row in decodes))
    colours = {name: colormaps["tab20"](n % 20) for n, name in enumerate(dict.fromkeys(map(_label, decodes)))}
    figure = Figure(figsize=(15, 2 + 0.3 * max(len(decodes), 6)), layout="constrained")
    titles = {"tokens_per_second": "tokens/s", "over_parallel": "time / parallel, same form"}
    for axis, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        shown = [row for group in groups for row in decodes if _group(row) == group and row[column] is not None]
        low, high = ([_error(row, column, side) for row in shown] for side in ("low", "high"))
        axis.barh(
            range(len(shown)), [row[column] for row in shown], xerr=[low, high], error_kw={"lw": 0.8},
            color=[colours[_label(row)] for row in shown],
        )  # fmt: skip
        axis.set_yticks(range(len(shown)), [f"{_label(row)}, {_group(row)}" for row in shown], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(title)
        axis.grid(alpha=0.3, axis="x")
    return figure


def _label(row: Row) -> str:
    return f"{row['form']} {row['decoder']}"


def _group(row: Row) -> str:
    return f"K={row['tokens_per_step']} B={row['batch']} L={row['new_tokens']}"


def _error(row: Row, column: str, side: str) -> float:
    """Distance of a quartile from the median."""
    return float(abs(row[f"{column}_{side}"] - row[column]))
