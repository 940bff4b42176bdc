"""`adjust bench runtime`: seconds of components and whole decodes, beside parallel decoding's and the ceilings."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.bases import load_base
from adjust_dlm.bases.base import pick_device
from adjust_dlm.bases.placement import quantize_body
from adjust_dlm.bench.clock import ceilings, limit
from adjust_dlm.bench.measure import Bench, Row, component_cell, decode_cell, grid
from adjust_dlm.bench.settings import COMPONENTS, RuntimeConfig
from adjust_dlm.bench.shapes import SHAPES, random_base, random_sampler
from adjust_dlm.bench.speed_tables import markdown, with_ratios
from adjust_dlm.bench.waits import wait_cell
from adjust_dlm.eval.generation import open_helpers
from adjust_dlm.eval.plots import csv_text
from adjust_dlm.files import write_whole
from adjust_dlm.provenance import cards
from adjust_dlm.sampler import default_sampler, read_config
from adjust_dlm.types import DecodeConfig, SamplerConfig, require

log = logging.getLogger(__name__)


def make_runtime(config: RuntimeConfig, bench: Bench | None = None) -> Row:
    """Measures cell by cell; writes `runtime.csv` and `runtime.md` after each.

    Returns:
        `rows` (a dictionary each), `left_out` (cell and reason), `ceilings`, and facts of the machine.

    Raises:
        InputError: settings without a cell, such as edlm in the fast form.
    """
    started = time.monotonic()
    cuda = pick_device(config.device).type == "cuda"
    batches, lengths = config.batch_sizes or ((8, 32, 1) if cuda else (1,)), config.new_tokens or (128 if cuda else 64,)
    cells = grid(config.forms, config.decoders, config.tokens_per_step, batches, lengths)
    require(bool(cells), f"none of {', '.join(config.decoders)} has one of the forms {', '.join(config.forms)}")
    bench = bench or open_bench(config)
    base, most, rows = bench.base, bench.most, list[Row]()
    able = base.spec.block is None or set(config.forms) <= {"eager", "fast"}
    require(able, f"forms are {config.forms}; a base with blocks has eager and fast alone")
    out: Row = {
        "rows": [], "left_out": [],
        "ceilings": {
            "gemm_tflops": most.flops / 1e12, "fp8_tflops": most.fp8 and most.fp8 / 1e12,
            "copy_gb_per_second": most.bytes / 1e9,
        },
        "machine": {
            "device": str(base.device), "card": cards()[base.device.index or 0] if cuda else None,
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "dtype": str(base.dtype).removeprefix("torch."), "quantized": base.quantized,
        },
    }  # fmt: skip
    for cell in cells:
        left = config.seconds - (time.monotonic() - started)
        longest = left if cell.form == "compiled" else min(left, 3 * config.cell_seconds)  # the first ones compile
        waits = bench.tokens_per_wait and cell.form != "eager" and cell.decoder.startswith("verified")
        kind = component_cell if cell.decoder == COMPONENTS else wait_cell if waits else decode_cell
        try:
            with limit(longest):
                made = kind(bench, cell)
        except (TimeoutError, RuntimeError, FloatingPointError) as error:
            if bench.clock.cuda:
                torch.cuda.synchronize()  # what was interrupted may still write into memory that is given on
            reason = _reason(error, left, longest)
            out["left_out"].append({"cell": cell.name, "reason": reason})
            log.warning("left out: %s: %s", cell.name, reason)
        else:
            rows += [cell._asdict() | row for row in made]
            log.info("%s: %s", cell.name, ", ".join(f"{row['part']} {1000 * row['seconds']:.2f} ms" for row in made))
        out["rows"] = with_ratios(rows)
        columns = list(dict.fromkeys(name for row in out["rows"] for name in row))
        files = {"runtime.csv": csv_text(out["rows"], columns), "runtime.md": markdown(out)}
        write_whole({Path(config.output) / name: text for name, text in files.items()})
    return out


def _reason(error: Exception, left: float, most: float) -> str:
    """Why a cell is left out; an alarm inside a compiler comes back as an error of the compiler's own."""
    if isinstance(error, TimeoutError):
        return "no time was left" if left <= 0 else f"took longer than {most:.0f} s"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def open_bench(config: RuntimeConfig) -> Bench:
    """Base, g and partner on their device, and its ceilings."""
    device, sampler = pick_device(config.device), None
    if config.base in SHAPES:
        layers = {"num_hidden_layers": config.layers} if config.layers else {}
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        base: Any = random_base(config.base, device=device, dtype=dtype, block=config.block, **layers)
        form = SamplerConfig(**read_config(Path(config.sampler))["config"]) if config.sampler else None
        sampler = random_sampler(base, form)
        quantize_body(base, config.quantize)
    else:
        base = load_base(config.base, device=device, quantize=config.quantize)
        if config.sampler is None and default_sampler(config.base) is None:
            log.warning("no sampler ships for base %r: a random g is timed, which costs the same", config.base)
            sampler = random_sampler(base)
    asked = [decoder for decoder in config.decoders if decoder != COMPONENTS]
    helpers = open_helpers(config, base, [*asked, "adjust"], sampler=sampler)  # components want g, too
    settings = DecodeConfig.from_settings(config, tokens_per_step=1)
    most = ceilings(base.device, base.dtype, fp8=base.quantized == "fp8-dynamic")
    prompt = [base.spec.bos_id or 0] * config.prompt_tokens
    return Bench(base, helpers, settings, prompt, config.runs, config.cell_seconds, most, config.tokens_per_wait)
