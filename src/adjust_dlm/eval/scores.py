"""`adjust eval nll` and `adjust eval mauve`: texts that exist already, under any autoregressive judge.

Files: `.jsonl` with a `text` in every line (what `adjust generate`, `eval table` and the downstream tasks write) or
with `tokens` (the kept `texts/*.jsonl`), or plain text, one text a line or a paragraph. Texts of several decoders in
one file are scored apart.

Texts are tokenised with the judge's own tokenizer, without special tokens, and cut at its first end token. Each is
conditioned on the judge's `<|endoftext|>`, or else its start token, or else its end token, so that every token of a
text is scored; the one in front is not. Behind it stands what the text continues, where a line has that (`given`, which
`adjust generate` and `adjust compare` write); it is not scored, either. MAUVE looks at texts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from adjust_dlm.bases.autoregressive import ar_folder, load_ar
from adjust_dlm.bases.base import cut_at_end, pick_device
from adjust_dlm.bases.tokenizers import read_tokenizer
from adjust_dlm.eval.mauve import features, mauve
from adjust_dlm.eval.nll import NllScore, score_nll
from adjust_dlm.eval.settings import MauveConfig, NllConfig, Split, is_lines, plain_text
from adjust_dlm.eval.tasks.task_files import read_rows
from adjust_dlm.hub import local
from adjust_dlm.types import require

END_OF_TEXT = "<|endoftext|>"


class Line(NamedTuple):
    """A text, or its ids, and what it continues."""

    item: str | list[int]
    given: str = ""


def read_texts(file: str, split: Split = "line") -> dict[str, list[Line]]:
    """Decoder -> its texts, or token lists; "" where the file names no decoder.

    Raises:
        InputError: no such file, nothing in it, a line without text and tokens, or whose `given` is no text.
    """
    if is_lines(file):
        groups: dict[str, list[Line]] = {}
        for number, row in enumerate(read_rows(file), start=1):
            item: Any = row.get("tokens") if row.get("text") is None else row["text"]
            ids = isinstance(item, list) and all(type(token) is int and token >= 0 for token in item)
            require(isinstance(item, str) or ids, f"{file}, row {number} has neither `text` nor `tokens`")
            given = row.get("given", "")
            require(isinstance(given, str), f"{file}, row {number}: given is {given!r}; it must be a text")
            groups.setdefault(_group(row), []).append(Line(item, given))
        return groups
    content = plain_text(file)
    if split == "line":
        return {"": [Line(line.rstrip()) for line in content.removesuffix("\n").split("\n")]}
    parts = "\n".join(line.rstrip() for line in content.split("\n")).split("\n\n")
    return {"": [Line(part.strip("\n")) for part in parts if part.strip()]}


def _group(line: dict[str, Any]) -> str:
    """The decoder that wrote a line, with K and temperature, as far as the line says."""
    k, t = line.get("tokens_per_step"), line.get("temperature")
    words = [line.get("decoder"), f"K={k}" if k else None, f"T={t:g}" if isinstance(t, int | float) else None]
    return " ".join(str(word) for word in words if word) if line.get("decoder") else ""


class Judge(NamedTuple):
    """A causal LM and its tokenizer, the id in front of a text, and the ids of which the first one ends it."""

    name: str
    model: Any
    tokenizer: Any
    start_id: int
    end_ids: frozenset[int]

    def ids(self, text: str) -> list[int]:
        """What is scored of a text."""
        return cut_at_end(self.tokenizer.encode(text, add_special_tokens=False), self.end_ids)

    def score(self, texts: Sequence[Sequence[int]], given: Sequence[str], batch_size: int) -> NllScore:
        """NLL of texts, from their ids, behind what each of them continues."""
        before = [self.tokenizer.encode(text, add_special_tokens=False) for text in given]
        return score_nll(self.model, texts, condition_id=self.start_id, batch_size=batch_size, given=before)


def load_judge(config: NllConfig) -> Judge:
    """The judge that the settings name.

    Raises:
        InputError: no model there, or a start token that it does not have.
    """
    device = pick_device(config.device)
    automatic = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = automatic if config.dtype == "auto" else getattr(torch, config.dtype)
    model, tokenizer = load_ar(config.judge, device=device, dtype=dtype)
    start = start_of(tokenizer, model.config, config.start)
    return Judge(config.judge, model, tokenizer, start, end_ids(tokenizer, model))


def start_of(tokenizer: Any, model_config: Any, named: str = "") -> int:
    """Id of the token in front of a text: the named one, else <|endoftext|>, the start token, the end token.

    Raises:
        InputError: the judge does not have the named one, or has none of these.
    """
    vocab = tokenizer.get_vocab()
    require(not named or named in vocab, f"the judge has no token {named!r}; name another with --start")
    ends = getattr(model_config, "eos_token_id", None)
    ends = ends[0] if isinstance(ends, list) and ends else ends
    known = (vocab.get(named), vocab.get(END_OF_TEXT), tokenizer.bos_token_id, tokenizer.eos_token_id)
    ids = [one for one in (*known, getattr(model_config, "bos_token_id", None), ends) if isinstance(one, int)]
    require(bool(ids), "the judge has neither a start nor an end token; name a token with --start")
    return ids[0]


def end_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every id that ends or pads a text of the judge."""
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = listed if isinstance(listed, list) else [listed]
    ids = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.get_vocab().get(END_OF_TEXT), *several)
    return frozenset(one for one in ids if isinstance(one, int))


def encoded(
    config: NllConfig, judge: Judge, files: Sequence[str]
) -> Iterator[tuple[str, str, list[list[int]], list[str]]]:
    """File, decoder, its texts as the judge's ids, and what each of them continues.

    Raises:
        InputError: ids of nobody, or a decoder that has nothing to score.
    """
    words = None if config.tokens_of in ("", config.judge) else _tokenizer(config.tokens_of)

    def encode(item: str | list[int], where: str) -> list[int]:
        if isinstance(item, list):
            require(bool(config.tokens_of), f"{where} holds token ids; say whose they are with --tokens-of")
            item = item if words is None else str(words.decode(item, skip_special_tokens=True))
        ids = cut_at_end(item, judge.end_ids) if isinstance(item, list) else judge.ids(item)
        return ids[: config.max_tokens or None]

    for name in files:
        for group, lines in read_texts(name, config.split).items():
            rows = [encode(line.item, name) for line in lines]
            require(any(rows), f"none of the {len(rows)} texts {f'of {group} ' if group else ''}in {name} has a token")
            yield name, group, rows, [line.given for line in lines]


def _tokenizer(source: str) -> Any:
    """The tokenizer of any model, without its weights."""
    folder = ar_folder(source) if source == "smol" else local(source, ["*.json", "*.txt", "*.jinja"])
    words = read_tokenizer(folder)
    require(words is not None, f"there is no tokenizer in {source!r}")
    return words


def run_nll(config: NllConfig, judge: Judge | None = None) -> dict[str, Any]:
    """NLL of every file and decoder in it.

    Returns:
        `judge`, `rule`, and `rows`: file, decoder, n texts scored, n_empty left out, n_tokens, nll, nll_ci95,
        perplexity.
    """
    judge, rows = judge or load_judge(config), []
    for name, group, texts, given in encoded(config, judge, config.files):
        found = judge.score(texts, given, config.batch_size)
        rows.append({
            "file": name, "decoder": group, "n": found.n_texts, "n_empty": found.n_empty, "n_tokens": found.n_tokens,
            "nll": found.nll, "nll_ci95": found.ci95, "perplexity": math.exp(found.nll),
        })  # fmt: skip
    front = f"{judge.tokenizer.convert_ids_to_tokens(judge.start_id)} (id {judge.start_id})"
    rule = f"every token up to the first end token, given {front}, what its line says was given, and those before it"
    return {"judge": judge.name, "rule": rule, "max_tokens": config.max_tokens, "rows": rows}


def run_mauve(config: MauveConfig, judge: Judge | None = None) -> dict[str, Any]:
    """MAUVE of every file and decoder in it against the reference.

    Returns:
        `judge`, `reference`, and `rows`: file, decoder, n, n_reference, n_empty left out, mauve, mauve_ci95,
        per_seed, and the settings with their warnings.
    """
    judge, rows = judge or load_judge(config), []
    groups = {group: texts for _, group, texts, _ in encoded(config, judge, [config.reference])}
    require(len(groups) == 1, f"the reference {config.reference} has texts of {len(groups)} decoders "
            f"({', '.join(groups)}); it must have one")  # fmt: skip
    about = {"model": judge.name, "pooling": config.pooling, "max_tokens": config.max_tokens}
    p = features(judge.model, next(iter(groups.values())), config.batch_size, config.pooling)
    for name, group, texts, _ in encoded(config, judge, config.files):
        q = features(judge.model, texts, config.batch_size, config.pooling)
        found = mauve(p, q, seeds=config.seeds, buckets=config.buckets or None, scale=config.scale, about=about)
        rows.append({
            "file": name, "decoder": group, "n": len(q), "n_reference": len(p),
            "n_empty": len(texts) - len(q), **found,
        })  # fmt: skip
    return {"judge": judge.name, "reference": config.reference, "rows": rows}
