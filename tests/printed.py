"""What printed commands need to run in a moment: tiny bases under the printed names, files, and small numbers."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.bases import adapted, autoregressive, register_base
from adjust_dlm.bases import base as registry
from adjust_dlm.commands import settings
from adjust_dlm.eval import scores
from helpers import tiny_sampler
from tiny_ar import chat_base, save_tiny

BASES = (
    "smol", "smol-block", "antiberty", "models/dream", "runs/base", "runs/block", "path/to/Dream-v0-Base-7B",
    "Dream-org/Dream-v0-Instruct-7B", "GSAI-ML/LLaDA-8B-Base",
)  # fmt: skip
SMALL: dict[str, Any] = {
    "num": 8, "n": 2, "steps": 2, "max_new_tokens": 6, "batch_size": 4, "limit": 1, "heldout": 4, "heldout_texts": 2,
    "slices": 2, "slice_states": 5, "shots": 1, "list_n": 1, "list_max_new_tokens": 6, "divergence": 2,
    "max_seconds": 1, "per_subject": 1, "shard_rows": 8, "accumulate": 2, "runs": 1, "seconds": 0.3, "rows": 4,
    "cell_seconds": 0.05, "text": 8, "chat": 8, "lists": 8, "length": 24, "sample_batch": 8, "micro_batch": 4,
    "eval_every": 2, "port": 0,
}  # fmt: skip
ALWAYS = ("limit", "max_seconds")  # where 0 is no limit
FEW = {
    "variants": 2, "list_variants": 1, "decoders": 2, "tokens_per_step": 1, "temperatures": 1, "temperature": 1,
    "tasks": 2, "batch_sizes": 1, "new_tokens": 1,
}  # fmt: skip
TASK = {"question": "What is 1+1?", "answer": "It is 1+1 = <<1+1=2>>2.\n#### 2"}
SUM = {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2", "subject": "Algebra", "level": 1}
DOUBLE = {
    "task_id": "Own/1", "prompt": 'def double(x):\n    """Twice x."""\n', "entry_point": "double",
    "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}  # fmt: skip
ADD = [
    {
        "task_id": n, "text": f"Add {n}.", "prompt": f"Add {n}.", "code": f"def add(x):\n    return x + {n}",
        "test_list": [f"assert add(1) == {n + 1}"], "test_setup_code": "", "test_imports": [],
    }
    for n in range(1, 12)
]  # fmt: skip
DATA: dict[str, list[Any]] = {
    "test.jsonl": [TASK], "train.jsonl": [TASK | {"question": f"What is {n}?"} for n in range(8)],
    "math_test.jsonl": [SUM], "math_test_5000.jsonl": [SUM],
    "math_train.jsonl": [SUM | {"problem": f"What is ${n}$?"} for n in range(4)], "HumanEval.jsonl.gz": [DOUBLE],
    "mbpp.jsonl": ADD, "sanitized-mbpp.json": [ADD], "prompts.jsonl": [{"prompt": "Why?"}], "other.txt": ["a text"],
}  # fmt: skip
HUB = {
    "train": "train.jsonl",
    "gsm8k": "test.jsonl",
    "math": "math_test.jsonl",
    "humaneval": "HumanEval.jsonl.gz",
    "mbpp": "mbpp.jsonl",
}


def small(given: Any) -> Any:
    """The same settings with numbers that take a moment, on the CPU, and files for what the Hub has."""
    changes: dict[str, Any] = {}
    fixed = ("slices", "slice_states", "accumulate") if getattr(given, "preset", "") in ("printed", "released") else ()
    for field in fields(given):
        value, most = getattr(given, field.name), None if field.name in fixed else SMALL.get(field.name)
        if is_dataclass(value):
            changes[field.name] = small(value)
        elif field.name in FEW and isinstance(value, tuple):
            changes[field.name] = value[: FEW[field.name]]
        elif most is not None and isinstance(value, int | float) and not isinstance(value, bool):
            changes[field.name] = min(value, most) or most * (field.name in ALWAYS)
        elif field.name in ("data", "shots_data") and isinstance(value, str) and ":" in value:
            changes[field.name] = next(file for name, file in HUB.items() if name in value.lower())
        elif field.name in ("compile", "plot"):
            changes[field.name] = False
        elif field.name in ("people", "features") and value:
            changes[field.name] = {"people": (3,), "features": (1,)}[field.name]
    return replace(given, **changes)


def fill(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes `folder` a place where printed commands run, and this process one that finds tiny models by their names."""
    made, ar = {size: chat_base(context=4096, block=size) for size in (None, 4, 32)}, save_tiny(folder / "ar")
    for base in made.values():
        base.ar_source = str(ar)
    patch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    patch.setattr(adapted, "MODELS", folder / "shipped")
    for name in BASES:
        base = made[{"runs/block": 4, "smol-block": 32}.get(name)]
        register_base(name, "tiny")(lambda base=base, **_: base)
        tiny_sampler(base).save(folder / "shipped" / f"{name}-sampler")
    for module in (adapted, autoregressive, scores):
        patch.setattr(module, "ar_folder", lambda source, **_: ar)
    patch.setattr("adjust_dlm.eval.mauve.RESAMPLES", 10)
    parse = settings.parse

    def parse_small(*args: Any, **kwargs: Any) -> Any:
        config, common = parse(*args, **kwargs)
        return small(config), common

    patch.setattr(settings, "parse", parse_small)
    for name, rows in DATA.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        raw = "".join(line + "\n" for line in lines).encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


BEFORE = {  # what a page has at hand
    "README.md": ["trajectories --output runs/text"],
    "evaluation.md": [
        "generate Once Twice --num-samples 2 --output runs/a",
        "generate Once Twice --num-samples 2 --decoder joint --output runs/joint",
        "eval gsm8k --shots 0 --tokens-per-step 4 --output runs/gsm8k", "eval table --output runs/table",
        "eval nll runs/a/samples.jsonl --output runs/texts",
    ],
    "sharing-a-sampler.md": [
        "trajectories --base runs/base --output runs/text", "eval table --base runs/base --output runs/table",
        "train --base runs/base --trajectories runs/text --output runs/g",
        "export --base runs/base --sampler runs/g/sampler --output shared/g",
    ],
}  # fmt: skip
CANNOT = {  # part of a line -> why it is not run
    "adjust chat": "it reads stdin",
    "adjust adapt": "it needs an autoregressive model that can write chats",
    "--base antiberty": "it needs that model: only its letters are residues and masks",
    "--base dream-7b-shape": "it needs the memory of a 7B model",
    "--base llada-8b-shape": "it needs the memory of an 8B model",
    "--base small-shape": "it takes minutes on a CPU",
    "--push": "it writes to the Hub",
    "--engine ray": "it starts a Ray",
    "--from-released": "it needs the authors' checkpoint",
    "ORG/NAME": "no such repository is meant",
    "--data /data/parallelbench": "it needs the benchmark's own files",
    "docker ": "it needs docker",
    "serve run": "it starts a Ray",
    "serve deploy": "it starts a Ray",
    "serve status": "it starts a Ray",
    "ray start": "it starts a Ray",
    "make ": "it installs all of it",
    "recipes/smol.sh": "it takes hours",
    "recipes/card.sh": "it takes hours",
    "sed -i": "it changes the source",
    "export ADJUST_API_KEY": "it is no command of ours",
    "python recipes/": "recipes have tests of their own",
    "python -m adjust_dlm.eval.lm_eval": "test_lm_eval.py runs it",
}
