"""math-verify over many completions, on all CPUs: one of them takes 40 ms, some of them seconds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

_PAYS = 64  # completions from which on other processes are worth their start


def verified(text: str, right: str) -> bool:
    """Whether math-verify finds the gold answer in a completion."""
    from math_verify import parse, verify

    return bool(verify(gold=_gold(right), target=parse(text)))


@functools.lru_cache(maxsize=4096)
def _gold(right: str) -> list[object]:
    from math_verify import parse

    answer: list[object] = parse(f"$\\boxed{{{right}}}$")
    return answer


def all_verified(pairs: Sequence[tuple[str, str]], *, workers: int) -> list[bool]:
    """`verified` of each (completion, gold answer), in order, in as many processes as there are workers."""
    if workers <= 1 or len(pairs) < _PAYS:
        return [verified(*pair) for pair in pairs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # a fork would inherit CUDA
        return list(pool.map(verified, *zip(*pairs, strict=True), chunksize=8))
