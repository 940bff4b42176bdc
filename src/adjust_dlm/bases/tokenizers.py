"""Tokenizers of published checkpoints, fast and without remote code.

LLaDA ships `tokenizer.json`. Dream ships Qwen2's `vocab.json` and `merges.txt` with a tokenizer class of its own, whose
rules are Qwen2's: NFC, GPT-4-like splitting with single digits, byte-level BPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adjust_dlm.types import InputError


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, as a fast class of transformers, or None if there is none.

    Raises:
        InputError: its files are damaged, or a special token has no id in them, or another one than it gets.
    """
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    whole = (folder / "tokenizer.json").is_file()
    if not whole and not (folder / "vocab.json").is_file():
        return None
    kind: Any = PreTrainedTokenizerFast if whole else Qwen2Tokenizer
    settings = folder / "tokenizer_config.json"
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
        said = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        _check_ids(tokenizer, {token["content"]: int(n) for n, token in said.get("added_tokens_decoder", {}).items()})
    except Exception as error:  # tokenizers raises nothing narrower, and files of strangers may hold anything
        raise InputError(f"cannot read the tokenizer in {folder}: {' '.join(repr(error).split())}") from error
    return tokenizer


def _check_ids(tokenizer: Any, said: dict[str, int]) -> None:
    """Raises ValueError for an added token that has another id here, or none in its files: one was made up."""
    here = {str(token): n for n, token in tokenizer.added_tokens_decoder.items()}
    made = {token for token, n in here.items() if said and n >= tokenizer.vocab_size}
    for token in sorted(made | said.keys()):
        if said.get(token) != here.get(token):
            raise ValueError(f"added token {token!r} has id {said.get(token)} in its files, but {here.get(token)} here")
