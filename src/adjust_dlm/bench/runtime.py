"""`adjust bench runtime`: seconds of components and whole decodes, beside parallel decoding's and the ceilings."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.bases import load_base
from adjust_dlm.bases.base import pick_device
from adjust_dlm.bases.placement import check_placement, quantize_body
from adjust_dlm.bench.cells import COMPONENTS, FORMS, Cell, Form, card_plan, cpu_plan, grid
from adjust_dlm.bench.clock import Ceilings, ceilings, limit
from adjust_dlm.bench.measure import Bench, Row, component_cell, decode_cell
from adjust_dlm.bench.shapes import SHAPES, random_base, random_sampler
from adjust_dlm.bench.speed_tables import COLUMNS, draw, markdown, with_ratios
from adjust_dlm.decoders import DECODERS, read_variant
from adjust_dlm.eval.frontier import to_csv
from adjust_dlm.eval.generation import open_helpers
from adjust_dlm.eval.plots import check_plot, to_png
from adjust_dlm.files import write_whole
from adjust_dlm.provenance import cards
from adjust_dlm.sampler import SamplerConfig, default_sampler, read_config
from adjust_dlm.types import DecodeConfig, OrderRule, require

log = logging.getLogger(__name__)
CELLS = "cells.jsonl"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings of `adjust bench runtime`.

    Without decoders, K, B, lengths or forms a prepared plan runs, the most important cells first: one for a card, one
    for a CPU. Any of them given makes a grid, with the defaults below for the others.

    Attributes:
        base: name or folder of a base, or a shape with random weights: dream-7b-shape, llada-8b-shape, small-shape (the
            default model's), tiny-shape.
        sampler: folder or Hub id of g; the base's own by default, a random one where it has none. With a shape g is
            random, too, in the form of the sampler in that folder.
        partner: autoregressive model for decoders that ask one; the base's own by default.
        output: folder of cells.jsonl, runtime.csv, runtime.md and runtime.png; a run that was stopped goes on there.
        decoders: decoders with settings, such as "adjust:candidates=16,sparse=true", and "components"; by default
            parallel, adjust and joint.
        tokens_per_step: K; by default 4.
        batch_sizes: B; by default 1, 8 and 32 on a card, 1 on a CPU.
        new_tokens: L; by default 128 on a card, 64 on a CPU.
        forms: eager (reference decoders), fast (fixed buffers and CUDA graphs), compiled (fast, on compiled layers) and
            public (the released code's way of working); by default eager and fast.
        prompt_tokens: length of every prompt.
        temperature: 0 is argmax.
        top_p: nucleus mass.
        order: rule of the next position; the base's own by default. LLaDA's, confidence, draws a token for every row at
            T > 0 and so has no kernels; the public loop always takes entropy.
        suppress_eos: never end a text, so that every row is full; without it only tokens before the end count.
        seed: of every decode.
        runs: timed decodes of a cell at most, after a warm-up that does not count.
        seconds: for everything, loading included; cells that do not fit are listed as left out. By default 150 on a
            card, 300 on a CPU.
        cell_seconds: no timed decode of a cell begins later; with warm-up a cell has three times as long, a compiled
            one all that is left.
        layers: of a shape, instead of its own number; 0 keeps that.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8 or fp8 weights of linear layers, or fp8-dynamic, which multiplies in fp8, too.
        plot: draw runtime.png (needs matplotlib).
    """

    base: str = "smol"
    sampler: str | None = None
    partner: str | None = None
    output: str = "runs/runtime"
    decoders: tuple[str, ...] = ()
    tokens_per_step: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()
    forms: tuple[Form, ...] = ()
    prompt_tokens: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    order: OrderRule | None = None
    suppress_eos: bool = True
    seed: int = 0
    runs: int = 3
    seconds: float | None = None
    cell_seconds: float = 10.0
    layers: int = 0
    device: str = "auto"
    quantize: str | None = None
    plot: bool = True

    def __post_init__(self) -> None:
        """Checks what would otherwise be found out late."""
        for name in ("tokens_per_step", "batch_sizes", "new_tokens"):
            require(all(n >= 1 for n in getattr(self, name)), f"{name} is {getattr(self, name)}; all must be >= 1")
        for name in ("prompt_tokens", "runs"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("seconds", "cell_seconds"):
            value: float | None = getattr(self, name)
            require(value is None or value > 0, f"{name} is {value}; it must be above 0")
        unknown = [form for form in self.forms if form not in FORMS]
        require(not unknown, f"forms are {self.forms}; known are {', '.join(FORMS)}")
        for decoder in self.decoders:
            if decoder != COMPONENTS:
                read_variant(decoder)
        require(self.layers >= 0, f"layers is {self.layers}; it must be >= 0 (0 keeps the shape's own)")
        require(not self.layers or self.base in SHAPES, f"layers can be set for {', '.join(SHAPES)}, not {self.base!r}")
        check_placement(self.quantize, None)
        check_plot(self.plot)
        DecodeConfig(temperature=self.temperature, top_p=self.top_p, order=self.order)


def plan(config: RuntimeConfig, *, cuda: bool) -> list[Cell]:
    """The cells that the settings ask for, in their order.

    Raises:
        InputError: a grid without a cell, such as edlm in the fast form.
    """
    if not (config.decoders or config.tokens_per_step or config.batch_sizes or config.new_tokens or config.forms):
        return card_plan() if cuda else cpu_plan()
    decoders = config.decoders or ("parallel", "adjust", "joint")
    cells = grid(
        config.forms or ("eager", "fast"), decoders, config.tokens_per_step or (4,),
        config.batch_sizes or ((1, 8, 32) if cuda else (1,)), config.new_tokens or ((128,) if cuda else (64,)),
    )  # fmt: skip
    require(bool(cells), f"none of {', '.join(decoders)} has one of the forms {', '.join(config.forms)}")
    return cells


def make_runtime(config: RuntimeConfig, bench: Bench | None = None) -> Row:
    """Measures cell by cell; writes `cells.jsonl` as it goes, then `runtime.csv`, `.md` and `.png`.

    Returns:
        `rows` (see `speed_tables.COLUMNS`), `left_out` (cell and reason), `ceilings`, and facts of the machine.
    """
    started = time.monotonic()
    cuda = pick_device(config.device).type == "cuda"
    cells, seconds = plan(config, cuda=cuda), config.seconds or (150.0 if cuda else 300.0)
    bench = bench or open_bench(config, [cell.decoder for cell in cells])
    book = Book(Path(config.output), digest(config, bench), bench.most)
    left_out: list[Row] = []
    for cell in book.missing(cells):
        left = seconds - (time.monotonic() - started)
        most = left if cell.form == "compiled" else min(left, 3 * config.cell_seconds)  # the first ones compile
        try:
            with limit(most):
                rows = (component_cell if cell.decoder == COMPONENTS else decode_cell)(bench, cell)
        except (TimeoutError, RuntimeError, FloatingPointError) as error:
            if bench.clock.cuda:
                torch.cuda.synchronize()  # what was interrupted may still write into memory that is given on
            reason = _reason(error, left, most)
            left_out.append({"cell": cell.name, "reason": reason})
            log.warning("left out: %s: %s", cell.name, reason)
            continue
        book.add(cell, rows)
        log.info("%s", _told(cell, rows))
    out = {
        "rows": with_ratios(book.lines(cells)), "left_out": left_out,
        "ceilings": {
            "gemm_tflops": bench.most.flops / 1e12, "fp8_tflops": bench.most.fp8 and bench.most.fp8 / 1e12,
            "copy_gb_per_second": bench.most.bytes / 1e9,
        },
        "machine": machine(bench), "measuring_seconds": time.monotonic() - started,
    }  # fmt: skip
    _write(config, out)
    return out


def _reason(error: Exception, left: float, most: float) -> str:
    """Why a cell is left out; an alarm inside a compiler comes back as an error of the compiler's own."""
    if isinstance(error, TimeoutError):
        return "no time was left" if left <= 0 else f"took longer than {most:.0f} s"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _told(cell: Cell, rows: list[Row]) -> str:
    """A line while it runs."""
    if cell.decoder == COMPONENTS:
        parts = ", ".join(f"{row['part']} {1000 * row['seconds']:.2f}" for row in rows)
        return f"{cell.name}: ms: {parts}"
    (row,) = rows
    return f"{cell.name}: {row['tokens_per_second']:.1f} tokens/s, {row['seconds']:.3f} s, n={row['n']}"


def _write(config: RuntimeConfig, out: Row) -> None:
    folder = Path(config.output)
    files: dict[str, str | bytes] = {"runtime.csv": to_csv(out["rows"], COLUMNS), "runtime.md": markdown(out)}
    if config.plot:
        files["runtime.png"] = to_png(draw(out["rows"]))
    write_whole({folder / name: content for name, content in files.items()})


def machine(bench: Bench) -> Row:
    """What the numbers belong to."""
    base = bench.base
    card = cards()[base.device.index or 0] if base.device.type == "cuda" else None
    return {
        "device": str(base.device), "card": card, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "dtype": str(base.dtype).removeprefix("torch."), "quantized": base.quantized,
    }  # fmt: skip


def digest(config: RuntimeConfig, bench: Bench) -> str:
    """Of all that a kept cell must agree in with this run: model, machine and settings, but not what is asked for."""
    asked = {"decoders", "tokens_per_step", "batch_sizes", "new_tokens", "forms", "seconds", "output", "plot"}
    facts = {name: value for name, value in asdict(config).items() if name not in asked}
    g = None if bench.sampler is None else asdict(bench.sampler.config)
    text = json.dumps([facts, bench.base.fingerprint, g, machine(bench)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Models --------------------------------------------------------------------------------------------------------


def open_bench(config: RuntimeConfig, decoders: list[str]) -> Bench:
    """Base, g and partner on their device, and its ceilings."""
    device = pick_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    asked = [decoder for decoder in decoders if decoder != COMPONENTS]
    helpers: dict[str, Any] = {}
    if config.base in SHAPES:
        layers = {"num_hidden_layers": config.layers} if config.layers else {}
        base: Any = random_base(config.base, device=device, dtype=dtype, **layers)
        form = SamplerConfig(**read_config(Path(config.sampler))["config"]) if config.sampler else None
        helpers["sampler"] = random_sampler(base, form)
        quantize_body(base, config.quantize)  # type: ignore[arg-type]
    else:
        base = load_base(config.base, device=device, quantize=config.quantize)
        if config.sampler is None and default_sampler(config.base) is None:
            log.warning("no sampler ships for base %r: a random g is timed, which costs the same", config.base)
            helpers["sampler"] = random_sampler(base)
    asked += [] if helpers else ["adjust"]  # components want g, too
    without = [a for a in asked if not (helpers and DECODERS[read_variant(a).name].needs_sampler)]
    helpers |= open_helpers(config, base, without)
    start = base.spec.bos_id or 0
    settings = DecodeConfig(
        temperature=config.temperature,
        top_p=config.top_p,
        order=config.order,
        suppress_eos=config.suppress_eos,
        seed=config.seed,
    )
    return Bench(
        base, helpers, settings, [start] * config.prompt_tokens, config.runs, config.cell_seconds,
        ceilings(base.device, base.dtype, fp8=base.quantized == "fp8-dynamic"),
    )  # fmt: skip


# Results as they come ------------------------------------------------------------------------------------------


@dataclass
class Book:
    """Finished cells on disk, one line each, in the order in which they were finished.

    Attributes:
        folder: where.
        digest: cells with another one are of another model, machine or setting: they stay in the file and do not count.
        most: this run's ceilings.
        run: names this run: a ratio is only formed within one.
    """

    folder: Path
    digest: str
    most: Ceilings
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    now: Callable[[], float] = time.time

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / CELLS

    def entries(self) -> list[Row]:
        """All cells of this digest; the torn last line of a run that was killed is dropped."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["digest"] == self.digest:
                found.append(entry)
        return found

    def missing(self, cells: list[Cell]) -> list[Cell]:
        """What is still to be done; with the yardsticks of an earlier run once more, since ratios need this one's."""
        known = {json.dumps(entry["cell"], sort_keys=True) for entry in self.entries()}
        wanted = [cell for cell in cells if json.dumps(cell.facts, sort_keys=True) not in known]
        again = {cell.yardstick for cell in wanted} & set(cells)
        return [cell for cell in cells if cell in wanted or cell in again]

    def add(self, cell: Cell, rows: list[Row]) -> None:
        """Appends a finished cell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size
        entry = {
            "digest": self.digest, "run": self.run, "time": self.now(), "ceilings": asdict(self.most),
            "cell": cell.facts, "rows": rows,
        }  # fmt: skip
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(entry) + "\n")

    def lines(self, cells: list[Cell]) -> list[Row]:
        """Rows of the cells that were asked for, in their order; of each cell those of every run that measured it."""
        place = {cell: n for n, cell in enumerate(cells)}
        found = [(place.get(Cell(**entry["cell"])), entry) for entry in self.entries()]
        asked = sorted((n, entry["time"], entry) for n, entry in found if n is not None)
        return [{"run": entry["run"], **entry["cell"], **row} for _, _, entry in asked for row in entry["rows"]]
