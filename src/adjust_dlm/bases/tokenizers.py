"""Tokenizers of published checkpoints, fast and without remote code.

LLaDA ships `tokenizer.json`. Dream ships Qwen2's `vocab.json` and `merges.txt` with a tokenizer class of its own, whose
rules are Qwen2's: NFC, GPT-4-like splitting with single digits, byte-level BPE.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from adjust_dlm.types import InputError

# Qwen2's split: contractions, words with one leading other character, single digits, punctuation, line ends, spaces.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
logger = logging.getLogger(__name__)
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "cls_token", "sep_token")


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, as transformers' fast class, or None if there is none.

    Raises:
        InputError: its files are damaged.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        settings = _json(folder / "tokenizer_config.json")
        core = _core(folder, settings)
        if core is None:
            return None
        special = _special(settings | _json(folder / "special_tokens_map.json"), settings, core.get_vocab())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)
        tokenizer.chat_template = _template(folder, settings)
    except Exception as error:  # tokenizers raises nothing narrower, and files of strangers may hold anything
        raise InputError(f"cannot read the tokenizer in {folder}: {error!r}") from error
    return tokenizer


def _special(given: dict[str, Any], settings: dict[str, Any], vocab: dict[str, int]) -> dict[str, str]:
    """Roles of special tokens. One that the vocabulary lacks would get an id that the model does not have: dropped."""
    tokens = {key: _content(given[key] or settings.get(key)) for key in _SPECIAL if given.get(key) or settings.get(key)}
    lost = {key: token for key, token in tokens.items() if token not in vocab}
    if lost:
        logger.info("special tokens that are not in the vocabulary are left out: %s", lost)
    return {key: token for key, token in tokens.items() if token in vocab}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found: Any = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    if not isinstance(found, str | None):
        raise TypeError(f"chat_template is a {type(found).__name__}, a text is wanted")
    return found


def _core(folder: Path, settings: dict[str, Any]) -> Any:
    """The `tokenizers` object: from its own file, or built from vocabulary and merges."""
    from tokenizers import Tokenizer

    if (folder / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"tokenizer.json: {error}") from error
    if not (folder / "vocab.json").is_file():
        return None
    return _qwen2(folder, settings)


def _qwen2(folder: Path, settings: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab: dict[str, int] = _json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    merges = [(left, right) for left, right in pairs]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    core.decoder = decoders.ByteLevel()
    added = {int(n): token for n, token in settings.get("added_tokens_decoder", {}).items()}
    if not added:
        plain = _json(folder / "added_tokens.json")
        added = {n: {"content": word, "special": True} for word, n in plain.items()}
    for number in sorted(added):
        token = added[number]
        flags = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
        word = AddedToken(token["content"], normalized=bool(token.get("normalized", False)), **flags)
        (core.add_special_tokens if flags["special"] else core.add_tokens)([word])
        got = core.token_to_id(token["content"])
        if got != number:
            raise ValueError(f"added token {token['content']!r} has id {number} in its files, but {got} here")
    return core
