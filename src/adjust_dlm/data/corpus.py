"""The training corpus of an adapted base: canvases of one fixed length, most of them sampled from the AR model.

Kinds (`KINDS`): `text` is `<|endoftext|>` and whatever the model samples behind it; `chat` a user turn and a reply,
both invented by the model; `lists` the tasks of `data.lists`; `questions` those of `data.questions` with the model's
own reply, kept where it is right; `files` the user's own texts and chats. No invented chat asks a held-out question.
A canvas is its tokens and `prompt_len`, the tokens in front that are given and never masked; after its end it is
filled with the first end token.

Folder: `{split}-{kind}-{shard}.parquet` (tokens int32 [L], prompt_len int16, kind int8) and `manifest.json`. A shard
depends on the settings and its own number alone: ranks make different shards, a finished one is never made again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases.tokenizers import Messages, chat_ids
from adjust_dlm.data.canvases import Canvas, Source, canvases
from adjust_dlm.data.settings import KINDS, MANIFEST, SPLITS, CorpusConfig, require_corpus
from adjust_dlm.data.store import write_columns
from adjust_dlm.data.texts import json_value, lines_of, read_text
from adjust_dlm.files import write_whole
from adjust_dlm.hub import read_json
from adjust_dlm.types import InputError, refusing, require

MIN_FILE_TOKENS = 16  # shorter pieces of the user's files are dropped
HELD_OUT_EVERY = 50  # one in so many canvases of the user's files is held out, or fewer
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Canvases of one split in memory: tokens int32 [N, L], prompt_len int16 [N], kind int8 [N]."""

    tokens_NL: Tensor
    prompt_len_N: Tensor
    kind_N: Tensor

    def of_kind(self, kind: str) -> Corpus:
        """The canvases of one kind."""
        return self._rows((self.kind_N == KINDS.index(kind)).nonzero()[:, 0])

    def like(self, other: Corpus) -> Corpus:
        """Its first canvases of every kind, as many as the other corpus has."""
        places = [(self.kind_N == kind).nonzero()[: int((other.kind_N == kind).sum()), 0] for kind in range(len(KINDS))]
        return self._rows(torch.cat(places))

    def _rows(self, place_R: Tensor) -> Corpus:
        return Corpus(self.tokens_NL[place_R], self.prompt_len_N[place_R], self.kind_N[place_R])


def build_corpus(folder: Path, config: CorpusConfig, source: Source, *, rank: int = 0, world: int = 1) -> None:
    """Makes the missing shards of this rank; with several ranks, wait for all before `load_corpus`.

    Raises:
        InputError: the folder holds a corpus of other settings, the model cannot chat, or a file is unreadable.
    """
    require(
        source.vocabulary.chat or not (config.chat or config.lists or config.questions),
        "the tokenizer lacks <|im_start|> or <|im_end|>, which chats, lists and questions need; ask for none of them",
    )
    _claim(folder, config)
    for name, (split, kind, shard, rows) in islice(config.shards().items(), rank, None, world):
        if not (folder / name).is_file():
            _write(folder / name, list(islice(canvases(config, source, split, kind, shard, rows), rows)), kind)
            logger.info("corpus: %s, %d canvases", name, rows)
    if config.text_files and rank == 0:
        _build_files(folder, config, source)


def load_corpus(folder: Path, split: str) -> Corpus:
    """All canvases of a split, in shard order.

    Raises:
        InputError: no corpus there, or shards are missing or damaged.
    """
    require_corpus(folder)
    manifest = _manifest(folder)
    names = [name for name in manifest["shards"] if name.startswith(f"{split}-")]
    lost = [name for name in names if not (folder / name).is_file()]
    require(not lost, f"the corpus {folder} is not complete: {len(lost)} shards are missing, such as {lost[:1]}")
    length = manifest["settings"]["length"]
    none = np.zeros((0, length), np.int32), np.zeros(0, np.int16), np.zeros(0, np.int8)
    parts = [none, *(_read(folder / name, length) for name in names)]
    tokens_NL, prompt_len_N, kind_N = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    return Corpus(tokens_NL, prompt_len_N, kind_N)


def _read(path: Path, length: int) -> tuple[Any, Any, Any]:
    """Tokens [N, L], prompt lengths and kinds of one shard."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hint = "; delete it and run `adjust adapt` again"
    with refusing(f"cannot read {path}", pa.ArrowException, OSError, KeyError, ValueError, first=True, hint=hint):
        table = pq.read_table(path)
        tokens_NL = table["tokens"].combine_chunks().flatten().to_numpy().reshape(-1, length)
        return tokens_NL, table["prompt_len"].to_numpy(), table["kind"].to_numpy()


def _build_files(folder: Path, config: CorpusConfig, source: Source) -> None:
    """The user's texts: one shard of each split."""
    paths = {split: folder / f"{split}-files-00000.parquet" for split in SPLITS}
    if all(path.is_file() for path in paths.values()):
        return
    canvases, lost = list[Canvas](), 0
    for text in (text for path in config.text_files for text in _texts(path)):
        found = list(_cut(text, config, source) if isinstance(text, str) else _chat(text, config, source))
        canvases.extend(found)
        lost += not isinstance(text, str) and not found
    if lost:
        said = "corpus: %d chats of the text files are left out: longer than %d tokens, without a reply, or with a MASK"
        logger.warning(said, lost, config.length)
    require(bool(canvases), f"the text files hold no piece of at least {MIN_FILE_TOKENS} tokens, and no chat that fits")
    every = max(HELD_OUT_EVERY, -(-len(canvases) // max(1, config.heldout)))
    held = [n % every == 0 and config.heldout > 0 and len(canvases) > 1 for n in range(len(canvases))]
    for split, path in paths.items():
        _write(path, [c for c, out in zip(canvases, held, strict=True) if out == (split == "heldout")], "files")


def _texts(path: Path) -> Iterator[str | Messages]:
    """One text of a .txt file, or a text or a chat of every line of a .jsonl file."""
    if path.suffix == ".txt":
        yield read_text(path)
        return
    for where, line in lines_of(path):
        item = json_value(line, where)
        fields = item if isinstance(item, dict) else {}
        text, said = fields.get("text"), fields.get("messages")
        if text is None and isinstance(said, list) and said:
            good = all(
                isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in said
            )
            require(
                good and len(said) > 1 and said[-1]["role"] == "assistant",
                f"{where}: messages must be objects with a role and a content, and end in a reply of the assistant",
            )
            yield said
            continue
        if not isinstance(text, str):
            raise InputError(f"{where}: not an object with a field 'text' or 'messages'")
        yield text


def _cut(text: str, config: CorpusConfig, source: Source) -> Iterator[Canvas]:
    """Canvases of one text: start token and tokens, MASK left out; the last piece is filled with end tokens."""
    encoded: list[int] = source.tokenizer.encode(text, add_special_tokens=False)
    ids = [token for token in encoded if token != source.vocabulary.mask_id]  # it may be spelled out, but is no answer
    size, end = config.length - 1, source.vocabulary.end_ids[0]
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        if len(piece) >= min(MIN_FILE_TOKENS, size):
            yield [source.vocabulary.bos_id, *piece] + [end] * (size - len(piece)), 1


def _chat(messages: Messages, config: CorpusConfig, source: Source) -> Iterator[Canvas]:
    """The canvas of a chat, where it fits: all before the last reply is given; end tokens fill it up."""
    require(source.vocabulary.chat, "the tokenizer lacks <|im_start|> or <|im_end|>, which the chats of the files need")
    how = {"chat_template": source.template, "tokenize": False, "add_generation_prompt": True}
    tokenizer, end = source.tokenizer, source.vocabulary.end_ids[0]
    prompt = chat_ids(tokenizer, lambda said: str(tokenizer.apply_chat_template(said, **how)), messages[:-1])
    reply = chat_ids(tokenizer, lambda said: said[0]["content"], messages[-1:])
    room = config.length - len(prompt) - len(reply)
    if room > 0 and reply and source.vocabulary.mask_id not in prompt + reply:
        yield [*prompt, *reply, *[end] * room], len(prompt)


def _manifest(folder: Path) -> dict[str, Any]:
    """What `_claim` wrote."""
    manifest = read_json(folder / MANIFEST)
    good = {"settings", "shards"} <= manifest.keys()
    require(good, f"{folder / MANIFEST} is not the manifest of a corpus: it lacks settings or shards")
    return manifest


def _claim(folder: Path, config: CorpusConfig) -> None:
    """Writes the manifest, or checks that the one there says the same."""
    config.check_files()
    settings = config.identity()
    names = [*config.shards(), *(f"{split}-files-00000.parquet" for split in SPLITS if config.text_files)]
    path = folder / MANIFEST
    if path.is_file():
        then = _manifest(folder)["settings"]
        for key, value in settings.items():
            require(then.get(key) == value, f"{folder} holds a corpus with {key} = {then.get(key)!r}, not {value!r}")
    text = json.dumps({"format": 1, "kinds": KINDS, "settings": settings, "shards": names}, indent=2)
    write_whole({path: text + "\n"})


def _write(path: Path, canvases: list[Canvas], kind: str) -> None:
    """One shard, whole or not at all."""
    import pyarrow as pa

    tokens = np.array([tokens for tokens, _ in canvases], dtype=np.int32)
    length = tokens.shape[1] if len(canvases) else 1
    columns = {
        "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), length),
        "prompt_len": pa.array([prompt for _, prompt in canvases], pa.int16()),
        "kind": pa.array([KINDS.index(kind)] * len(canvases), pa.int8()),
    }
    write_columns(path, columns)
