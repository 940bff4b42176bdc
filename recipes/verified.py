"""How many tokens `verified` commits a wait, by depth, by how drafts are matched, and by who drafts.

    python recipes/verified.py [--base smol-block] [--sampler G] [--prompts lists] [--rows 24] [--temperatures 1 0.6 0]
        [--drafts g stale] [--depths 2 4 8]

Texts are those of joint decoding, of rows for evaluation, which no g was trained on. From every canvas on the way
drafts are made as `verified` makes them, along the text's own tokens, since a later draft counts only where the
earlier ones stood. Given the text, a draft stands with a known chance: so the rounds of a text are an expectation,
and one text serves every depth and every match. `token` and `law` are the decoder's; `gumbel` shares Gumbel noise
between draft and check; `place` lets every token of the right position stand, which bounds them all. `stale` drafts
from the base's last states, without g. Printed are tokens a wait, and shares of the drafts looked at that stand;
half-widths are 95 % over texts.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm import DecodeConfig, load_base, load_sampler
from adjust_dlm.bases import Base
from adjust_dlm.checks import require
from adjust_dlm.data.prompts import open_prompts
from adjust_dlm.decoders.machinery.cache import with_cache, with_sampler_cache
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.sampling import EVALUATION_ROWS

MATCHES = ("token", "law", "gumbel", "place")
Found = dict[tuple[Any, ...], Tensor]


@dataclass
class Walk:
    """Joint texts on the way: before commit t the states, what was committed, and how many drafts a round there has."""

    states: list[Tensor]
    picks: list[Picks]
    drafts_TB: Tensor


def walk(base: Base, config: DecodeConfig, prompts: list[list[int]], rows: list[int]) -> Walk:
    """Joint decoding; texts do not end early."""
    canvas, states, picks, drafts = Canvas(base, prompts, config, rows=rows), [], [], []
    while canvas.open:
        canvas.start_round(torch.ones_like(canvas.commits_B))
        drafts.append(torch.where(canvas.commits_B > 0, canvas.seen_BL.sum(-1), 0))
        states.append(base.hidden(canvas))
        picks.append(pick(base, states[-1], canvas))
        canvas.commit(picks[-1])
    return Walk(states, picks, torch.stack(drafts))


def shared_noise(p_RV: Tensor, q_RV: Tensor, token_R: Tensor) -> Tensor:
    """Chance that argmax(log q + noise) is the token, given that argmax(log p + the same Gumbel noise) is: [R]."""
    of_p_R1, of_q_R1 = p_RV.gather(1, token_R[:, None]), q_RV.gather(1, token_R[:, None])
    return (1 / torch.maximum(p_RV / of_p_R1, q_RV / of_q_R1).sum(-1) / of_p_R1[:, 0]).nan_to_num(0)


def chances(base: Base, g: Any, canvas: Canvas, texts: Walk, most: int) -> dict[str, Tensor]:
    """Chance that draft k of a round before commit t stands if those before it did: [T, most, B] for each match."""
    many, count = len(texts.picks), len(canvas.rows_B)
    out = {match: torch.zeros(many, most, count, dtype=torch.float64) for match in MATCHES}
    for t in range(many):
        if texts.drafts_TB[t].any():
            draft, h_BLD = copy.copy(canvas), texts.states[t - 1]
            for name in ("tokens_BL", "order_BL", "commits_B", "_before_B", "quota_B", "base_calls_B"):
                setattr(draft, name, getattr(canvas, name).clone())
            draft.masked_BL = canvas.seen_BL & (texts.drafts_TB[t] > 0)[:, None]
            for k, true in enumerate(texts.picks[t : t + min(most, int(texts.drafts_TB[t].max()))]):
                draft.start_round(torch.ones_like(draft.commits_B))
                h_BLD = h_BLD if g is None else g(h_BLD, draft)
                made, token_B = pick(base, h_BLD, draft), true.token_BN[:, 0]
                same_B = (made.position_BN == true.position_BN)[:, 0] & (k < texts.drafts_TB[t])
                equal_B = same_B & (made.token_BN[:, 0] == token_B)
                p_BV, q_BV = (x.processed_RV.softmax(-1).double() for x in (true, made))
                ratio_B = (q_BV / p_BV).gather(1, token_B[:, None])[:, 0].clamp_max(1)
                kinds = equal_B, same_B * ratio_B, same_B * shared_noise(p_BV, q_BV, token_B), same_B
                kinds = kinds if canvas.config.temperature else (equal_B, equal_B, equal_B, same_B)
                for match, chance_B in zip(MATCHES, kinds, strict=True):
                    out[match][t, k] = chance_B
                draft.commit(true)
        canvas.start_round(torch.ones_like(canvas.commits_B))
        canvas.commit(texts.picks[t])
    return out


def rounds(chance_TKB: Tensor, drafts_TB: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Expected rounds of each text [B]; drafts looked at and standing, by place in the round [2, depth - 1, B]."""
    many, _, count = chance_TKB.shape
    starts_TB = torch.zeros(many + depth, count, dtype=torch.float64)
    seen = torch.zeros(2, depth - 1, count, dtype=torch.float64)
    starts_TB[0] = 1
    for t in range(many):
        reach_B = starts_TB[t].clone()
        for k in range(depth - 1):
            made_B = k < drafts_TB[t]
            stands_B = reach_B * made_B * chance_TKB[t, k]
            seen[:, k] += torch.stack([reach_B * made_B, stands_B])
            starts_TB[t + k + 1] += reach_B - stands_B
            reach_B = stands_B
            last_B = k + 1 >= drafts_TB[t]  # a block's last mask: its exact commit ends the round
            starts_TB[t + k + 1] += reach_B * last_B
            reach_B = reach_B * ~last_B
        starts_TB[t + depth] += reach_B
    return starts_TB[:many].sum(0), seen


@torch.no_grad()
def measure(
    base: Base, drafters: dict[str, Any], config: DecodeConfig, prompts: list[list[int]], depths: Sequence[int], *,
    batch: int = 8, first_row: int = EVALUATION_ROWS,
) -> Found:  # fmt: skip
    """(drafts, match, depth) -> rounds [B]; (drafts, match, depth, "seen") -> [2, depth - 1, B]."""
    require(not base.spec.causal, f"base {base.spec.name!r} has causal blocks; count its rounds in a decode")
    found = defaultdict[tuple[Any, ...], list[Tensor]](list)
    own = with_cache(base, config)
    for at in range(0, len(prompts), batch):
        mine = prompts[at : at + batch]
        here = [first_row + at + n for n in range(len(mine))]
        texts = walk(own, config, mine, here)
        for who, g in drafters.items():
            canvas = Canvas(own, mine, config, rows=here)
            chance = chances(own, with_sampler_cache(g), canvas, texts, max(depths) - 1)
            for match in MATCHES:
                for depth in depths:
                    count_B, seen = rounds(chance[match], texts.drafts_TB, depth)
                    found[who, match, depth].append(count_B)
                    found[who, match, depth, "seen"].append(seen)
        sys.stderr.write(f"T = {config.temperature}: {at + len(mine)} texts\n")
    return {key: torch.cat(parts, -1) for key, parts in found.items()}


def main() -> None:
    """Prints one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smol-block")
    parser.add_argument("--sampler")
    parser.add_argument("--prompts", default="unconditional")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--drafts", nargs="+", choices=["g", "stale"], default=["g", "stale"])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0])
    args, write = parser.parse_args(), sys.stdout.write
    base = load_base(args.base, device="cpu")
    g = load_sampler(args.sampler, base)
    base = g.on(base)
    source = open_prompts(args.prompts, base, rows=args.rows)
    prompts = [source.ids(row) for row in range(args.rows)]
    drafters = {who: g if who == "g" else None for who in args.drafts}
    write(f"| T | drafts | match | depth | tokens a wait | stands, 1st | 2nd | 3rd |\n|{'---|' * 8}\n")
    for temperature in args.temperatures:
        config = DecodeConfig(max_new_tokens=args.tokens, temperature=temperature, suppress_eos=True)
        found = measure(base, drafters, config, prompts, args.depths)
        for who, match, depth in (key for key in found if len(key) == 3):
            count_B, seen = found[who, match, depth], found[who, match, depth, "seen"].sum(-1)
            rate = args.tokens / float(count_B.mean())
            half = 1.96 * float(count_B.std() / len(count_B) ** 0.5 / count_B.mean()) * rate
            share = [f"{float(x):.2f}" for x in (seen[1] / seen[0])[:3]]
            write(f"| {temperature:g} | {who} | {match} | {depth} | {rate:.2f} +- {half:.2f} | {' | '.join(share)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
