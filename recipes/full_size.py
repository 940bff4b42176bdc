"""Writes a randomly initialised full-size checkpoint in shards, loads it back and generates: time and peak memory.

    python recipes/full_size.py dream OUT        # Dream-7B's shape, 15.2 GB in bf16
    python recipes/full_size.py llada OUT        # LLaDA-8B, 16.0 GB
    python recipes/full_size.py fast-1.5b OUT    # Fast-dLLM v2 1.5B, 3.1 GB
    python recipes/full_size.py fast-7b OUT      # Fast-dLLM v2 7B, 15.2 GB
    python recipes/full_size.py sdar-8b OUT      # SDAR-8B with blocks of 32, 16.4 GB

Prints a JSON line for every fact as soon as it is known. The text is noise: weights are random, and so is g.

With `--texts` and `--slice-states` also what a g costs on a base in blocks: `adjust trajectories` at each number of
texts at once, and steps of `adjust train --dry-run` on the last of them. Windows are those that are compared: what
hangs over a block's ends is computed and not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adjust_dlm import DecodeConfig, decode, load_base
from adjust_dlm.bases.family import FAMILIES
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.bench.clock import forget_peak
from adjust_dlm.data.prompts import unconditional
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.blocks import random_blocks
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import states_compared

QWEN = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "eos_token_id": 151643, "pad_token_id": 151643,
}  # fmt: skip
FAST = {**QWEN, "model_type": "Fast_dLLM_Qwen", "bd_size": 32, "eos_token_id": 151645, "bos_token_id": 151643}
CONFIGS: dict[str, dict[str, Any]] = {
    "dream": {**QWEN, "model_type": "Dream", "max_position_embeddings": 2048, "mask_token_id": 151666},
    "llada": {
        "model_type": "llada", "d_model": 4096, "mlp_hidden_size": 12288, "n_layers": 32, "n_heads": 32,
        "n_kv_heads": 32, "vocab_size": 126464, "embedding_size": 126464, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "max_sequence_length": 4096, "weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081,
        "pad_token_id": 126081, "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu",
        "rope": True,
    },
    "fast-1.5b": {
        **FAST, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "fast-7b": FAST,
    "sdar-8b": {
        **QWEN, "model_type": "sdar", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "block_size": 32,
        "mask_token_id": 151669,
    },
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], device: torch.device, shard_bytes: float) -> int:
    """Random bf16 weights under the published names, one shard after another; returns the bytes written."""
    family = FAMILIES[config["model_type"].lower()]
    shape = family.shape(config)
    with torch.device("meta"):
        names = {family.published(k): v.shape for k, v in Body(shape).state_dict().items()}
    if not config.get(*family.tied):
        names[family.head] = torch.Size([shape.vocab_size, shape.hidden_size])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Size]] = [{}]
    for name, size in names.items():
        if sum(s.numel() * 2 for s in shards[-1].values()) + size.numel() * 2 > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    index = {}
    for n, shard in enumerate(shards):
        file = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        made = {
            name: torch.full(size, float(not name.endswith("bias")), dtype=torch.bfloat16)  # norms are ones
            if len(size) == 1
            else torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator).cpu()
            for name, size in shard.items()
        }
        save_file(made, folder / file)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(size.numel() * 2 for size in names.values())


def gib(device: torch.device, what: str = "max_memory_allocated") -> float | None:
    """A figure of `torch.cuda` in GiB."""
    return getattr(torch.cuda, what)(device) / 2**30 if device.type == "cuda" else None


def say(fact: str, **more: Any) -> None:
    """One line, at once."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()}
    sys.stdout.write(json.dumps({"fact": fact, **rounded}) + "\n")
    sys.stdout.flush()


def generate(base: TransformerBase, rows: int, new_tokens: int) -> None:
    """By three decoders, in the eager form, with a fresh g."""
    torch.manual_seed(0)
    sampler = Sampler(base).to(base.device, base.dtype).eval()
    parameters = sum(p.numel() for p in sampler.parameters())
    say("g", parameters=parameters, gib_with_base=gib(base.device, "memory_allocated"))
    settings = DecodeConfig(max_new_tokens=new_tokens, tokens_per_step=4, suppress_eos=True)
    prompts = [[1, 2, 3]] * rows
    decode(base, prompts, settings.but(max_new_tokens=min(new_tokens, 8)), sampler=sampler, eager=True)  # loads kernels
    for name in ("joint", "parallel", "adjust"):
        forget_peak(base.device)
        result = decode(base, prompts, settings, decoder=name, sampler=sampler, eager=True)
        assert not (result.tokens_BL == base.spec.mask_id).any()
        say(name, rows=rows, new_tokens=new_tokens, seconds=result.seconds, base_calls=int(result.base_calls_B[0]),
            gib_peak=gib(base.device))  # fmt: skip


def cost(base: TransformerBase, folder: Path, options: argparse.Namespace) -> None:
    """What a g costs on a base in blocks: texts to train on, and steps of training on these."""
    made = ""
    new = options.text_tokens - len(unconditional(base))
    for rows in options.texts:
        made = str(folder / f"text-{rows}")
        forget_peak(base.device)
        texts = TrajectoriesConfig(
            output=made, num=rows, batch_size=rows, shard_rows=rows, max_new_tokens=new, suppress_eos=True
        )
        seconds = make_trajectories(texts, base, progress=False)["seconds"]
        say("trajectories", rows=rows, new_tokens=new, seconds=seconds, seconds_per_1000_texts=1000 * seconds / rows,
            gib_peak=gib(base.device))  # fmt: skip
    for states in options.slice_states:
        forget_peak(base.device)
        config = TrainConfig(
            output=str(folder / "g"), trajectories=(made,), slices=options.slices, slice_states=states, heldout=0,
            heldout_texts=0, suppress_eos=True, dry_run=True,
        )  # fmt: skip
        told, data = train(config, base), TrajectoryStore(made)
        how: dict[str, Any] = {"count": options.slices, "length": states, "rollout": config.rollout, "base": base}
        drawn = [random_blocks(data, range(len(data)), key=(0, step), **how) for step in range(50)]
        windows = sum(int(states_compared(part, config.rollout)[0]) for part in drawn) / len(drawn)
        step = told["seconds_per_step"] or math.nan
        say("training", slice_states=states, slices=options.slices, seconds_per_step=step, windows_of_step=windows,
            nominal_windows_of_step=told["windows"] / told["steps"], windows_per_second=windows / step,
            hours_per_million_windows=step / windows * 1e6 / 3600, memory_gib=told["memory_gib"],
            problems=told["problems"])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """One shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=CONFIGS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, nargs="*", default=[], help="in blocks: make texts, so many at once")
    parser.add_argument("--slice-states", type=int, nargs="*", default=[], help="time training on the last of these")
    parser.add_argument("--slices", type=int, default=8, help="texts of a training step")
    parser.add_argument("--text-tokens", type=int, default=128, help="of these texts, with their start")
    parser.add_argument("--shard-gib", type=float, default=5)
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=NUMBER", help="of the config: a smaller one")
    options = parser.parse_args(argv)
    config = CONFIGS[options.shape] | {key: int(n) for key, _, n in (c.partition("=") for c in options.change)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    started = time.perf_counter()
    size = write(options.output, config, device, options.shard_gib * 2**30)
    say("written", shape=options.shape, bytes=size, shards=len([*options.output.glob("*.safetensors")]),
        seconds=time.perf_counter() - started, card=card, torch=torch.__version__)  # fmt: skip
    forget_peak(device)
    started = time.perf_counter()
    base = load_base(str(options.output), device=device, dtype=torch.bfloat16)
    assert isinstance(base, TransformerBase)
    seconds = time.perf_counter() - started
    say("loaded", seconds=seconds, gib=gib(device, "memory_allocated"), gib_peak=gib(device), block=base.spec.block)
    generate(base, options.batch_size, options.max_new_tokens)
    cost(base, options.output, options)


if __name__ == "__main__":
    main()
