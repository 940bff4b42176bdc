"""One cell of `adjust bench runtime`: a whole decode or its components, with warm-up, spread, shares of ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base, cut_at_end
from adjust_dlm.bases.layers import join_projections
from adjust_dlm.bench.cells import Cell
from adjust_dlm.bench.clock import Ceilings, Clock, Spread, forget_peak, peak_gib
from adjust_dlm.bench.public_loop import public_loop
from adjust_dlm.bench.work import (
    Work,
    base_work,
    decode_work,
    floor_seconds,
    head_work,
    public_work,
    sampler_work,
)
from adjust_dlm.decoders import Canvas, decode, read_variant
from adjust_dlm.decoders.fast.engine import captures
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.pick import pick
from adjust_dlm.decoders.fast.work import length_bucket, slot_bucket, width_bucket
from adjust_dlm.decoders.machinery.canvas import Picks
from adjust_dlm.decoders.machinery.pick import pick as pick_open
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import GIVEN, DecodeConfig

Row = dict[str, Any]
_SETTLED = 3  # decodes of a fast form that may capture something before one is timed whatever it does


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
        clock: of the device.
    """

    base: Base
    helpers: dict[str, Any]
    settings: DecodeConfig
    prompt: list[int]
    runs: int
    seconds: float
    most: Ceilings
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.base.device)

    @property
    def sampler(self) -> Sampler | None:
        """g."""
        return self.helpers.get("sampler")

    @property
    def seen(self) -> Base:
        """The base, giving the features that g wants."""
        return self.base if self.sampler is None else self.sampler.on(self.base)

    def config(self, cell: Cell) -> DecodeConfig:
        """All settings of a cell; the decoder's own win."""
        shared = self.settings.but(tokens_per_step=max(cell.tokens_per_step, 1), max_new_tokens=cell.new_tokens)
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
        return {"tflops": None, "share_of_gemm": None, "share_of_copy": None, "share_of_roofline": None}
    flops, traffic = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    return {
        "tflops": flops / seconds / 1e12,
        "share_of_gemm": sum(part.arithmetic(most) for part in parts) / seconds,
        "share_of_copy": traffic / seconds / most.bytes, "share_of_roofline": floor_seconds(parts, most) / seconds,
    }  # fmt: skip


def require_graphs(graphs: Graphs | None, clock: Clock) -> None:
    """Raises RuntimeError on a card where nothing is captured (any more): that would be another form's time."""
    if clock.cuda and not (graphs and graphs.works):
        raise RuntimeError("nothing is captured (see the log)")


def text_tokens(tokens_BN: Tensor, end_ids: Sequence[int]) -> int:
    """New tokens before each row's first end token: what counts as throughput."""
    return sum(len(cut_at_end(row, end_ids)) for row in tokens_BN.tolist())


# Whole decodes -------------------------------------------------------------------------------------------------


def decode_cell(bench: Bench, cell: Cell) -> list[Row]:
    """A whole decode: seconds, tokens/s, passes, shares; captures and compiling are told apart, never counted.

    Raises:
        TimeoutError: the alarm of a limit went off before one decode was timed.
    """
    bench.use(cell.form)
    forget_peak(bench.base.device)
    run = _public(bench, cell) if cell.form == "public" else _decoder(bench, cell)
    made, captured = Row(), cell.form in ("fast", "compiled")
    warm, samples, host = list[float](), list[float](), list[float]()
    try:
        if not captured:
            warm.append(bench.clock(lambda: run(*_short(bench, cell))))
        while len(samples) < bench.runs and (not samples or sum(samples) + samples[-1] <= bench.seconds):
            known, busy = captures(bench.base), time.process_time()
            seconds = bench.clock(lambda: made.update(run(bench.config(cell), bench.prompt)))
            settled = captures(bench.base) == known or len(warm) >= _SETTLED
            (samples if warm and settled else warm).append(seconds)
            host.append(time.process_time() - busy)
            if captured:
                require_graphs(bench.base.workspace and bench.base.workspace.graphs, bench.clock)
    except TimeoutError:
        if not samples:
            raise
    spread = Spread.of(samples)
    parts = _parts(bench, cell)
    return [{
        "part": "decode", **_spread(spread), "cpu_seconds": Spread.of(host[-len(samples) :]).median,
        "tokens": made["tokens"],
        "tokens_per_second": made["tokens"] / spread.median,
        "tokens_per_second_low": made["tokens"] / spread.high, "tokens_per_second_high": made["tokens"] / spread.low,
        "ms_per_round": 1000 * spread.median / made["rounds"], "rounds": made["rounds"],
        "sampler_passes": made["sampler_passes"],
        "captures": captures(bench.base),
        "setup_seconds": max(0.0, sum(warm) - len(warm) * spread.median) if captured else None,
        **shares(parts, spread.median, bench.most), "memory_gib": peak_gib(bench.base.device),
    }]  # fmt: skip


def _short(bench: Bench, cell: Cell) -> tuple[DecodeConfig, list[int]]:
    """Two rounds at the end of a canvas of the same length: enough to warm up what captures nothing."""
    config = bench.config(cell)
    new = min(config.max_new_tokens, 2 * config.tokens_per_step)
    filler = (bench.prompt or [0])[-1:] * (config.max_new_tokens - new)
    return config.but(max_new_tokens=new), [*bench.prompt, *filler]


def _spread(spread: Spread) -> Row:
    facts = asdict(spread)
    return {"seconds": facts["median"], "seconds_low": facts["low"], "seconds_high": facts["high"], "n": facts["n"]}


def _decoder(bench: Bench, cell: Cell) -> Callable[[DecodeConfig, list[int]], Row]:
    variant, base = read_variant(cell.decoder), bench.base

    def run(config: DecodeConfig, prompt: list[int]) -> Row:
        how = {**bench.helpers, **variant.options, "decoder": variant.name, "eager": cell.form == "eager"}
        result = decode(base, [prompt] * cell.batch, config, **how)
        tokens = text_tokens(result.tokens_BL[:, -config.max_new_tokens :], base.spec.end_ids)
        rounds, steps = int(result.rounds_B.max()), int(result.sampler_calls_B.max())
        return {"tokens": tokens, "rounds": rounds, "sampler_passes": steps}

    return run


def _public(bench: Bench, cell: Cell) -> Callable[[DecodeConfig, list[int]], Row]:
    sampler = bench.sampler if cell.decoder == "adjust" else None

    def run(config: DecodeConfig, prompt: list[int]) -> Row:
        result = public_loop(bench.base, sampler, [prompt] * cell.batch, config)
        tokens = text_tokens(result.tokens_BL[:, -config.max_new_tokens :], bench.base.spec.end_ids)
        return {"tokens": tokens, "rounds": result.base_passes, "sampler_passes": result.sampler_passes}

    return run


def _parts(bench: Bench, cell: Cell) -> list[Work] | None:
    """The arithmetic of a decode in which no text ends early; None where texts may."""
    if (bench.base.spec.end_ids and not bench.settings.suppress_eos) or not hasattr(bench.base, "model"):
        return None
    config, size = bench.config(cell), (cell.batch, len(bench.prompt))
    if cell.form == "public":
        return public_work(bench.base, bench.sampler, config, *size, cell.decoder)
    return decode_work(bench.base, bench.sampler, read_variant(cell.decoder), config, *size)


# Components ----------------------------------------------------------------------------------------------------


def component_cell(bench: Bench, cell: Cell) -> list[Row]:
    """Base pass, step of g, head, head with scores and draw, and a whole round, on canvases that are half filled."""
    bench.use(cell.form)
    forget_peak(bench.base.device)
    canvas = half_filled(bench, cell)
    made = eager_parts(bench, canvas) if cell.form == "eager" else fast_parts(bench, canvas)
    rows = []
    for name, (part, work) in made.items():
        seconds = bench.clock.samples(part, runs=max(bench.runs, 5), seconds=bench.seconds / len(made))
        spread = Spread.of(seconds)
        facts = {"part": name, **_spread(spread), **shares(work, spread.median, bench.most)}
        rows.append(facts | {"memory_gib": peak_gib(bench.base.device)})
    found = {row["part"]: row["seconds"] for row in rows}
    rest = found["head, scores and draw"] - found["head"]
    rows.append({"part": "scores and draw", "seconds": rest, "seconds_low": None, "seconds_high": None, "n": 0})
    return rows


Parts = dict[str, tuple[Callable[[], Any], list[Work]]]


def half_filled(bench: Bench, cell: Cell) -> Canvas:
    """Every second new position holds a given token, which ends no text: the mean of a decode."""
    canvas = Canvas(bench.base, [bench.prompt] * cell.batch, bench.config(cell))
    given, token = slice(len(bench.prompt), None, 2), bench.prompt[-1]
    canvas.tokens_BL[:, given], canvas.masked_BL[:, given], canvas.order_BL[:, given] = token, False, GIVEN
    return canvas


def _work(bench: Bench, rows: int, length: int, scored: int, k: int) -> dict[str, list[Work]]:
    base, sampler = bench.seen, bench.sampler
    f, head = base_work(base, rows, length), head_work(base, rows * scored)
    work = {"base pass": [f], "head": [head], "head, scores and draw": [head]}
    g = [] if sampler is None else [sampler_work(base, sampler, rows, length)]
    work["round"] = [f, head, *[part for j in range(1, k) for part in (*g, head_work(base, rows * (scored - j)))]]
    return work | ({"g step": g} if g else {}) | {"head, all rows": [head_work(base, rows * length)]}


@torch.no_grad()
def eager_parts(bench: Bench, canvas: Canvas) -> Parts:
    """The reference's parts, the head on all rows beside them."""
    base, sampler, k = bench.seen, bench.sampler, canvas.config.tokens_per_step
    kept = [getattr(canvas, name).clone() for name in _KEPT]
    h_BLD = base.hidden(canvas)
    canvas.start_round()
    at = canvas.masked_BL.nonzero(as_tuple=True)

    def whole() -> None:
        for name, value in zip(_KEPT, kept, strict=True):
            getattr(canvas, name).copy_(value)
        now_BLD = base.hidden(canvas)
        for n in canvas.round():
            if n and sampler is not None:
                now_BLD = sampler(now_BLD, canvas)
            canvas.commit(pick_open(base, now_BLD, canvas))

    parts: dict[str, Callable[[], Any]] = {
        "base pass": lambda: base.hidden(canvas), "head": lambda: base.head(h_BLD[at]),
        "head, scores and draw": lambda: _pick_only(base, h_BLD, canvas),
        "head, all rows": lambda: base.head(h_BLD.flatten(0, 1)), "round": whole,
    }  # fmt: skip
    if sampler is not None:
        parts["g step"] = torch.no_grad()(lambda: sampler(h_BLD, canvas))
    rows, length = canvas.tokens_BL.shape
    work = _work(bench, rows, length, len(at[0]) // rows, k)
    return {name: (part, work[name]) for name, part in parts.items()}


_KEPT = ("tokens_BL", "masked_BL", "order_BL", "commits_B")


def _pick_only(base: Base, h_BLD: Tensor, canvas: Canvas) -> Picks:
    return pick_open(base, h_BLD, canvas)


@torch.no_grad()
def fast_parts(bench: Bench, canvas: Canvas) -> Parts:
    """Parts of the fast form: the functions that it captures, on the buffers that it would take."""
    base, sampler, config = bench.seen, bench.sampler, canvas.config
    rows, length = canvas.tokens_BL.shape
    scored = int(canvas.masked_BL[0].sum())
    slots, columns = slot_bucket(rows), length_bucket(length, rows, base.spec.context)
    width, padded = width_bucket(scored, columns), (slots, columns) != (rows, length)
    lane, graphs = Lane(base, slots, columns, padded=padded, config=config), Graphs(base.device)
    lane.start(config)
    lane.load(canvas, list(range(rows)), 0)
    if base.device.type == "cuda":  # as the fast form does
        join_projections(base.model)  # type: ignore[attr-defined]
        if sampler is not None:
            join_projections(sampler)
    lane.begin_round()

    def state() -> None:
        lane.h_BLD.copy_(base.hidden(lane))

    def step() -> None:
        assert sampler is not None
        lane.h_BLD.copy_(sampler(lane.h_BLD, lane))

    def head() -> None:
        base.head(lane.h_BLD[:, -width:, : base.width].flatten(0, 1))

    functions = {
        "base pass": state, "g step": step, "head": head,
        "head, scores and draw": lambda: pick(base, lane, width, 1), "begin": lane.begin_round,
    }  # fmt: skip

    def replay(name: str) -> Callable[[], None]:
        return torch.no_grad()(lambda: graphs.run(name, functions[name], lane.buffers))

    def whole() -> None:
        lane.load(canvas, list(range(rows)), 0)
        for name in ("begin", "base pass", "head, scores and draw"):
            replay(name)()
        for _ in range(1, config.tokens_per_step):
            if sampler is not None:
                replay("g step")()
            replay("head, scores and draw")()

    work = _work(bench, rows, length, scored, config.tokens_per_step)
    names = [name for name in functions if name != "begin" and (name != "g step" or sampler is not None)]
    parts = {name: (replay(name), work[name]) for name in names}
    whole()  # captures
    require_graphs(graphs, bench.clock)
    return parts | {"round": (whole, work["round"])}
