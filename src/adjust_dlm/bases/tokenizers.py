"""Tokenizers, fast and without remote code.

An adapted base has `FileTokenizer`: the `tokenizers` library and a chat template, since importing transformers would
take a second. Checkpoints have transformers' own. LLaDA ships `tokenizer.json`. Dream ships Qwen2's `vocab.json` and
`merges.txt` with a tokenizer class of its own, whose rules are Qwen2's: NFC, GPT-4-like splitting with single digits,
byte-level BPE.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adjust_dlm.hub import once
from adjust_dlm.types import InputError, refusing, require


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, as a fast class of transformers, or None if there is none.

    Raises:
        InputError: its files are damaged, or a special token has no id in them, or another one than it gets.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    whole, words = folder / "tokenizer.json", folder / "vocab.json"
    if not whole.is_file() and not words.is_file():
        alone = f"{folder} has tokenizer.model alone; write a tokenizer.json with transformers' save_pretrained"
        require(not (folder / "tokenizer.model").is_file(), alone)
        return None
    kind: Any = PreTrainedTokenizerFast if whole.is_file() else Qwen2Tokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
        known = Tokenizer.from_file(str(whole)).get_vocab() if whole.is_file() else _json(words)
        said = {token["content"]: n for n, token in _added(folder).items()}
        here = tokenizer.get_vocab()
        for token in sorted(tokenizer.get_added_vocab().keys() | said.keys()):
            n, got = said.get(token, known.get(token)), here.get(token)  # one that was made up has none in its files
            if n != got:
                raise ValueError(f"added token {token!r} has id {n} in its files, but {got} here")
    except Exception as error:  # tokenizers raises nothing narrower, and files of strangers may hold anything
        raise InputError(f"cannot read the tokenizer in {folder}: {' '.join(repr(error).split())}") from error
    return tokenizer


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once) if file.is_file() else {}


def _added(folder: Path) -> dict[int, dict[str, Any]]:
    """Id -> added token, of the files beside a vocabulary."""
    old = {n: {"content": token} for token, n in _json(folder / "added_tokens.json").items()}
    settings = _json(folder / "tokenizer_config.json")
    said = settings.get("added_tokens_decoder", old)
    if settings.get("split_special_tokens"):
        raise ValueError("split_special_tokens is true; a special token is one token here")
    return {int(n): said[n] for n in sorted(said, key=int)}


def _special(folder: Path) -> list[str]:
    """Tokens that the files beside a vocabulary call special."""
    whole = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    found = [whole.get(f"{role}_token") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for more in (whole.get("additional_special_tokens") or [], whole.get("extra_special_tokens") or []):
        found += more.values() if isinstance(more, dict) else more
    return [token["content"] if isinstance(token, dict) else token for token in found if token is not None]


class FileTokenizer:
    """A `tokenizer.json`, the added tokens that only the files beside it name, and a chat template.

    Same answers as transformers' `PreTrainedTokenizerFast` for the calls that a base makes and templates that use
    nothing but the messages (a test compares them); `adjust adapt` writes such a template.

    Attributes:
        backend_tokenizer: of the `tokenizers` library.
        chat_template: Jinja source with `messages` and `add_generation_prompt`, or None.
    """

    def __init__(self, file: Path, chat_template: str | None) -> None:
        """Reads the files; raises InputError if they are no tokenizer, or give an added token an id it cannot get."""
        from tokenizers import AddedToken, Tokenizer

        with refusing(f"cannot read the tokenizer {file}", Exception):  # tokenizers raises nothing narrower
            self.backend_tokenizer = Tokenizer.from_file(str(file))
            self.backend_tokenizer.no_truncation()  # a file may ask for either
            self.backend_tokenizer.no_padding()
            for n, token in _added(file.parent).items():
                self.backend_tokenizer.add_tokens([AddedToken(**token)])
                if self.encode(token["content"]) != [n]:
                    raise ValueError(
                        f"{token['content']!r} has id {n} in the files beside it, which it cannot get here"
                    )
            for name in _special(file.parent):
                if (known := self.backend_tokenizer.token_to_id(name)) is None:
                    raise ValueError(f"the special token {name!r} has no id in its files")
                if self.encode(name) != [known]:
                    self.backend_tokenizer.add_special_tokens([name])
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids; special tokens that stand in the text are recognised."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Names of ids in the vocabulary; None for an id that is not there."""
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> Any:
        """The template's text, or its ids; raises InputError if there is no template, and what the template raises."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not self.chat_template:
            raise InputError("this base has no chat template")
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.chat_template)
        text = template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text) if tokenize else text


Messages = list[dict[str, str]]


def chat_ids(tokenizer: Any, render: Callable[[Messages], str], messages: Messages) -> list[int]:
    """Ids of a conversation in which control tokens count where the template writes them, and are letters in contents.

    Where no content holds one these are the ids of the rendered text. Where one does, what stands around it between
    two control tokens of the template is encoded as if the tokenizer had no added tokens.

    A tokenizer without a `backend_tokenizer` of the `tokenizers` library has no control tokens.

    Raises:
        InputError: a content with control tokens that the template changes, or that are no letters to the tokenizer.
    """
    text, backend = render(messages), getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    template = str(getattr(tokenizer, "chat_template", ""))  # what it writes is control, too, unless a word or spaces
    marks = {t.content for t in added.values() if t.content in template and re.search(r"[^\w\s]", t.content)}
    control = {i: t for i, t in added.items() if t.special or t.content in marks}
    cores: dict[str, str] = {}  # by what stands for them in the template
    told, seen = [], dict[str, list[int]]()
    for message in messages:
        core, name = message["content"].strip(), f"q{secrets.token_hex(16)}"
        if control:
            seen[core] = tokenizer.encode(core, add_special_tokens=False)
        if not control.keys().isdisjoint(seen.get(core, ())):
            cores[name] = core
            message = {**message, "content": message["content"].replace(core, name)}
        told.append(message)
    if not cores:
        return seen[text] if text in seen else tokenizer.encode(text, add_special_tokens=False)
    longest = sorted(control.values(), key=lambda token: -len(token.content))
    pattern = "|".join(r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip for t in longest)
    ids: list[int] = []
    whole = ""
    for piece in re.split(f"({pattern})", render(told)):
        filled = re.sub("|".join(cores), lambda found: cores[found[0]], piece)
        fresh = tokenizer.encode(piece, add_special_tokens=False) if filled == piece else _letters(backend, filled)
        clean = filled == piece or control.keys().isdisjoint(fresh)
        require(clean, f"the tokenizer has no letters for all of {filled!r}")
        ids, whole = ids + fresh, whole + filled
    require(whole == text, "the chat template changes a text that holds control tokens, so they cannot be told apart")
    return ids


def _letters(backend: Any, text: str) -> list[int]:
    """Ids of a text without any added tokens."""
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    splitter = backend.pre_tokenizer
    words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]
