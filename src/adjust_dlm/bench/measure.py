"""Cells of `adjust bench runtime`: whole decodes and components, with warm-up, spread, shares of ceilings."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from adjust_dlm.bases import Base, cut_at_end
from adjust_dlm.bases.layers import join_projections
from adjust_dlm.bench.clock import Ceilings, Clock, forget_peak, peak_gib, spread
from adjust_dlm.bench.public_loop import public_loop
from adjust_dlm.bench.settings import COMPONENTS, Form
from adjust_dlm.bench.work import Work, base_work, decode_work, head_work, public_work, sampler_work
from adjust_dlm.decoders import Canvas, decode
from adjust_dlm.decoders.fast.blocks import Waiting, pass_over, step
from adjust_dlm.decoders.fast.engine import COVERED, captures
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.pick import pick
from adjust_dlm.decoders.fast.work import length_bucket, slot_bucket, width_bucket
from adjust_dlm.decoders.machinery.cache import with_cache, with_sampler_cache
from adjust_dlm.decoders.machinery.pick import pick as pick_open
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import CERTAINTY, GIVEN, DecodeConfig
from adjust_dlm.variants import DECODERS, read_variant

Row = dict[str, Any]
_SETTLED = 3  # decodes of a fast form that may capture something before one is timed whatever it does


class Cell(NamedTuple):
    """One thing to time.

    Attributes:
        form: eager (the reference decoders), fast (`decoders/fast`), compiled (fast, on compiled layers) or public
            (`bench/public_loop.py`).
        decoder: a decoder with its settings (see `read_variant`), or `components`.
        tokens_per_step: K; None where the decoder has none.
        batch: B.
        new_tokens: masked positions behind the prompt.
    """

    form: Form
    decoder: str
    tokens_per_step: int | None
    batch: int
    new_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        k = f" K={self.tokens_per_step}" if self.tokens_per_step else ""
        return f"{self.form} {self.decoder}{k} B={self.batch} L={self.new_tokens}"


def cell_of(form: Form, decoder: str, k: int, batch: int, new_tokens: int) -> Cell:
    """A cell whose K is the decoder's own where it has one: joint is K = 1, a variant may name its K."""
    if decoder == COMPONENTS:
        return Cell(form, decoder, k, batch, new_tokens)
    name, settings, _ = read_variant(decoder)
    own = settings.get("tokens_per_step", k) if DECODERS[name].takes_k else None
    return Cell(form, decoder, 1 if name == "joint" else own, batch, new_tokens)


def has_form(decoder: str, form: Form) -> bool:
    """The public loop knows plain parallel and adjust; the fast form what `fast.COVERED` says."""
    if form == "public":
        return decoder in ("parallel", "adjust")
    return form == "eager" or decoder == COMPONENTS or read_variant(decoder).name in COVERED


def grid(
    forms: Sequence[Form], decoders: Sequence[str], ks: Sequence[int], batches: Sequence[int], lengths: Sequence[int]
) -> list[Cell]:
    """All combinations that exist, once each; parallel decoding before what is compared with it.

    Compiled forms come last: each change between compiled and not throws captured graphs away.
    """
    ordered = sorted(decoders, key=lambda decoder: decoder != "parallel")
    made = [
        cell_of(form, decoder, k, batch, length)
        for form, length, batch, k in itertools.product(forms, lengths, batches, ks)
        for decoder in ordered
        if has_form(decoder, form)
    ]
    return sorted(dict.fromkeys(made), key=lambda cell: cell.form == "compiled")


@dataclass
class Bench:
    """What all cells share.

    Attributes:
        base, helpers: the models; `helpers` are `sampler` and `partner` of `decode`.
        settings: temperature and the like.
        prompt: token ids in front of every canvas.
        runs: decodes of a cell at most.
        seconds: a cell's timed decodes begin only before that much time.
        most: the device's ceilings.
        tokens_per_wait: what a row of `verified` is assumed to commit a round; None: its decodes are timed.
        clock: of the device.
    """

    base: Base
    helpers: dict[str, Any]
    settings: DecodeConfig
    prompt: list[int]
    runs: int
    seconds: float
    most: Ceilings
    tokens_per_wait: float | None = None
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.base.device)

    @property
    def sampler(self) -> Sampler | None:
        """g."""
        return self.helpers.get("sampler")

    def config(self, cell: Cell) -> DecodeConfig:
        """All settings of a cell; the decoder's own win."""
        shared = self.settings.but(tokens_per_step=cell.tokens_per_step or 1, max_new_tokens=cell.new_tokens)
        return shared.but(**read_variant(cell.decoder).settings) if ":" in cell.decoder else shared

    def use(self, form: str) -> None:
        """Compiled layers or not, of base and g; nothing is captured any more, so that what a cell takes is its own."""
        compiled = form == "compiled"
        self.base.workspace, self.base.compiled = None, compiled
        if self.sampler is not None:
            for layer in self.sampler.layers:
                layer.compiled = compiled


def shares(parts: Sequence[Work] | None, seconds: float, most: Ceilings) -> Row:
    """Least possible seconds over real ones: those of arithmetic, of traffic, and of the slower one of each part."""
    if parts is None:
        return dict.fromkeys(("tflops", "share_of_gemm", "share_of_copy", "share_of_roofline"))
    flops, traffic = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    return {
        "tflops": flops / seconds / 1e12,
        "share_of_gemm": sum(part.arithmetic(most) for part in parts) / seconds,
        "share_of_copy": traffic / seconds / most.bytes,
        "share_of_roofline": sum(part.floor(most) for part in parts) / seconds,
    }  # fmt: skip


def require_graphs(graphs: Graphs | None, clock: Clock) -> None:
    """Raises RuntimeError on a card where nothing is captured (any more): that would be another form's time."""
    if clock.cuda and not (graphs and graphs.works):
        raise RuntimeError("nothing is captured (see the log)")


# Whole decodes -------------------------------------------------------------------------------------------------


def decode_cell(bench: Bench, cell: Cell) -> list[Row]:
    """A whole decode: seconds, tokens/s, passes, shares; captures and compiling are told apart, never counted.

    Raises:
        TimeoutError: the alarm of a limit went off before one decode was timed.
    """
    bench.use(cell.form)
    forget_peak(bench.base.device)
    made, captured, config = Row(), cell.form in ("fast", "compiled"), bench.config(cell)
    warm, samples, host = list[float](), list[float](), list[float]()
    try:
        if not captured:
            warm.append(bench.clock(lambda: run(bench, cell, *_short(bench, config))))
        while len(samples) < bench.runs and (not samples or sum(samples) + samples[-1] <= bench.seconds):
            known, busy = captures(bench.base), time.process_time()
            seconds = bench.clock(lambda: made.update(run(bench, cell, config, bench.prompt)))
            settled = captures(bench.base) == known or len(warm) >= _SETTLED
            (samples if warm and settled else warm).append(seconds)
            host.append(time.process_time() - busy)
            if captured:
                require_graphs(bench.base.workspace and bench.base.workspace.graphs, bench.clock)
    except TimeoutError:
        if not samples:
            raise
    found = spread(samples)
    median = found["seconds"]
    return [{
        "part": "decode", **found, "cpu_seconds": spread(host[-len(samples) :])["seconds"], **made,
        "tokens_per_second": made["tokens"] / median, "ms_per_round": 1000 * median / made["rounds"],
        "captures": captures(bench.base),
        "setup_seconds": max(0.0, sum(warm) - len(warm) * median) if captured else None,
        **shares(_parts(bench, cell), median, bench.most), "memory_gib": peak_gib(bench.base.device),
        **_behind(bench, cell, median, made["tokens"]),
    }]  # fmt: skip


@torch.no_grad()
def _behind(bench: Bench, cell: Cell, seconds: float, tokens: int) -> Row:
    """Of the fast form on a block base: how long the prompts' own passes take, and tokens/s without them."""
    size, name = bench.base.spec.block, read_variant(cell.decoder).name
    if size is None or cell.form != "fast" or len(bench.prompt) < size:
        return {}
    g: Sampler | None = bench.helpers["sampler"] if name in ("adjust", "verified") else None
    base, rows = bench.base if g is None else g.on(bench.base), list(range(cell.batch))
    bench.base.workspace = None  # or the buffers of the decode would stand beside those made here
    try:
        canvas = Canvas(base, [bench.prompt] * cell.batch, bench.config(cell))
        lane, _ = lane_of(base, g, canvas)
        read = bench.clock.samples(
            lambda: Waiting(base, g, canvas, rows).load(lane, rows), runs=bench.runs, seconds=bench.seconds, warm=1
        )
        prefill = spread(read)["seconds"]
    except (TimeoutError, torch.OutOfMemoryError):
        return {}
    return {"prefill_seconds": prefill, "tokens_per_second_behind": tokens / (seconds - prefill)}


def run(bench: Bench, cell: Cell, config: DecodeConfig, prompt: list[int]) -> Row:
    """Decodes once: new tokens before each row's first end token, which count as throughput, and passes."""
    base, prompts = bench.base, [prompt] * cell.batch
    if cell.form == "public":
        g = bench.sampler if cell.decoder == "adjust" else None
        tokens_BL = public_loop(base, g, prompts, config)
        rounds, steps = -(-config.max_new_tokens // config.tokens_per_step), config.max_new_tokens if g else 0
    else:
        variant, eager = read_variant(cell.decoder), cell.form == "eager"
        how = {**bench.helpers, **variant.options, "decoder": variant.name, "eager": eager}
        result = decode(base, prompts, config, **how)
        tokens_BL, rounds, steps = result.tokens_BL, int(result.rounds_B.max()), int(result.sampler_calls_B.max())
    new = tokens_BL[:, -config.max_new_tokens :].tolist()
    tokens = sum(len(cut_at_end(row, base.spec.end_ids)) for row in new)
    return {"tokens": tokens, "rounds": rounds, "sampler_passes": steps}


def _short(bench: Bench, config: DecodeConfig) -> tuple[DecodeConfig, list[int]]:
    """Two rounds at the end of a canvas of the same length: enough to warm up what captures nothing."""
    new = min(config.max_new_tokens, 2 * config.tokens_per_step)
    filler = (bench.prompt or [0])[-1:] * (config.max_new_tokens - new)
    return config.but(max_new_tokens=new), [*bench.prompt, *filler]


def _parts(bench: Bench, cell: Cell) -> list[Work] | None:
    """The arithmetic of a decode in which no text ends early; None where texts may."""
    base, config, size = bench.base, bench.config(cell), (cell.batch, len(bench.prompt))
    if (base.spec.end_ids and not bench.settings.suppress_eos) or not hasattr(base, "model"):
        return None
    if cell.form == "public":
        return public_work(base, bench.sampler if cell.decoder == "adjust" else None, config, *size)
    return decode_work(base, bench.sampler, read_variant(cell.decoder), config, *size)


# Components ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def component_cell(bench: Bench, cell: Cell) -> list[Row]:
    """Base pass, step of g, head, head with scores and draw, and a whole round, on canvases that are half filled."""
    bench.use(cell.form)
    forget_peak(bench.base.device)
    canvas = half_filled(bench, cell)
    made = eager_parts(bench, canvas) if cell.form == "eager" else fast_parts(bench, canvas)
    rows = []
    for name, (part, work) in made.items():
        seconds = bench.clock.samples(part, runs=max(bench.runs, 5), seconds=bench.seconds / len(made))
        found = spread(seconds)
        facts = {"part": name, **found, **shares(work, found["seconds"], bench.most)}
        rows.append(facts | {"memory_gib": peak_gib(bench.base.device)})
    return rows


Parts = dict[str, tuple[Callable[[], Any], list[Work]]]


def half_filled(bench: Bench, cell: Cell) -> Canvas:
    """Every second new position holds a given token, which ends no text: the mean of a decode.

    On a block base so it is in the block in the middle, behind which all is open; of causal ones half is there.
    """
    canvas = Canvas(bench.base, [bench.prompt] * cell.batch, bench.config(cell))
    first, size, token = len(bench.prompt), bench.base.spec.block, bench.prompt[-1]
    parts = [slice(first, None, 2)]
    if size is not None:
        middle = max(first, (first + cell.new_tokens // 2) // size * size)
        edge = (middle // size + 1) * size
        parts = [slice(first, middle), *([] if bench.base.spec.causal else [slice(middle + 1, edge, 2)])]
    for given in parts:
        canvas.tokens_BL[:, given], canvas.masked_BL[:, given], canvas.order_BL[:, given] = token, False, GIVEN
    return canvas


def _work(base: Base, g: Sampler, canvas: Canvas, length: int, scored: int) -> dict[str, list[Work]]:
    rows, k, looks = len(canvas.rows_B), canvas.config.tokens_per_step, canvas.rule in CERTAINTY
    f, step = base_work(base, rows, length), sampler_work(base, g, rows, 1 if g.causal else length)
    heads = [head_work(base, rows * (scored - j if looks else 1)) for j in range(k)]
    return {
        "base pass": [f], "g step": [step], "head, scores and draw": heads[:1], "round": [f, *heads, *[step] * (k - 1)],
        "head": [head_work(base, rows * scored)], "head, all rows": [head_work(base, rows * length)],
    }  # fmt: skip


def eager_parts(bench: Bench, canvas: Canvas) -> Parts:
    """The reference's parts, the head on all rows beside them."""
    g: Sampler = with_sampler_cache(bench.helpers["sampler"])
    base = with_cache(g.on(bench.base), canvas.config)
    names = ("tokens_BL", "masked_BL", "order_BL", "commits_B")
    kept = {name: getattr(canvas, name).clone() for name in names}
    h_BLD = base.hidden(canvas)
    canvas.start_round()
    at = canvas.open_BL.nonzero(as_tuple=True)

    def whole() -> None:
        for name, value in kept.items():
            getattr(canvas, name).copy_(value)
        now_BLD = base.hidden(canvas)
        for n in canvas.round():
            now_BLD = g(now_BLD, canvas) if n else now_BLD
            canvas.commit(pick_open(base, now_BLD, canvas))

    parts: dict[str, Callable[[], Any]] = {
        "base pass": lambda: base.hidden(canvas), "head": lambda: base.head(h_BLD[at]),
        "head, scores and draw": lambda: pick_open(base, h_BLD, canvas), "g step": lambda: g(h_BLD, canvas),
        "head, all rows": lambda: base.head(h_BLD.flatten(0, 1)), "round": whole,
    }  # fmt: skip
    rows, length = canvas.tokens_BL.shape
    length = base.spec.block or length  # columns of a pass, whose attention to the blocks before is not counted
    work = _work(base, g, canvas, length, len(at[0]) // rows)
    return {name: (part, work[name]) for name, part in parts.items()}


def lane_of(base: Base, g: Sampler | None, canvas: Canvas) -> tuple[Lane, Callable[[], None]]:
    """The buffers that the fast form would take, with the canvas in them, and what puts its tokens back there."""
    rows, length = canvas.tokens_BL.shape
    slots, columns = slot_bucket(rows), length_bucket(length, rows, base.spec.context)
    lane = Lane(base, slots, columns, padded=(slots, columns) != (rows, length), config=canvas.config)
    lane.start(canvas.config)
    if g is not None and base.spec.block is not None:
        lane.need_keys(g)
    Waiting(base, g, canvas, list(range(rows))).load(lane, list(range(rows)))
    kept = [(part, part.clone()) for part in (lane.tokens_BL, lane.masked_BL, lane.order_BL, lane.commits_B)]
    if base.device.type == "cuda":  # as the fast form does
        for part in (base.model, *(() if g is None else (g,))):  # type: ignore[attr-defined]
            join_projections(part)

    def restore() -> None:
        for part, value in kept:
            part.copy_(value)

    return lane, restore


def fast_parts(bench: Bench, canvas: Canvas) -> Parts:
    """Parts of the fast form: the functions that it captures, on the buffers that it would take."""
    g: Sampler = bench.helpers["sampler"]
    base, config, length = g.on(bench.base), canvas.config, canvas.tokens_BL.shape[1]
    scored, size = int(canvas.masked_BL[0].sum()), base.spec.block or 0
    (lane, restore), graphs = lane_of(base, g, canvas), Graphs(base.device)
    width = width_bucket(scored, lane.tokens_BL.shape[1])
    lane.begin_round()
    functions: dict[str, Callable[[], Any]] = {
        "begin": lane.begin_round,
        "base pass": lambda: pass_over(base, lane, lane.memory, size) if size else lane.h_BLD.copy_(base.hidden(lane)),  # type: ignore[arg-type]
        "g step": lambda: step(g, lane, 1 if g.causal else size) if size else lane.h_BLD.copy_(g(lane.h_BLD, lane)),
        "head": lambda: base.head(lane.h_BLD[:, -width:, : base.width].flatten(0, 1)),
        "head, scores and draw": lambda: pick(base, lane, width, 1),
    }  # fmt: skip

    def replay(*names: str) -> None:
        for name in names:
            graphs.run(name, functions[name], lane.buffers)

    def whole() -> None:
        restore()
        replay("begin", "base pass", "head, scores and draw")
        replay(*("g step", "head, scores and draw") * (config.tokens_per_step - 1))

    work = _work(base, g, canvas, size or length, scored)
    parts = {name: (functools.partial(replay, name), work[name]) for name in functions if name != "begin"}
    whole()  # captures
    require_graphs(graphs, bench.clock)
    return {**parts, "round": (whole, work["round"])}
