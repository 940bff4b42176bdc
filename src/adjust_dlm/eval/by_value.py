"""math-verify over many completions, on all CPUs: one of them takes 40 ms, some of them seconds.

Workers are processes of their own, `python -m adjust_dlm.eval.by_value`, which read pairs and write verdicts as JSON:
multiprocessing would import the caller's script anew, or fork a process that holds a CUDA context.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_PAYS = 64  # completions from which on other processes are worth their start
Pair = tuple[str, str]


def verified(text: str, right: str) -> bool:
    """Whether math-verify finds the gold answer in a completion."""
    from math_verify import parse, verify

    return bool(verify(gold=_gold(right), target=parse(text)))


@functools.lru_cache(maxsize=1)
def _gold(right: str) -> list[object]:
    """Of the completions of one problem, which stand together."""
    from math_verify import parse

    answer: list[object] = parse(f"$\\boxed{{{right}}}$")
    return answer


def all_verified(pairs: Sequence[Pair], *, workers: int) -> list[bool]:
    """`verified` of each (completion, gold answer), in order, in as many processes as there are workers.

    Raises:
        RuntimeError: a worker died, of lack of memory perhaps.
    """
    if workers <= 1 or len(pairs) < _PAYS:
        return [verified(*pair) for pair in pairs]
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(_elsewhere, [pairs[n::workers] for n in range(workers)]))
    out = [False] * len(pairs)
    for n, part in enumerate(parts):
        out[n::workers] = part
    return out


def _elsewhere(pairs: Sequence[Pair]) -> list[bool]:
    command = [sys.executable, "-m", "adjust_dlm.eval.by_value"]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise RuntimeError(f"a process of math-verify ended with {done.returncode}: {said}")
    verdicts: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return verdicts


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([verified(*pair) for pair in json.load(sys.stdin)]))
