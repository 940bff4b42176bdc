"""What training costs at full size: windows a second, share of the ceiling, memory, hours of the paper's two epochs.

    python recipes/training_cost.py dream --output dream.json     # Dream-7B's shape, random bf16 weights
    python recipes/training_cost.py llada --output llada.json     # LLaDA-8B's

Forms: `plain` (one window a slice, as the paper), `sliced` (consecutive states share base passes), `one-pass` (decoded
and trained on in one loop). A form is measured in parts, each the median over its runs after a warm-up: a micro-batch
(equally many windows in all forms), the optimiser's step (shared by `--batch` windows), and a pass of the pool with its
commit, which is also what data for the other two forms costs. Arithmetic is that of the model's matrices and attention,
a backward pass through g counted as two forward ones, the optimiser not at all.

Every line is printed and the file is written as soon as a form is done, and a form that takes longer than its limit is
left out, so a run that is cut short keeps what it has. Random weights and tokens cost what real ones cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.bench.clock import Clock, gemm_ceiling, limit
from adjust_dlm.bench.shapes import random_base
from adjust_dlm.bench.work import base_work, sampler_work
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.losses import KernelName, pick_delta, row_shares
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.batches import lots, pack, to_device
from adjust_dlm.train.one_pass import Pool, PoolConfig, lookahead
from adjust_dlm.train.optim import build_optimizers
from adjust_dlm.train.unroll import Frames, Step, observe, unroll, unrolled_kl
from adjust_dlm.types import MASKED, Trajectory

WINDOWS = 100_000 * 127  # of one epoch of the paper's data: a text of 128 tokens has 127 windows
EPOCHS = 2  # of the paper
SHAPES = {"dream": "dream-7b-shape", "llada": "llada-8b-shape", "tiny": "tiny-shape"}


@dataclass(frozen=True)
class Form:
    """One way to train.

    Attributes:
        name: plain, sliced or one-pass.
        compiled: base and g compiled.
        rows: limit on masked rows a state, or None.
        kernel: of the KL.
    """

    name: str
    compiled: bool = False
    rows: int | None = None
    kernel: KernelName = "auto"


@dataclass
class Bench:
    """What all forms share.

    Attributes:
        base, sampler: random weights of a full size.
        options: the flags.
        head_rows, grad_rows: rows that went through the head, and back through it, since they were set to 0.
    """

    base: TransformerBase
    sampler: Sampler
    options: argparse.Namespace
    step_g: Step = field(init=False)
    head_rows: int = 0
    grad_rows: int = 0

    def __post_init__(self) -> None:
        self.step_g, head = self.sampler, self.base.head

        def counted(h_RD: Tensor) -> Tensor:
            self.head_rows += len(h_RD)
            return head(h_RD)

        self.base.head = counted  # type: ignore[method-assign]

    @property
    def length(self) -> int:
        """L: one prompt token and the new ones."""
        return 1 + int(self.options.new_tokens)

    @property
    def windows(self) -> int:
        """Of a training step."""
        return int(self.options.slices * (self.options.states - self.options.rollout))

    def compile(self) -> None:
        """Base and g, once."""
        if not self.base.compiled:
            self.base.compile()
            self.step_g = torch.compile(self.sampler, dynamic=False)


def build(shape: str, device: torch.device) -> TransformerBase:
    """Random weights, made where they stay; bf16 on a card."""
    return random_base(SHAPES[shape], device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def slices_of(bench: Bench, length: int, count: int) -> Frames:
    """f of `count` slices of made-up trajectories, as training would draw them."""
    base, options = bench.base, bench.options
    generator = torch.Generator().manual_seed(0)
    chosen, starts = [], []
    for n in range(count):
        tokens_L = torch.randint(1000 if options.shape != "tiny" else 90, (bench.length,), generator=generator)
        order_L = torch.cat([torch.tensor([-1]), torch.randperm(options.new_tokens, generator=generator)])
        chosen.append(Trajectory(tokens_L, order_L, row=n, seed=0))
        starts.append(n * max(1, options.new_tokens - length) // count)  # every mask ratio alike
    return observe(base, to_device(pack(chosen, starts, length, base.spec.pad_id), base.device))


def running_pool(bench: Bench) -> Pool:
    """A pool in the middle of its work: places at all moments of a text, what is revealed made up."""
    base, options = bench.base, bench.options
    pool = Pool(
        base, PoolConfig(rows=options.states * options.slices, max_new_tokens=options.new_tokens),
        PromptSource("one", [[base.spec.bos_id or 0]]), length=options.states, rollout=options.rollout,
        slices=options.slices, suppress_eos=True, weights="uniform",
    )  # fmt: skip
    lane = pool.lanes[0]
    places, canvas = len(lane.begins), lane.canvas
    lane.begins = [0] * places
    lane.refill(0)
    for b in range(places):
        t = b * options.new_tokens // places
        at = 1 + torch.randperm(options.new_tokens)[:t].to(base.device)
        canvas.tokens_BL[b, at], canvas.masked_BL[b, at] = 5, False
        canvas.order_BL[b, at], canvas.commits_B[b] = torch.arange(t, device=base.device), t
    assert int((canvas.order_BL == MASKED).sum()) == int(canvas.masked_BL.sum())
    return pool


def training_parts(bench: Bench, form: Form, frames: Callable[[], Frames]) -> list[Callable[[], None]]:
    """A micro-batch with its gradients, and the optimiser's step."""
    options, base = bench.options, bench.base
    delta = pick_delta(form.kernel, base.device, compiled=form.compiled)
    optimizers = build_optimizers(bench.sampler, options.optimizer, 1e-6)
    half = base.device.type == "cuda"

    def counted(teacher_RV: Tensor, student_RV: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
        bench.grad_rows += len(weight_R)
        return delta(teacher_RV, student_RV, weight_R)

    def micro_batch() -> None:
        with torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
            seen = frames()
            run, share_BL = unroll(bench.step_g, seen, rollout=options.rollout), None
            if form.rows is not None:
                share_BL = row_shares(run.rank_BL, form.rows, lots(run.rank_BL, run.n, (0, 0)))
            loss = unrolled_kl(base, run, range(1, options.rollout + 1), delta=counted, share_BL=share_BL)
        loss.backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(bench.sampler.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return [micro_batch, update]


def measure(bench: Bench, form: Form, decode_seconds: float | None) -> dict[str, Any]:
    """One form: seconds and arithmetic of a window, its data included.

    Args:
        bench: what is shared.
        form: which.
        decode_seconds: of one decoded state; None in one-pass training, which measures its own.
    """
    options, base = bench.options, bench.base
    clock, cuda = Clock(base.device), base.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if form.compiled:
        bench.compile()
    states, kept = 0.0, None
    if form.name == "one-pass":
        pool = running_pool(bench)
        decode_seconds = pass_seconds(bench, pool, clock)
        kept = waiting_states(bench)
        parts = training_parts(bench, form, pool.frames)
    else:
        length = options.states if form.name == "sliced" else options.rollout + 1
        count = bench.windows // (length - options.rollout)
        states = count * length / bench.windows
        parts = training_parts(bench, form, lambda: slices_of(bench, length, count))
    for part in parts:  # compiles, and makes the optimiser's state
        part()
    bench.head_rows = bench.grad_rows = 0
    timed = [[clock(part) for part in parts] for _ in range(1 + options.runs)]
    micro, update = (statistics.median(seconds) for seconds in zip(*timed[1:], strict=True))
    rows, back = (n / len(timed) / bench.windows for n in (bench.head_rows, bench.grad_rows))
    assert decode_seconds is not None
    # Of T states of a trajectory T - 1 begin a window.
    data = decode_seconds * options.new_tokens / (options.new_tokens - 1)
    look, step = base_work(base, 1, bench.length).flops, sampler_work(base, bench.sampler, 1, bench.length).flops
    flops = states * look + 3 * options.rollout * step
    flops += 2 * base.width * base.spec.vocab_size * (rows + back)
    data_flops = look + base.width * base.spec.vocab_size * options.new_tokens
    training = micro / bench.windows + update / options.batch
    window = training + data
    return {
        "form": form.name, "compiled": form.compiled, "rows": form.rows, "kernel": form.kernel,
        "windows_per_second": 1 / window, "windows_per_second_without_data": 1 / training,
        "micro_batch_seconds": micro, "update_seconds": update, "decode_ms_per_state": 1000 * decode_seconds,
        "head_rows_per_window": rows,
        "training_tflop_per_window": flops / 1e12, "data_tflop_per_window": data_flops / 1e12,
        "tflops": (flops + data_flops) / window / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "waiting_states_gib": 0.0 if kept is None else kept.numel() * kept.element_size() / 2**30,
        "hours_one_epoch": hours(form.name, 1, 1 / training, 1 / window),
        "hours_two_epochs": hours(form.name, EPOCHS, 1 / training, 1 / window),
    }  # fmt: skip


def hours(form: str, epochs: int, training: float, everything: float) -> float:
    """Hours of that many epochs of the paper's windows, data included.

    `plain` and `sliced` decode their texts once and train on them in every epoch; `one-pass` decodes as many new texts
    in every epoch.

    Args:
        form: plain, sliced or one-pass.
        epochs: how many.
        training: windows a second of training alone.
        everything: windows a second of training and data together.
    """
    again = 1 / everything if form == "one-pass" else 1 / training
    return WINDOWS * (1 / everything + (epochs - 1) * again) / 3600


def pass_seconds(bench: Bench, pool: Pool, clock: Clock) -> float:
    """Of one decoded state: a pass of a pool that is at all moments of a text, its commit included."""
    clock(pool.advance)
    runs = max(bench.options.states - 2, bench.options.runs)
    return clock.median(pool.advance, warm=1, runs=runs) / (bench.options.states * bench.options.slices)


def waiting_states(bench: Bench) -> Tensor:
    """As much memory as the states take that wait for the order of their future (`one_pass.lookahead`)."""
    base, options = bench.base, bench.options
    count = min(lookahead("next"), bench.length) * options.states * options.slices * bench.length * base.width
    return torch.empty(count, dtype=base.dtype, device=base.device)


def forms(options: argparse.Namespace) -> list[Form]:
    """In the order of their worth, those that need compiling last."""
    few = options.rows
    every = [
        Form("one-pass"), Form("sliced"), Form("plain"), Form("plain", kernel="torch"), Form("one-pass", rows=few),
        Form("one-pass", compiled=True), Form("one-pass", compiled=True, rows=few), Form("sliced", compiled=True),
        Form("sliced", compiled=True, rows=few),
    ]  # fmt: skip
    wanted = [form for form in every if form.name in options.forms]
    return [form for form in wanted if not (form.compiled and options.no_compile)]


def say(line: str) -> None:
    """To stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """One shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--forms", nargs="+", default=["plain", "sliced", "one-pass"])
    parser.add_argument("--states", type=int, default=11, help="of a slice; a pool has states x slices rows")
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="the limit on masked rows a state that is tried")
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--batch", type=int, default=256, help="windows of an optimiser step")
    parser.add_argument("--runs", type=int, default=4, help="timed micro-batches of each form")
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--form-seconds", type=float, default=100, help="for one form, compiling included")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(argv)
    if options.runs + 2 > options.states:
        parser.error(
            f"--runs {options.runs}: a block of {options.states} states has no more than that many steps, less 2"
        )
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = build(options.shape, device)
    with device:
        bench = Bench(base, Sampler(base).to(device), options)
    result: dict[str, Any] = {
        "shape": options.shape, "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "gemm_tflops": gemm_ceiling(device, base.dtype) / 1e12, "options": vars(options) | {
            "output": str(options.output)}, "g_parameters": sum(p.numel() for p in bench.sampler.parameters()),
        "forms": [], "left_out": [],
    }  # fmt: skip
    facts = {k: result[k] for k in ("shape", "card", "gemm_tflops", "g_parameters")}
    say(json.dumps(facts | {"seconds": round(time.monotonic() - started, 1)}))
    decode_seconds = dict[bool, float]()
    for form in forms(options):
        left = options.seconds - (time.monotonic() - started)
        try:
            with limit(min(left, options.form_seconds)):
                if form.name != "one-pass" and form.compiled not in decode_seconds:
                    if form.compiled:
                        bench.compile()
                    decode_seconds[form.compiled] = pass_seconds(bench, running_pool(bench), Clock(device))
                line = measure(bench, form, decode_seconds.get(form.compiled))
        except (TimeoutError, RuntimeError) as error:  # an alarm inside a compiler comes back as a RuntimeError
            result["left_out"].append([form.name, form.compiled, form.rows, type(error).__name__])
            say(f"left out: {form}: {type(error).__name__}")
        else:
            decode_seconds.setdefault(form.compiled, line["decode_ms_per_state"] / 1000)
            line["share_of_ceiling"] = line["tflops"] / result["gemm_tflops"]
            result["forms"].append(line)
            say(json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}))
        bench.sampler.zero_grad(set_to_none=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
