"""Rows of `adjust bench runtime`: ratios, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from adjust_dlm.bench.tables import pipes

Row = dict[str, Any]
# Heading, column, how a value is shown, and what it is multiplied by.
Columns = Sequence[tuple[str, str, str, float]]
CELL: Columns = (
    ("K", "tokens_per_step", "{:.0f}", 1), ("B", "batch", "{:.0f}", 1), ("L", "new_tokens", "{:.0f}", 1),
    ("n", "n", "{:.0f}", 1),
)  # fmt: skip
SHARES: Columns = (
    ("of the roofline", "share_of_roofline", "{:.0f} %", 100), ("of GEMM", "share_of_gemm", "{:.0f} %", 100),
    ("of copy", "share_of_copy", "{:.0f} %", 100),
)  # fmt: skip
DECODES: Columns = (
    *CELL, ("tokens/s", "tokens_per_second", "{:.1f}", 1), ("s", "seconds", "{:.3f}", 1),
    ("CPU s", "cpu_seconds", "{:.2f}", 1), ("time / parallel", "over_parallel", "{:.2f}", 1),
    ("speed / joint", "speed_over_joint", "{:.2f}", 1), ("speed / public", "speed_over_public", "{:.2f}", 1),
    ("ms a round", "ms_per_round", "{:.2f}", 1), *SHARES, ("GiB", "memory_gib", "{:.1f}", 1),
    ("set-up s", "setup_seconds", "{:.1f}", 1), ("captures", "captures", "{:.0f}", 1),
    ("prompts s", "prefill_seconds", "{:.4f}", 1), ("tokens/s behind them", "tokens_per_second_behind", "{:.1f}", 1),
)  # fmt: skip
PARTS: Columns = (*CELL, ("ms", "seconds", "{:.3f}", 1000), ("TFLOP/s", "tflops", "{:.4g}", 1), *SHARES)
WAITS: Columns = (
    *CELL, ("ms a wait", "seconds", "{:.3f}", 1000), ("assumed tokens a wait", "assumed_tokens_per_wait", "{:g}", 1),
    ("tokens/s if so", "assumed_tokens_per_second", "{:.1f}", 1), ("GiB", "memory_gib", "{:.1f}", 1),
)  # fmt: skip


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Adds what compares decodes.

    `over_parallel`: seconds over those of plain parallel decoding at the same form, K, B and L, with the widest range
    of the quartiles; `speed_over_joint`: tokens/s over joint decoding's at the same form, B and L;
    `speed_over_public`: over the public loop's at the same K, B and L, parallel's for parallel and ADJUST's for others.
    """
    rows = [dict(row) for row in rows]

    def place(row: Row, **changes: Any) -> tuple[Any, ...]:
        names = ("form", "decoder", "tokens_per_step", "batch", "new_tokens")
        return tuple(changes.get(name, row[name]) for name in names)

    decodes = {place(row): row for row in rows if row["part"] == "decode"}
    for row in decodes.values():
        if other := decodes.get(place(row, decoder="parallel")):
            row["over_parallel"] = row["seconds"] / other["seconds"]
            row["over_parallel_low"] = row["seconds_low"] / other["seconds_high"]
            row["over_parallel_high"] = row["seconds_high"] / other["seconds_low"]
        if other := decodes.get(place(row, decoder="joint", tokens_per_step=1)):
            row["speed_over_joint"] = row["tokens_per_second"] / other["tokens_per_second"]
        public = "parallel" if row["decoder"].partition(":")[0] == "parallel" else "adjust"
        if other := decodes.get(place(row, form="public", decoder=public)):
            row["speed_over_public"] = row["tokens_per_second"] / other["tokens_per_second"]
    return rows


def markdown(out: Row) -> str:
    """Decodes, waits, components, what was left out, and what they were measured on."""
    most, machine = out["ceilings"], out["machine"]
    text = (
        f"{machine['card'] or 'CPU'}, {machine['threads']} threads, torch {machine['torch']}, {machine['dtype']}"
        + (f", {machine['quantized']} weights" if machine["quantized"] else "")
        + f"; measured ceilings: {most['gemm_tflops']:.4g} TFLOP/s of a large product, "
        + (f"{most['fp8_tflops']:.4g} TFLOP/s of one in fp8, " if most["fp8_tflops"] else "")
        + f"{most['copy_gb_per_second']:.4g} GB/s of a large copy. Medians (quartiles) of n.\n"
    )
    for kind, name, columns in (("decode", "decoder", DECODES), ("wait", "decoder", WAITS), ("", "part", PARTS)):
        shown = [row for row in out["rows"] if row["part"] == kind or not (kind or row["part"] in ("decode", "wait"))]
        lines = [[row["form"], f"`{row[name]}`", *(_shown(row, *column[1:]) for column in columns)] for row in shown]
        text += "\n" + pipes(["form", name, *(head for head, *_ in columns)], lines) if lines else ""
    left = [(item["cell"], item["reason"]) for item in out["left_out"]]
    return text + ("\n" + pipes(("left out", "reason"), left) if left else "")


def _shown(row: Row, column: str, form: str, factor: float) -> str:
    """A value, with its quartiles where it has some."""
    value, low, high = (row.get(f"{column}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ""
    said = form.format(factor * value)
    return (
        f"{said} ({form.format(factor * low)}-{form.format(factor * high)})" if low and high and row["n"] > 1 else said
    )
