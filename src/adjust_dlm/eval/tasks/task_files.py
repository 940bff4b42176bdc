"""Files of tasks: rows of problems and of examples, from a path or from files of a data set on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjust_dlm.data.texts import PACKED, json_value, lines_of, read_text
from adjust_dlm.hub import is_hub_id, snapshot
from adjust_dlm.types import refusing, require

Row = dict[str, Any]
BUILTIN = "builtin"  # twelve word problems of our own, for a first run without a network
EXAMPLES = "builtin-examples"
_OWN = Path(__file__).with_name("builtin")


@dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
        id: unique within its task.
        prompt: what the user says, examples included; a chat template goes around it where one is asked for.
        facts: whatever scoring needs; plain JSON.
        kind: the group it is counted in beside the whole, such as a subject.
        turns: messages before the prompt, user and assistant in turn (examples of a chat).
    """

    id: str
    prompt: str
    facts: dict[str, Any]
    kind: str = ""
    turns: tuple[str, ...] = ()


def read_rows(spec: str, fields: Sequence[str] = (), *, texts: Sequence[str] = ()) -> list[Row]:
    """All rows of a file.

    Args:
        spec: path of a .jsonl (an object a line), .json (a list of objects) or .parquet file, the first two also
            packed as .xz or .gz; or `owner/name:path`, such files of a data set on the Hub (or in its cache): the
            path may be a pattern (`full/*.parquet`).
        fields: what every row must have.
        texts: what must be text in every row that has it.

    Raises:
        InputError: no such file, another kind of file, or a bad row (it is named).
    """
    given, (name, _, inside) = local_file(spec), spec.partition(":")
    found = [given] if given else sorted(snapshot(name, [inside], kind="dataset").glob(inside))
    require(bool(found), f"the Hub's data set {name!r} has no file {inside!r}")
    rows = [row for path in found for row in _read(path, spec)]
    require(bool(rows), f"{spec} holds no rows")
    for number, row in enumerate(rows, start=1):
        require(isinstance(row, dict), f"{spec}, row {number}: an object is wanted")
        lacks = [name for name in fields if name not in row]
        require(not lacks, f"{spec}, row {number} has no {', '.join(lacks)}; it has {', '.join(map(str, row))}")
        wrong = next((name for name in texts if name in row and not isinstance(row[name], str)), None)
        require(wrong is None, f"{spec}, row {number}: {wrong} is {row.get(wrong)!r}; text is wanted")
    return rows


def first_rows(spec: str, count: int, fields: Sequence[str], texts: Sequence[str]) -> list[Row]:
    """The first rows of a file of examples, see `read_rows`; raises InputError where it has fewer."""
    rows = read_rows(spec, fields, texts=texts)[:count] if count else []
    require(len(rows) == count, f"{spec} has {len(rows)} examples, {count} are asked for; give fewer --shots")
    return rows


def local_file(spec: str) -> Path | None:
    """The path that is given, None for files on the Hub; raises InputError for neither."""
    own = {BUILTIN: _OWN / "problems.jsonl", EXAMPLES: _OWN / "examples.jsonl"}
    path = own.get(spec, Path(spec))
    if path.is_file():
        return path
    name, _, inside = spec.partition(":")
    require(bool(inside) and is_hub_id(name), f"no file {spec!r}; give a path, or owner/name:path of a Hub data set")
    return None


def _read(path: Path, spec: str) -> list[Any]:
    kind = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    known = kind in (".jsonl", ".json", ".parquet")
    require(known, f"{spec}: give a .jsonl, .json or .parquet file; the first two may end in .xz or .gz, too")
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet as pq

        with refusing(f"cannot read {path}", pyarrow.ArrowInvalid):
            return list(pq.read_table(path).to_pylist())
    if kind == ".jsonl":
        return [json_value(line, where) for where, line in lines_of(path)]
    rows = json_value(read_text(path), str(path))
    require(isinstance(rows, list), f"{path}: a JSON list of objects is wanted")
    return list(rows)
