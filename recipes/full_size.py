"""Writes a randomly initialised full-size checkpoint in shards, loads it back and generates: time and peak memory.

    python recipes/full_size.py dream OUT      # Dream-7B shape, 15.2 GB in bf16
    python recipes/full_size.py llada OUT      # LLaDA-8B shape, 16.0 GB

Prints one JSON object. The text is noise: weights are random, and so is g.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from adjust_dlm import DecodeConfig, decode, load_base
from adjust_dlm.bases.family import FAMILIES
from adjust_dlm.bases.layers import Body
from adjust_dlm.sampler import Sampler

CONFIGS = {
    "dream": {
        "model_type": "Dream", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 2048, "tie_word_embeddings": False, "mask_token_id": 151666,
        "eos_token_id": 151643, "pad_token_id": 151643,
    },
    "llada": {
        "model_type": "llada", "d_model": 4096, "mlp_hidden_size": 12288, "n_layers": 32, "n_heads": 32,
        "n_kv_heads": 32, "vocab_size": 126464, "embedding_size": 126464, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "max_sequence_length": 4096, "weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081,
        "pad_token_id": 126081, "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu",
        "rope": True,
    },
}  # fmt: skip


def write(folder: Path, config: dict[str, object], device: torch.device, shard_bytes: int = 5 << 30) -> int:
    """Random bf16 weights under the published names, one shard after another; returns the bytes written."""
    family = FAMILIES[str(config["model_type"]).lower()]
    shape = family.shape(config)
    with torch.device("meta"):
        names = {family.published(k): v.shape for k, v in Body(shape).state_dict().items()}
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
            name: torch.ones(size, dtype=torch.bfloat16)
            if len(size) == 1  # norms
            else torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator).cpu()
            for name, size in shard.items()
        }
        save_file(made, folder / file)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(size.numel() * 2 for size in names.values())


def main() -> None:
    """One family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    options = parser.parse_args()
    config = dict(CONFIGS[options.family])
    if options.layers:
        config["num_hidden_layers" if options.family == "dream" else "n_layers"] = options.layers
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    size = write(options.output, config, device)
    started = time.perf_counter()
    base = load_base(str(options.output), device=device, dtype=torch.bfloat16)
    loaded = time.perf_counter() - started
    torch.manual_seed(0)
    sampler = Sampler(base).to(base.device, base.dtype).eval()
    facts: dict[str, object] = {"family": options.family, "bytes": size, "load_seconds": round(loaded, 2)}
    facts |= {"g_parameters": sum(p.numel() for p in sampler.parameters()), "torch": torch.__version__}
    facts["card"] = torch.cuda.get_device_name() if cuda else "cpu"
    facts["gib_after_load"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    settings = DecodeConfig(max_new_tokens=options.max_new_tokens, tokens_per_step=4, suppress_eos=True)
    for name in ("joint", "parallel", "adjust"):
        prompts = [[1, 2, 3]] * options.batch_size
        result = decode(base, prompts, settings, decoder=name, sampler=sampler)
        facts[f"{name}_seconds"] = round(result.seconds, 2)
        facts[f"{name}_base_calls"] = int(result.base_calls_B[0])
        assert not (result.tokens_BL == base.spec.mask_id).any()
    facts["gib_peak"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
