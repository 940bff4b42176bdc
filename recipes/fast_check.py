"""Checks the fast decoders on a card against the reference, token for token; with `--output`, times them too.

    python recipes/fast_check.py                                          # the check alone
    python recipes/fast_check.py --output runs/dream                      # and `adjust bench runtime`
    python recipes/fast_check.py --output runs/llada --base llada-8b-shape --forms fast compiled

The check is fp32 with random weights of the default model's shape, and greedy rows must be equal (the tests compare
draws, on small vocabularies); flags behind `--output` are those of `adjust bench runtime`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from adjust_dlm.bench.shapes import random_base, random_sampler
from adjust_dlm.cli import main as adjust
from adjust_dlm.decoders import decode
from adjust_dlm.types import DecodeConfig

GREEDY: dict[str, dict[str, Any]] = {
    "entropy": {}, "margin": {"order": "margin"}, "confidence": {"order": "confidence"}, "blocks": {"block_length": 16},
    "candidates": {"candidates": 8},
}  # fmt: skip
# Told, not judged: random weights give 49,152 tokens nearly equal chances, so that rounding decides among neighbours.
DRAWN: dict[str, dict[str, Any]] = {"T=1": {}, "T=.7": {"temperature": 0.7}, "top_p": {"top_p": 0.9}}


def same_tokens(shape: str, new_tokens: int, lengths: Sequence[int]) -> list[tuple[str, str, float, float]]:
    """Decoder, settings, and the share of rows that are the reference's: as one batch, and in two slots."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    base = random_base(shape, device=device, dtype=torch.float32, head_std=0.125)  # wide: no near ties
    sampler = random_sampler(base)
    prompts = [[1, *range(20, 20 + n)] for n in lengths]
    found = []
    judged = {name: {"temperature": 0.0, **changes} for name, changes in GREEDY.items()}
    for name, settings in {**judged, **DRAWN}.items():
        for decoder in ("joint", "parallel", "adjust"):
            if name == "candidates" and decoder == "parallel":
                continue
            config = DecodeConfig(max_new_tokens=new_tokens, tokens_per_step=4, **settings)
            own: dict[str, Any] = {"sparse": True} if name == "candidates" and decoder == "adjust" else {}
            how = {"decoder": decoder, "sampler": sampler, **own}
            slow, quick = (decode(base, prompts, config, eager=eager, **how) for eager in (True, False))
            again = decode(base, prompts, config, eager=False, slots=2, **how)
            same = [(slow.tokens_BL == other.tokens_BL).all(-1).float().mean().item() for other in (quick, again)]
            found.append((decoder, name, *same))
            sys.stdout.write(f"{json.dumps(found[-1])}\n")
            sys.stdout.flush()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every greedy row is the reference's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small-shape")
    parser.add_argument("--check-tokens", type=int, default=48)
    parser.add_argument("--output", help="measure, into this folder")
    flags, more = parser.parse_known_args(argv)
    if more and not flags.output:
        parser.error(f"{' '.join(more)}: flags of `adjust bench runtime` need --output")
    found = same_tokens(flags.shape, flags.check_tokens, (3, 40, 17, 9, 25))
    code = int(any(min(shares) < 1 for _, name, *shares in found if name in GREEDY))
    if flags.output:
        base = [] if "--base" in more else ["--base", "dream-7b-shape"]
        code = adjust(["bench", "runtime", "--output", flags.output, *base, *more]) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
