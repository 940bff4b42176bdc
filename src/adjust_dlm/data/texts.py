"""Text files: whole, by lines, and what a line of JSON holds."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from adjust_dlm.hub import once
from adjust_dlm.types import InputError

PACKED: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}


def read_text(path: Path) -> str:
    """A whole file, unpacked where its name ends in .xz or .gz; raises InputError unless it is there, and UTF-8."""
    try:
        with PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


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
