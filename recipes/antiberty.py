"""ADJUST on a published masked language model that nobody here trained: how near to its own one-token law?

    python recipes/antiberty.py OUTPUT [--wheel FILE] [--stages trajectories train base-laws laws]

Trains g for `antiberty` on K=1 decodes of masked spans of antibody heavy chains, then follows every branch of every
decoder on canvases with two or three masks of other chains: total variation and KL to the base's K=1 law are exact,
nothing is sampled. Every stage goes on where it was interrupted. The result is OUTPUT/laws-float32.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm import load_base, load_sampler
from adjust_dlm.bases import Base
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.sampling import process, score_rows
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.types import DecodeConfig, State, require

# Human germline V segments up to the end of framework 3, D-like middles of CDR-H3, and J segments.
V_TRAIN = (
    "QVQLVQSGAEVKKPGSSVKVSCKASGGTFSSYAISWVRQAPGQGLEWMGGIIPIFGTANYAQKFQGRVTITADESTSTAYMELSSLRSEDTAVYYCAR",
    "EVQLLESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK",
    "QVQLVQSGAEVKKPGASVKVSCKASGYTFTGYYMHWVRQAPGQGLEWMGWINPNSGGTNYAQKFQGRVTMTRDTSISTAYMELSRLRSDDTAVYYCAR",
    "QVQLQQWGAGLLKPSETLSLTCAVYGGSFSGYYWSWIRQPPGKGLEWIGEINHSGSTNYNPSLKSRVTISVDTSKNQFSLKLSSVTAADTAVYYCAR",
    "QVQLVESGGGVVQPGRSLRLSCAASGFTFSSYGMHWVRQAPGKGLEWVAVISYDGSNKYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK",
    "EVQLVQSGAEVKKPGESLKISCKGSGYSFTSYWIGWVRQMPGKGLEWMGIIYPGDSDTRYSPSFQGQVTISADKSISTAYLQWSSLKASDTAMYYCAR",
)
D_TRAIN = ("DRGYSSG", "DLGYCSGGSC", "GGITMVRGVI", "EDYGDYG", "DPRGYSYG", "GWELLR")
V_TEST = (
    "QVQLQESGPGLVKPSETLSLTCTVSGGSISSYYWSWIRQPPGKGLEWIGYIYYSGSTNYNPSLKSRVTISVDTSKNQFSLKLSSVTAADTAVYYCAR",
    "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYWMSWVRQAPGKGLEWVANIKQDGSEKYYVDSVKGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAR",
    "QVQLVQSGAEVKKPGASVKVSCKASGYTFTSYGISWVRQAPGQGLEWMGWISAYNGNTNYAQKLQGRVTMTTDTSTSTAYMELRSLRSDDTAVYYCAR",
)
D_TEST = ("DQVLRYFDWL", "EGYYDSSGYY", "VAAAG")
J = ("YFDYWGQGTLVTVSS", "DAFDIWGQGTMVTVSS", "YYGMDVWGQGTTVTVSS", "NWFDPWGQGTLVTVSS")
H3 = ("YYC", "WGQG")  # CDR-H3 lies between the two
SHARE = 0.5  # of training spans that lie around CDR-H3, where the model is least certain
ROWS = 64  # canvases in one pass
log = logging.getLogger("recipe")
Step = Callable[[Tensor, State], Tensor]


# Canvases ------------------------------------------------------------------------------------------------------


def chain(v: Sequence[str], d: Sequence[str], rng: np.random.Generator) -> str:
    """A full heavy chain: one segment of each kind."""
    return "".join(part[rng.integers(len(part))] for part in (v, d, J))


def h3(text: str) -> tuple[int, int]:
    """First and past-last place of CDR-H3."""
    return text.rindex(H3[0]) + len(H3[0]), text.rindex(H3[1])


def training_prompts(base: Base, count: int, seed: int = 0) -> list[list[int]]:
    """Chains with one to three masked spans of two to eight residues; the last residue is the canvas's own mask."""
    rng = np.random.default_rng((seed, 1))
    prompts = []
    for _ in range(count):
        letters = list(chain(V_TRAIN, D_TRAIN, rng)[:-1])
        low, high = h3("".join(letters))
        for _ in range(rng.integers(1, 4)):
            length = int(rng.integers(2, 9))
            first, last = (low, high) if rng.random() < SHARE else (0, len(letters))
            start = int(rng.integers(first, max(first + 1, last - length + 1)))
            letters[start : start + length] = ["_"] * len(letters[start : start + length])
        prompts.append(base.encode("".join(letters)))
    return prompts


def test_canvases(kind: str, masks: int, count: int, seed: int = 0) -> list[str]:
    """Held-out chains with `masks` neighbouring residues masked, inside CDR-H3 ("h3") or anywhere ("any")."""
    rng = np.random.default_rng((seed, 2, masks, kind == "h3"))
    texts = []
    for _ in range(count):
        text = chain(V_TEST, D_TEST, rng)
        first, last = h3(text) if kind == "h3" else (0, len(text))
        start = int(rng.integers(first, last - masks + 1))
        texts.append(text[:start] + "_" * masks + text[start + masks :])
    return texts


# Laws by enumeration -------------------------------------------------------------------------------------------


@torch.no_grad()
def law(
    base: Base, canvas_L: Tensor, tokens_per_step: int, step: Step | None = None, config: DecodeConfig | None = None
) -> Tensor:
    """What a decoder writes into the masks of one canvas, by following every branch.

    Args:
        base: the frozen model.
        canvas_L: token ids with masks.
        tokens_per_step: K; 1 is joint decoding.
        step: g for ADJUST; None keeps the states as they are, which is parallel decoding.
        config: temperature, filters and order rule; the default is T = 1 and the base's own rule.

    Returns:
        float64 table with one axis of V entries for each mask, in the order of places.
    """
    config = config or DecodeConfig()
    places = (canvas_L == base.spec.mask_id).nonzero()[:, 0]
    tokens_NL, mass_N = canvas_L[None], torch.ones(1, dtype=torch.float64, device=canvas_L.device)
    for left in range(len(places), 0, -tokens_per_step):
        h_NLD = _in_chunks(lambda state, _: base.hidden(state), tokens_NL, None, base)
        for k in range(min(tokens_per_step, left)):
            if k and step is not None:
                h_NLD = _in_chunks(lambda state, h_BLD: step(h_BLD, state), tokens_NL, h_NLD, base)
            tokens_NL, mass_N, parent_N = _commit(base, tokens_NL, mass_N, h_NLD, config)
            h_NLD = h_NLD[parent_N]
    table = torch.zeros((base.spec.vocab_size,) * len(places), dtype=torch.float64)
    return table.index_put(tuple(tokens_NL[:, places].T.cpu()), mass_N.cpu(), accumulate=True)


def _in_chunks(function: Callable[[State, Any], Tensor], tokens_NL: Tensor, h_NLD: Tensor | None, base: Base) -> Tensor:
    """States of every branch, `ROWS` at a time."""
    masked_NL = tokens_NL == base.spec.mask_id
    parts = []
    for start in range(0, len(tokens_NL), ROWS):
        part = slice(start, start + ROWS)
        real_BL = torch.ones_like(masked_NL[part])
        state = State(tokens_NL[part], real_BL, masked_NL[part], padded=False)
        parts.append(function(state, None if h_NLD is None else h_NLD[part]))
    return torch.cat(parts)


def _commit(
    base: Base, tokens_NL: Tensor, mass_N: Tensor, h_NLD: Tensor, config: DecodeConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Every branch commits every possible token at the place its order rule picks: tokens, mass, parent of each."""
    rule, order_on = config.order or base.spec.order, config.order_on or base.spec.order_on
    require(
        rule in ("entropy", "margin", "left_to_right"),
        f"order is {rule!r}; enumerated are rules that do not draw: entropy, margin, left_to_right",
    )
    row_R, place_R = (tokens_NL == base.spec.mask_id).nonzero(as_tuple=True)
    logits_RV = base.logits(h_NLD[row_R, place_R], suppress_eos=config.suppress_eos)
    if rule == "left_to_right":
        score_R = -place_R.float()
    else:
        unused_R = torch.zeros(len(row_R), dtype=torch.float64, device=base.device)
        score_R = score_rows(logits_RV, unused_R, rule, on_processed=order_on == "processed", config=config)
    # Every branch has the same number of masks left, so its rows are neighbours.
    first_N = score_R.view(len(tokens_NL), -1).sort(dim=-1, descending=True, stable=True).indices[:, 0]
    branch_N = torch.arange(len(tokens_NL), device=base.device)
    chosen_N = branch_N * (len(row_R) // len(tokens_NL)) + first_N
    p_NV = process(logits_RV[chosen_N], config).double().softmax(-1)
    parent_M, token_M = p_NV.nonzero(as_tuple=True)
    after_ML = tokens_NL[parent_M].clone()
    after_ML.scatter_(1, place_R[chosen_N][parent_M][:, None], token_M[:, None])
    return after_ML, mass_N[parent_M] * p_NV[parent_M, token_M], parent_M


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the sum of differences, 0..1."""
    return float((p - q).abs().sum() / 2)


def kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats."""
    inside = p > 0
    return float((p[inside] * (p[inside] / q[inside]).log()).sum())


# Stages --------------------------------------------------------------------------------------------------------


def open_base(flags: argparse.Namespace, dtype: str) -> Base:
    """The published model."""
    return load_base("antiberty", wheel=flags.wheel, device=flags.device, dtype=getattr(torch, dtype))


def make_data(flags: argparse.Namespace) -> None:
    """K=1 decodes of masked spans."""
    base = open_base(flags, flags.dtype)
    source = PromptSource("heavy chains with masked spans", training_prompts(base, flags.num))
    config = TrajectoriesConfig(
        base="antiberty", output=str(flags.output / "trajectories"), num=flags.num, max_new_tokens=1, batch_size=32,
        shard_rows=32, device=flags.device, dtype=flags.dtype,
    )  # fmt: skip
    log.info("%s", make_trajectories(config, base, source=source))


def train_sampler(flags: argparse.Namespace) -> None:
    """The library's own training, two unrolled steps: what K = 2 and K = 3 need."""
    base = open_base(flags, flags.dtype)
    config = TrainConfig(
        base="antiberty", trajectories=(str(flags.output / "trajectories"),), output=str(flags.output / "g"),
        rollout=2, steps=flags.steps, slice_states=7, slices=flags.slices, heldout=32,
        eval_every=500, warmup=20, dtype=flags.dtype, max_seconds=flags.max_seconds,
    )  # fmt: skip
    log.info("%s", train(config, base))


def table_file(flags: argparse.Namespace, name: str, kind: str, masks: int, n: int) -> Path:
    """Where a law is kept."""
    return flags.output / f"tables-{flags.law_dtype}" / f"{name}-{kind}-{masks}-{n:03d}.pt"


def make_laws(flags: argparse.Namespace, names: Sequence[str]) -> None:
    """Laws of every test canvas, as files."""
    base = open_base(flags, flags.law_dtype)
    g = load_sampler(flags.output / "g" / "sampler", base) if "adjust" in names else None
    table_file(flags, "", "", 0, 0).parent.mkdir(parents=True, exist_ok=True)
    for (kind, masks, count), name in itertools.product(flags.canvases, names):
        k, step = (1, None) if name == "joint" else (masks, g if name == "adjust" else None)
        for n, text in enumerate(test_canvases(kind, masks, count)):
            path = table_file(flags, name, kind, masks, n)
            if not path.exists():
                part = path.with_suffix(".part")
                torch.save(law(base, torch.tensor(base.encode(text), device=base.device), k, step), part)
                part.rename(path)
        log.info("%s: %d canvases of kind %s with %d masks", name, count, kind, masks)


def compare(flags: argparse.Namespace) -> None:
    """Distances to the K=1 law, means over canvases with bootstrap intervals, as JSON and a table."""
    rows: list[dict[str, Any]] = []
    for kind, masks, count in flags.canvases:
        for n, text in enumerate(test_canvases(kind, masks, count)):
            joint, *others = (
                torch.load(table_file(flags, name, kind, masks, n)) for name in ("joint", "parallel", "adjust")
            )
            row: dict[str, Any] = {"kind": kind, "masks": masks, "canvas": text}
            for name, table in zip(("parallel", "adjust"), others, strict=True):
                row |= {f"tv_{name}": total_variation(joint, table), f"kl_{name}": kl(joint, table)}
            rows.append(row)
    (flags.output / f"laws-{flags.law_dtype}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (flags.output / f"laws-{flags.law_dtype}.md").write_text("\n".join(markdown(rows, flags.canvases)) + "\n")


def markdown(rows: list[dict[str, Any]], canvases: Sequence[tuple[str, int, int]]) -> list[str]:
    """One table line per kind of canvas, number of masks and measure."""
    lines = ["| masks = K | where | n | measure | parallel | ADJUST | closed | ADJUST nearer |", "|" + "---|" * 8]
    for (kind, masks, _), measure in itertools.product(canvases, ("tv", "kl")):
        mine = [row for row in rows if (row["kind"], row["masks"]) == (kind, masks)]
        pairs_N2 = np.array([[row[f"{measure}_parallel"], row[f"{measure}_adjust"]] for row in mine])
        (parallel, adjust), closed = interval(pairs_N2)
        nearer = int((pairs_N2[:, 1] < pairs_N2[:, 0]).sum())
        cells = [masks, kind, len(mine), measure, parallel, adjust, closed, f"{nearer} of {len(mine)}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def interval(pairs_N2: np.ndarray, draws: int = 10_000) -> tuple[list[str], str]:
    """Means of both columns and the share of the first that the second closes, each with its 95 % interval."""
    pick = np.random.default_rng(0).integers(len(pairs_N2), size=(draws, len(pairs_N2)))
    means_S2 = pairs_N2[pick].mean(1)
    low, high = np.percentile(means_S2, [2.5, 97.5], axis=0)
    texts = [f"{m:.4f} ({a:.4f}, {b:.4f})" for m, a, b in zip(pairs_N2.mean(0), low, high, strict=True)]
    closed_S = 1 - means_S2[:, 1] / means_S2[:, 0]
    a, b = np.percentile(closed_S, [2.5, 97.5])
    return texts, f"{1 - pairs_N2[:, 1].mean() / pairs_N2[:, 0].mean():.0%} ({a:.0%}, {b:.0%})"


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "trajectories": make_data,
    "train": train_sampler,
    "base-laws": lambda flags: make_laws(flags, ("joint", "parallel")),
    "laws": lambda flags: (make_laws(flags, ("adjust",)), compare(flags))[-1],
}


def canvas_kind(text: str) -> tuple[str, int, int]:
    """`h3:2:40`: 40 canvases with 2 masks in CDR-H3."""
    kind, masks, count = text.split(":")
    if kind not in ("h3", "any"):
        raise ValueError(kind)
    return kind, int(masks), int(count)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the stages."""
    parser = argparse.ArgumentParser(description="ADJUST on AntiBERTy, by enumeration")
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheel", type=Path, help="the antiberty wheel; fetched with pip when not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--num", type=int, default=4096, help="training trajectories")
    parser.add_argument("--steps", type=int, default=5000, help="training steps")
    parser.add_argument("--slices", type=int, default=8, help="slices a step")
    parser.add_argument("--max-seconds", type=float, help="end training by the clock")
    parser.add_argument("--dtype", default="float32", help="of the base in trajectories and training")
    parser.add_argument("--law-dtype", default="float32", help="of base and g in the enumeration")
    parser.add_argument(
        "--canvases", type=canvas_kind, nargs="+", help="KIND:MASKS:COUNT, KIND h3 or any",
        default=[("h3", 2, 40), ("any", 2, 40), ("h3", 3, 30), ("any", 3, 30)],
    )  # fmt: skip
    flags = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for stage in flags.stages:
        STAGES[stage](flags)


if __name__ == "__main__":
    main()
