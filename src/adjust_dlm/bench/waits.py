"""A captured round of `verified` alone, and the tokens/s that follow from an assumed number of tokens a round."""

from __future__ import annotations

import torch

from adjust_dlm.bench.clock import forget_peak, peak_gib, spread
from adjust_dlm.bench.measure import Bench, Cell, Row, half_filled, lane_of, require_graphs
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.decoders.fast.work import Work
from adjust_dlm.options import VerifiedOptions
from adjust_dlm.variants import read_variant


@torch.no_grad()
def wait_cell(bench: Bench, cell: Cell) -> list[Row]:
    """One round on canvases that are half filled; it takes as long whatever is drafted, and whatever of it stands."""
    bench.use(cell.form)
    forget_peak(bench.base.device)
    canvas, g, per_wait = half_filled(bench, cell), bench.helpers["sampler"], bench.tokens_per_wait or 1.0
    base, graphs, most = g.on(bench.base), Graphs(bench.base.device), int(canvas.masked_BL[0].sum())
    lane, restore = lane_of(base, g, canvas)
    options = VerifiedOptions(**read_variant(cell.decoder).options)
    work = Work(graphs, base, g, lane, decoder="verified", options=options)

    def wait() -> None:
        restore()
        work.round(1, most)

    wait()  # captures
    require_graphs(graphs, bench.clock)
    found = spread(bench.clock.samples(wait, runs=max(bench.runs, 5), seconds=bench.seconds))
    return [{
        "part": "wait", **found, "assumed_tokens_per_wait": per_wait,
        "assumed_tokens_per_second": cell.batch * per_wait / found["seconds"], "memory_gib": peak_gib(base.device),
    }]  # fmt: skip
