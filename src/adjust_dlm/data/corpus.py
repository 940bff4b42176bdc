"""The training corpus of an adapted base: canvases of one fixed length, most of them sampled from the AR model.

Kinds (`KINDS`): `text` is `<|endoftext|>` and whatever the model samples behind it; `chat` a user turn and a reply,
both invented by the model; `lists` the tasks of `data.lists`; `files` the user's own texts. A canvas is its tokens and
`prompt_len`, the tokens in front that are given and never masked; after its end it is filled with the first end token.

Folder: `{split}-{kind}-{shard}.parquet` (tokens int32 [L], prompt_len int16, kind int8) and `manifest.json`. A shard
depends on the settings and its own number alone: ranks make different shards, a finished one is never made again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases.hub import once, read_json
from adjust_dlm.data.ar import CHAT_TURN, CHAT_USER, Vocabulary, ar_sample
from adjust_dlm.data.lists import list_tasks
from adjust_dlm.files import write_whole
from adjust_dlm.types import DecodeConfig, InputError, require, require_kinds

KINDS = ("text", "chat", "lists", "files")
SPLITS = ("train", "heldout")
MANIFEST = "manifest.json"
MAX_USER_TOKENS = 64
SHARD_ROWS = 4096  # canvases of a shard
MIN_FILE_TOKENS = 16  # shorter pieces of the user's files are dropped
HELD_OUT_EVERY = 50  # one in so many canvases of the user's files is held out
MIN_YIELD = 0.005  # a model that invents fewer chats than this does not know the template
logger = logging.getLogger(__name__)
Canvas = tuple[list[int], int]


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """What a corpus holds; a folder is resumed only with the same settings.

    Attributes:
        ar: the autoregressive model: `smol`, or the path of a Llama or Qwen2 folder with tied embeddings.
        text: canvases of plain text to sample.
        chat: canvases of chat to sample.
        lists: canvases of list tasks to make.
        heldout: canvases of each of these kinds kept for evaluation.
        text_files: .txt files (one text each) or .jsonl files (field `text` of every line) of your own.
        length: tokens of a canvas, the start token included.
        sample_batch: rows sampled at a time.
        sample_temperature: temperature of the corpus.
        sample_top_p: nucleus of the corpus.
        seed: names the corpus (and, in training, the adapters' start, the order, the times and the masks).
    """

    ar: str = "smol"
    text: int = 120_000
    chat: int = 40_000
    lists: int = 60_000
    heldout: int = 1024
    text_files: tuple[Path, ...] = ()
    length: int = 129
    sample_batch: int = 4096
    sample_temperature: float = 1.0
    sample_top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        for name in ("text", "chat", "lists", "heldout"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be >= 0")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; it must lie in 0..2**63-1")
        require(self.sample_batch >= 1, f"sample_batch is {self.sample_batch}; it must be at least 1")
        DecodeConfig(temperature=self.sample_temperature, top_p=self.sample_top_p)  # checks them
        require(self.length >= 2, f"length is {self.length}; a canvas needs at least 2 tokens")
        asked = self.text + self.chat + self.lists + len(self.text_files)
        require(asked > 0, "the corpus is empty; ask for some canvases")

    def identity(self) -> dict[str, Any]:
        """The settings that a folder belongs to, files by their content."""
        from adjust_dlm.bases.adapted import file_digest

        same = {name: getattr(self, name) for name in ("ar", "text", "chat", "lists", "heldout", "length", "seed")}
        sampled = {"temperature": self.sample_temperature, "top_p": self.sample_top_p, "shard_rows": SHARD_ROWS}
        return {**same, **sampled, "files": file_digest(*self.text_files) if self.text_files else None}

    def shards(self) -> dict[str, tuple[str, str, int, int]]:
        """File name -> (split, kind, shard number, rows) of all sampled shards."""
        out = {}
        for split, kind in product(SPLITS, KINDS[:3]):
            asked: int = getattr(self, kind)
            rows = asked if split == "train" else self.heldout if asked else 0
            for n, start in enumerate(range(0, rows, SHARD_ROWS)):
                out[f"{split}-{kind}-{n:05d}.parquet"] = split, kind, n, min(SHARD_ROWS, rows - start)
        return out


@dataclass(frozen=True)
class Corpus:
    """Canvases of one split in memory: tokens int32 [N, L], prompt_len int16 [N], kind int8 [N]."""

    tokens_NL: Tensor
    prompt_len_N: Tensor
    kind_N: Tensor

    def of_kind(self, kind: str) -> Corpus:
        """The canvases of one kind."""
        keep_N = self.kind_N == KINDS.index(kind)
        return Corpus(self.tokens_NL[keep_N], self.prompt_len_N[keep_N], self.kind_N[keep_N])


class Source(NamedTuple):
    """Where canvases come from: a causal model in eval mode, its tokenizer and its special ids."""

    model: Any
    tokenizer: Any
    vocabulary: Vocabulary


def build_corpus(folder: Path, config: CorpusConfig, source: Source, *, rank: int = 0, world: int = 1) -> None:
    """Makes the missing shards of this rank; with several ranks, wait for all before `load_corpus`.

    Raises:
        InputError: the folder holds a corpus of other settings, the model cannot chat, or a file is unreadable.
    """
    require(
        source.vocabulary.chat or not (config.chat or config.lists),
        "the tokenizer lacks <|im_start|> or <|im_end|>, which chat and list canvases need; ask for none of them",
    )
    _claim(folder, config)
    for name, (split, kind, shard, rows) in islice(config.shards().items(), rank, None, world):
        if not (folder / name).is_file():
            _write(folder / name, list(islice(_canvases(config, source, split, kind, shard, rows), rows)), kind)
            logger.info("corpus: %s, %d canvases", name, rows)
    if config.text_files and rank == 0:
        _build_files(folder, config, source)


def load_corpus(folder: Path, split: str) -> Corpus:
    """All canvases of a split, in shard order.

    Raises:
        InputError: no corpus there, or shards are missing or damaged.
    """
    require((folder / MANIFEST).is_file(), f"no corpus at {folder} ({MANIFEST} is missing)")
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

    try:
        table = pq.read_table(path)
        tokens_NL = table["tokens"].combine_chunks().flatten().to_numpy().reshape(-1, length)
        return tokens_NL, table["prompt_len"].to_numpy(), table["kind"].to_numpy()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot read {path}: {reason}; delete it and run `adjust adapt` again") from error


def chat_canvas(
    sample: list[int], prefix: list[int], turn: list[int], end_ids: tuple[int, ...], length: int
) -> Canvas | None:
    """A canvas from what the model wrote after the user prefix, or None if it is no chat.

    A chat has a user turn of 1 to `MAX_USER_TOKENS` tokens, closed by `turn` (whose first token is the first end token
    of the sample), and a reply of at least one token. The reply is given up to its first end token and filled with
    end tokens; a reply without one is kept as it is cut.
    """
    start = next((n for n, token in enumerate(sample) if token in end_ids), None)
    if start is None or not 1 <= start <= MAX_USER_TOKENS or sample[start : start + len(turn)] != turn:
        return None
    first = start + len(turn)
    end = next((n for n in range(first, len(sample)) if sample[n] in end_ids), len(sample) - 1)
    if end < first or sample[first] in end_ids:
        return None
    tokens = prefix + sample[: end + 1]
    return tokens + [end_ids[0]] * (length - len(tokens)), len(prefix) + first


def _canvases(config: CorpusConfig, source: Source, split: str, kind: str, shard: int, rows: int) -> Iterator[Canvas]:
    """The stream of canvases of one shard; its first `rows` are the shard."""
    stream = 2 * KINDS.index(kind) + SPLITS.index(split)
    first_row = (stream << 40) + (shard << 24)
    if kind == "lists":
        return _list_canvases(config, source, seed=(config.seed << 32) + shard, held_out=split == "heldout")
    if kind == "text":
        prefix = [source.vocabulary.bos_id]
        return ((prefix + sample, 1) for sample in _draw(config, source, [], prefix, first_row, rows))
    return _chat_canvases(config, source, first_row, rows)


def chat_context(tokenizer: Any) -> str:
    """What the model's own chat template puts before the user's first turn, such as a system turn.

    Chats are sampled behind it, because the model invents many more there, and stored without it.
    """
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": "."}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False))
    return text.partition(CHAT_USER)[0] if CHAT_USER in text else ""


def _draw(
    config: CorpusConfig, source: Source, context: list[int], prefix: list[int], row: int, count: int
) -> list[list[int]]:
    """`count` samples that fill a canvas behind `prefix`; `context` stands before it and is not part of the canvas."""
    limit = range(source.vocabulary.token_limit, source.vocabulary.size)
    return ar_sample(
        source.model, context + prefix, count=count, new_tokens=config.length - len(prefix),
        batch_size=config.sample_batch, seed=config.seed, temperature=config.sample_temperature,
        top_p=config.sample_top_p, forbid=[source.vocabulary.mask_id, *limit], first_row=row,
    ).tolist()  # fmt: skip


def _chat_canvases(config: CorpusConfig, source: Source, first_row: int, rows: int) -> Iterator[Canvas]:
    prefix: list[int] = source.tokenizer.encode(CHAT_USER, add_special_tokens=False)
    context: list[int] = source.tokenizer.encode(chat_context(source.tokenizer), add_special_tokens=False)
    turn: list[int] = source.tokenizer.encode(CHAT_TURN, add_special_tokens=False)
    tried = kept = 0
    count = min(config.sample_batch, 4 * rows)
    while True:
        for sample in _draw(config, source, context, prefix, first_row + tried, count):
            canvas = chat_canvas(sample, prefix, turn, source.vocabulary.end_ids, config.length)
            if canvas is not None:
                kept += 1
                yield canvas
        tried += count
        logger.info("corpus: %d of %d samples are chats", kept, tried)
        message = f"only {kept} of {tried} samples after {CHAT_USER!r} are a chat; ask for no chat canvases"
        require(kept >= MIN_YIELD * tried, message)


def _list_canvases(config: CorpusConfig, source: Source, seed: int, held_out: bool) -> Iterator[Canvas]:
    tasks = list_tasks(seed, held_out=held_out)
    end = source.vocabulary.end_ids[0]
    while batch := list(islice(tasks, 1024)):
        prompts = [CHAT_USER + task.prompt + CHAT_TURN for task in batch]
        encoded = [
            source.tokenizer(texts, add_special_tokens=False)["input_ids"]
            for texts in (prompts, [t.answer for t in batch])
        ]
        fits = 0
        for prompt, answer in zip(*encoded, strict=True):
            tokens = [*prompt, *answer, end]
            if len(tokens) <= config.length:
                fits += 1
                yield tokens + [end] * (config.length - len(tokens)), len(prompt)
        require(fits > 0, f"no list task fits a canvas of {config.length} tokens; raise the length or ask for none")


def _build_files(folder: Path, config: CorpusConfig, source: Source) -> None:
    """The user's texts: one shard of each split."""
    paths = {split: folder / f"{split}-files-00000.parquet" for split in SPLITS}
    if all(path.is_file() for path in paths.values()):
        return
    canvases = [canvas for path in config.text_files for text in _texts(path) for canvas in _cut(text, config, source)]
    require(bool(canvases), f"the text files hold no piece of at least {MIN_FILE_TOKENS} tokens")
    held = [n % HELD_OUT_EVERY == 0 and config.heldout > 0 and len(canvases) > 1 for n in range(len(canvases))]
    for split, path in paths.items():
        _write(path, [c for c, out in zip(canvases, held, strict=True) if out == (split == "heldout")], "files")


def _texts(path: Path) -> Iterator[str]:
    """One text of a .txt file, or one of every line of a .jsonl file."""
    require(path.suffix in (".txt", ".jsonl"), f"{path}: text files end in .txt or .jsonl")
    if path.suffix == ".txt":
        yield read_text(path)
        return
    for where, line in lines_of(path):
        try:
            text = json.loads(line)["text"]
            text.encode()  # a string, and no half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{where}: not an object with a field 'text'") from error
        yield text


def read_text(path: Path) -> str:
    """A whole file; raises InputError unless it is UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """`FILE, line N` and what stands there, spaces too, without blank lines. Line feeds alone end one, not U+2028."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    return ((f"{path}, line {number}", line) for number, line in lines if line.strip())


def json_value(text: str, where: str) -> Any:
    """What a JSON text holds; `where` names it in the InputError. Half a character, which JSON can spell, is none."""
    try:
        value = json.loads(text, object_pairs_hook=once)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a character: \\u{ord(error.object[error.start]):x}") from error
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    return value


def _cut(text: str, config: CorpusConfig, source: Source) -> Iterator[Canvas]:
    """Canvases of one text: start token and tokens, MASK left out; the last piece is filled with end tokens."""
    encoded: list[int] = source.tokenizer.encode(text, add_special_tokens=False)
    ids = [token for token in encoded if token != source.vocabulary.mask_id]  # it may be spelled out, but is no answer
    size, end = config.length - 1, source.vocabulary.end_ids[0]
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        if len(piece) >= min(MIN_FILE_TOKENS, size):
            yield [source.vocabulary.bos_id, *piece] + [end] * (size - len(piece)), 1


def _manifest(folder: Path) -> dict[str, Any]:
    """What `_claim` wrote."""
    manifest = read_json(folder / MANIFEST)
    good = {"settings", "shards"} <= manifest.keys()
    require(good, f"{folder / MANIFEST} is not the manifest of a corpus: it lacks settings or shards")
    return manifest


def _claim(folder: Path, config: CorpusConfig) -> None:
    """Writes the manifest, or checks that the one there says the same."""
    lost = [str(path) for path in config.text_files if not path.is_file()]
    require(not lost, f"there is no file {', '.join(lost)}")
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
    import pyarrow.parquet as pq

    tokens = np.array([tokens for tokens, _ in canvases], dtype=np.int32)
    length = tokens.shape[1] if len(canvases) else 1
    table = pa.table(
        {
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), length),
            "prompt_len": pa.array([prompt for _, prompt in canvases], pa.int16()),
            "kind": pa.array([KINDS.index(kind)] * len(canvases), pa.int8()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole({path: sink.getvalue()})
