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
from typing import Any

_PAYS = 64  # completions from which on other processes are worth their start
Pair = tuple[str, str]  # completion, gold answer


def verified(text: str, right: str) -> bool:
    """Whether math-verify finds the gold answer in a completion."""
    from math_verify import parse, verify

    return bool(verify(gold=_gold(right), target=parse(text)))


@functools.lru_cache(maxsize=1)  # completions of one problem stand together
def _gold(right: str) -> Any:
    from math_verify import parse

    return parse(f"$\\boxed{{{right}}}$")


def all_verified(pairs: Sequence[Pair], *, workers: int) -> list[bool]:
    """`verified` of each pair, in order, in as many processes as there are workers.

    Raises:
        RuntimeError: a worker died, of lack of memory perhaps.
    """
    if workers <= 1 or len(pairs) < _PAYS:
        return [verified(*pair) for pair in pairs]
    out = [False] * len(pairs)
    with ThreadPoolExecutor(workers) as pool:
        for n, part in enumerate(pool.map(_elsewhere, [pairs[n::workers] for n in range(workers)])):
            out[n::workers] = part
    return out


def _elsewhere(pairs: Sequence[Pair]) -> Any:
    command = [sys.executable, "-m", "adjust_dlm.eval.by_value"]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise RuntimeError(f"a process of math-verify ended with {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([verified(*pair) for pair in json.load(sys.stdin)]))
