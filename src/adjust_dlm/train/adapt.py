"""Adapts an autoregressive model to masked diffusion: sample a corpus from it, train LoRA and MASK, write a base.

Run it under torchrun for several GPUs; everything it needs is made or resumed in the output folder.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.adapted import FACTS
from adjust_dlm.bases.autoregressive import Vocabulary, autoregressive_base, load_ar, read_vocabulary
from adjust_dlm.data.ar import CHAT_TEMPLATE
from adjust_dlm.data.canvases import Source
from adjust_dlm.data.corpus import Corpus, build_corpus, load_corpus
from adjust_dlm.data.settings import KINDS
from adjust_dlm.hub import read_json
from adjust_dlm.progress import Bar
from adjust_dlm.train import distributed
from adjust_dlm.train.adapter import AdapterModel, require_tied
from adjust_dlm.train.canvas_batches import CanvasBatches
from adjust_dlm.train.checkpoint import MetricsLog, StopSignal, claim, load_checkpoint, save_checkpoint, set_aside
from adjust_dlm.train.config import AdaptConfig
from adjust_dlm.train.masked_ce import (
    MaskedBatch,
    behind_cuts,
    block_batch,
    cuts,
    draw_masks,
    group_batch,
    masked_batch,
    next_positions,
    open_positions,
)
from adjust_dlm.train.optim import learning_rate
from adjust_dlm.types import require

EVAL_TIMES = (0.15, 0.5, 0.85)
BLOCK_TIMES = {"1.0": 1.0, "first": 0.0, "next": -1.0}  # of block bases as well, see `AdaptTrainer.evaluate`
BEHIND = (0, 1, 2, 4, 8)  # a cut, of causal bases
DECAY = 0.7  # share of the run, at its end, over which the rate falls
CE = dict[str, dict[str, float]]
BatchOf = Callable[[Tensor, Tensor], MaskedBatch]  # rows of a corpus and their weights -> a pass
logger = logging.getLogger(__name__)


def adapt(config: AdaptConfig) -> dict[str, Any]:
    """Runs the whole adaptation, or goes on with it.

    Returns:
        `finished` (False after SIGTERM or SIGINT: run again to go on), `step`, `tokens` seen in training (of whole
        canvases, filler included), `seconds` of training, `tokens_per_second`, `ce`: kind -> t -> held-out masked
        cross-entropy in nats a token (see `AdaptTrainer.evaluate`), and `ce_train`: the same of as many canvases of the
        training split, which a run of less than an epoch has not all seen (where it is lower, more distinct text is
        worth more).

    Raises:
        InputError: see `read_vocabulary`, `claim`, `build_corpus`, `load_checkpoint`, `AdapterModel`.
        FloatingPointError: the loss of a step is not finite.
    """
    rank, world, device = distributed.start()
    config.canvases_of_a_pass(world)  # before hours of sampling
    half = device.type == "cuda"
    model, tokenizer = load_ar(config.ar, device=device, dtype=torch.bfloat16 if half else torch.float32)
    vocabulary = read_vocabulary(tokenizer, model.config, mask_id=config.mask_id)
    require_tied(model)
    with claim(config.output) if rank == 0 else nullcontext():
        return _adapted(config, model, tokenizer, vocabulary, rank, world)


def _adapted(
    config: AdaptConfig, model: Any, tokenizer: Any, vocabulary: Vocabulary, rank: int, world: int
) -> dict[str, Any]:
    folder = config.corpus or config.output / "corpus"
    distributed.barrier()  # nobody writes before the first rank has the folder
    template = (tokenizer.chat_template if config.causal else None) or CHAT_TEMPLATE
    source = Source(autoregressive_base(model, tokenizer, mask_id=vocabulary.mask_id), tokenizer, vocabulary, template)
    build_corpus(folder, config, source, rank=rank, world=world)
    source.forget()
    del source  # which has its own copy of some weights by now
    distributed.barrier()
    adapter = AdapterModel(
        model, vocabulary, rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed, source=config.ar,
        block=config.block_size,
    )  # fmt: skip
    if config.fresh_from is not None:
        same = config.causal == read_json(config.fresh_from / FACTS).get("masks_alone", False)
        require(same, f"causal is {config.causal}; the adapter in {config.fresh_from} was trained the other way")
        adapter.start_from(config.fresh_from)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of sampling
        if config.compile:
            adapter.compile_passes()
    batches = CanvasBatches(
        load_corpus(folder, "train"), config.shares, batch_size=config.batch_size, seed=config.seed, rank=rank,
        world=world, block=config.block_size, causal=config.causal, end_ids=vocabulary.end_ids, suffix=config.suffix,
    )  # fmt: skip
    heldout = load_corpus(folder, "heldout")
    trainer = AdaptTrainer(config, adapter, batches, {"ce": heldout, "ce_train": batches.corpus.like(heldout)})
    # A finished base is not written again: its fingerprint would follow the rounding of the last evaluation.
    written = trainer.fraction() >= 1 and (config.output / FACTS).is_file()
    result = trainer.run()
    if result["finished"] and rank == 0 and not written:
        facts = {
            "ar": config.ar, "mask_id": vocabulary.mask_id, "end_ids": list(vocabulary.end_ids),
            "pad_id": vocabulary.end_ids[0], "bos_id": vocabulary.bos_id, "token_limit": vocabulary.token_limit,
            "context": model.config.max_position_embeddings, "order": config.order, "order_on": "processed",
            **({"chat_template": template} if vocabulary.chat else {}),
            **({} if config.block_size is None else {"block": config.block_size}),
            **({"masks_alone": True} if config.causal else {}),
            "training": {**result, "settings": config.run(), "torch": torch.__version__},
        }  # fmt: skip
        adapter.save(config.output, facts)
    distributed.barrier()
    return result


class AdaptTrainer:
    """The loop: batches, passes, steps, and what is looked at every `log_every` of them."""

    def __init__(
        self, config: AdaptConfig, adapter: AdapterModel, batches: CanvasBatches, looked_at: dict[str, Corpus]
    ) -> None:
        """Takes up the checkpoint in the output folder if there is one.

        Raises:
            InputError: the checkpoint belongs to other settings, or the batch does not divide.
        """
        self.config, self.adapter, self.batches, self.looked_at = config, adapter, batches, looked_at
        self.device = adapter.mask_D.device
        self.world, self.rank = batches.world, batches.rank
        self.micro = config.canvases_of_a_pass(self.world)
        self.parameters = list(adapter.trainables().values())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.device.type == "cuda"
        )
        self.step, self.elapsed = 0, 0.0
        self.due, self.stop = True, StopSignal()  # whether this step is still to be evaluated
        self.losses: list[Tensor] = []
        if config.resume == "auto":
            self._restore()
        elif self.rank == 0:
            set_aside(config.output)
        self.metrics = MetricsLog(config.output, resume_step=self.step, enabled=self.rank == 0)

    def run(self) -> dict[str, Any]:
        """Trains to the end, to the time limit, or to a signal."""
        self._began: float | None = None  # when `elapsed` was 0; the clock starts behind the first step
        self._saved = self.elapsed
        every, ce = self.config.eval_every, {"ce": CE(), "ce_train": CE()}
        with self.stop, Bar("adapt", enabled=self.rank == 0) as self._bar:
            stopped = self.due and self.fraction() < 1 and self.evaluate() is None
            while self.fraction() < 1 and not stopped:
                self._train_step()
                self.due = bool(every) and self.step % every == 0
                if self.due or self.step % self.config.log_every == 0 or self.fraction() >= 1:
                    stopped = self._look()
                if self.due and self.fraction() < 1 and not stopped:
                    stopped = self.evaluate() is None
            self._save()
            if not stopped:
                final = self.evaluate()
                stopped, ce = final is None, final or ce
        tokens = self.step * self.config.batch_size * self.config.length
        return {
            "finished": not stopped, "step": self.step, "tokens": tokens, "seconds": round(self.elapsed, 1),
            "tokens_per_second": round(tokens / max(self.elapsed, 1e-9)), **ce,
        }  # fmt: skip

    def fraction(self) -> float:
        """How much of the run is over; the clock enters only if it may end the run."""
        limit = self.config.max_seconds
        return max(self.step / self.config.steps, min(1.0, self.elapsed / limit) if limit else 0.0)

    def _train_step(self) -> None:
        scale = learning_rate(self.step, self.fraction(), warmup=self.config.warmup, decay=DECAY)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * scale
        total = torch.zeros((), device=self.device)
        for batch in self.batches.step(self.step, self.micro):
            loss = self.adapter.loss(batch.to(self.device))
            loss.backward()
            total += loss.detach()
        distributed.sum_gradients(self.parameters)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(total)
        self.step += 1
        if self._began is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the first step waits for the compiler; a pass of a new length does so again
            self._began = time.monotonic() - self.elapsed

    def _look(self) -> bool:
        """Everything that waits for the device or the other ranks; True when the run must stop."""
        seconds = (time.monotonic() - (self._began or 0.0)) / self.world
        clock = torch.tensor([seconds, float(self.stop.requested)], device=self.device)
        *losses, now, stopped = distributed.total(torch.cat([torch.stack(self.losses), clock])).tolist()
        for step, loss in enumerate(losses, start=self.step - len(losses)):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of step {step} is {loss}; lower lr ({self.config.lr}) or look at the corpus"
                )
        speed = len(losses) * self.config.batch_size * self.config.length / max(now - self.elapsed, 1e-9)
        self.losses, self.elapsed = [], now
        rate = self.optimizer.param_groups[0]["lr"]
        mean = sum(losses) / len(losses)
        self.metrics.write(self.step, loss=mean, lr=rate, tokens_per_second=round(speed), seconds=round(now, 1))
        self._bar.show(self.fraction(), f"step {self.step}, loss {mean:.4f}, lr {rate:.2e}, {speed:,.0f} tokens/s")
        if now - self._saved >= self.config.checkpoint_every_seconds:
            self._saved = now
            self._save()
        return bool(stopped > 0)

    def evaluate(self) -> dict[str, CE] | None:
        """Masked cross-entropy, held out and trained on: kind -> t -> nats a masked token, the masks fixed by the seed.

        Of a block base `first` are the first positions of blocks, which are scored before the block is looked at, and
        `next` are the positions that an order from left to right takes, with all of the block behind them hidden,
        up to a text's end. All others count the filler behind an end, up to its block's edge, which is all but sure.
        Of causal blocks `next` is the autoregressive model's own, and `next+n` is the n-th position behind it.
        None, and it stays due, if a signal comes first. Gradients stay enabled, so that the compiled training graph
        serves here too.
        """
        parts = {(name, kind): self.looked_at[name].of_kind(kind) for name in self.looked_at for kind in KINDS}
        times = {str(t): t for t in EVAL_TIMES} | ({} if self.config.block_size is None else BLOCK_TIMES)
        if self.config.causal:
            times = {"next" if n == 0 else f"next+{n}": float(n) for n in BEHIND if n < (self.config.block_size or 0)}
        asked = [(*part, t) for part, found in parts.items() if len(found.tokens_NL) for t in times]
        total_E2 = torch.zeros(len(asked) + 1, 2, dtype=torch.float64, device=self.device)
        with suppress(InterruptedError):
            for e, (name, kind, t) in enumerate(asked):
                total_E2[e] = self._masked_ce(parts[name, kind], times[t], KINDS.index(kind))
        total_E2[-1] = float(self.stop.requested)
        *found, (stopped, _) = distributed.total(total_E2).tolist()
        if stopped:
            self.due = True
            return None
        out: dict[str, CE] = {name: {} for name in self.looked_at}
        for (name, kind, t), (ce, count) in zip(asked, found, strict=True):
            out[name].setdefault(kind, {})[t] = ce / max(count, 1.0)
        if self.rank == 0:
            logger.info("step %d: masked CE by kind and t: %s", self.step, out)
        self.metrics.write(self.step, **out)
        self.due = False
        return out

    def _masked_ce(self, part: Corpus, t: float, kind: int) -> Tensor:
        """This rank's sum of masked cross-entropies, and how many they are."""
        batch_of = self._behind(part, int(t)) if self.config.causal else self._hiding(part, t, kind)
        mine = torch.arange(self.rank, len(part.tokens_NL), self.world)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index in mine.split(self.micro):
            self.stop.check()
            # Always the training shape: missing rows are filled with row 0, at weight 0.
            fill = self.micro - len(index)
            weights_B = torch.cat([torch.ones(len(index)), torch.zeros(fill)])
            batch = batch_of(torch.cat([index, index.new_zeros(fill)]), weights_B)
            loss = self.adapter.loss(batch.to(self.device))
            total += torch.stack([loss.detach().double(), batch.weights_R.double().sum().to(self.device)])
        return total

    def _hiding(self, part: Corpus, t: float, kind: int) -> BatchOf:
        """Each position hidden with rate t, or one of `BLOCK_TIMES`."""
        generator = torch.Generator().manual_seed((self.config.seed * 1000 + kind * 100 + round(t * 100)) % 2**63)
        (rows, length), size, ends = part.tokens_NL.shape, self.config.block_size, self.batches.end_ids
        if t >= 0:
            masked_NL = draw_masks(part.prompt_len_N, torch.full((rows,), t), length, generator)
            counted_NL = masked_NL
        else:
            counted_NL, masked_NL = next_positions(rows, length, size or length, generator)

        def batch_of(index: Tensor, weights_B: Tensor) -> MaskedBatch:
            tokens_BL, masked_BL, given_B = part.tokens_NL[index], masked_NL[index], part.prompt_len_N[index]
            if size is None:
                return masked_batch(tokens_BL, masked_BL, weights_B)
            open_BL = open_positions(tokens_BL, given_B, ends, size)
            hidden_B2L = torch.stack([masked_BL, ~masked_BL], 1)
            counted_B3L = counted_NL[index, None] & torch.tensor([t < 0, t != 0, False])[:, None]
            counted_B3L[:, 0] |= t == 0
            if t < 0:  # no decoder draws what fills a block behind an end token
                counted_B3L &= open_positions(tokens_BL, given_B, ends, 1)[:, None]
            return block_batch(tokens_BL, open_BL, hidden_B2L, weights_B[:, None, None] * counted_B3L, size)

        return batch_of

    def _behind(self, part: Corpus, n: int) -> BatchOf:
        """The n-th position behind cuts, in parts of each text as many as its canvas has blocks."""
        size = self.config.block_size or 1
        groups = part.tokens_NL.shape[1] // size

        def batch_of(index: Tensor, weights_B: Tensor) -> MaskedBatch:
            tokens_BL = part.tokens_NL[index]
            text_BL = open_positions(tokens_BL, part.prompt_len_N[index], self.batches.end_ids, 1)
            cut_BG = cuts(text_BL, torch.full((len(index),), groups), torch.full((len(index), groups), 0.5))
            counted_BGN = behind_cuts(text_BL, cut_BG, size) & (torch.arange(size + 1) == n)
            return group_batch(tokens_BL, cut_BG, counted_BGN * weights_B[:, None, None], taught=False)

        return batch_of

    def _save(self) -> None:
        if self.rank == 0:
            weights = {name: p.detach().cpu() for name, p in self.adapter.trainables().items()}
            payload = {
                "run": self.config.run(), "weights": weights, "step": self.step, "elapsed": self.elapsed,
                "due": self.due, "optimizer": self.optimizer.state_dict(),
            }  # fmt: skip
            save_checkpoint(self.config.output, payload)
        distributed.barrier()

    def _restore(self) -> None:
        payload = load_checkpoint(self.config.output, self.config.run())
        if payload is None:
            return
        self.adapter.load_state_dict(payload["weights"], strict=False)  # the frozen ones are not in it
        self.optimizer.load_state_dict(payload["optimizer"])
        self.step, self.elapsed, self.due = payload["step"], payload["elapsed"], payload.get("due", False)
        if self.rank == 0:
            logger.info("going on from step %d", self.step)
