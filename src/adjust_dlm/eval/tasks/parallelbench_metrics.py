"""When a reply to a ParallelBench task is right: pure functions of the reply and the facts of its problem.

Two readings of lists and grids: lenient takes what a careful reader finds, strict wants the form that was asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

from adjust_dlm.types import InputError, require

log = logging.getLogger(__name__)
Facts = dict[str, Any]
Grammar = Literal["auto", "off", "languagetool"]


def read_list(text: str, *, strict: bool = False) -> list[str] | None:
    """The items of the last list in a text.

    Args:
        text: a reply.
        strict: both brackets, items apart by a comma and one space, each in double quotes with none inside. Lenient:
            everything behind the last `[` and before the next `]`, where there are any; items apart by commas, spaces
            and double quotes around them dropped, items of nothing but white space left out.

    Returns:
        None where the strict form is missed.
    """
    _, opened, inside = text.rpartition("[")
    inside, closed, _ = inside.partition("]")
    if not strict:
        return [item.strip(' "') for item in inside.split(",") if item.strip()]
    items = inside.split(", ")
    quoted = all(len(item) >= 2 and item[0] == item[-1] == '"' and item.count('"') == 2 for item in items)
    return [item[1:-1] for item in items] if opened and closed and quoted else None


def is_right_list(task: str, people: list[str], facts: Facts) -> bool:
    """The one right list, or one of those of a random kind: the input shuffled, or with one change at any place."""
    given, word = facts.get("input", []), facts.get("word")
    if task == "shuffle":
        return people != given and sorted(people) == sorted(given)
    right = {
        "insert_random": [[*given[:n], word, *given[n:]] for n in range(len(given) + 1)],
        "remove_random": [[*given[:n], *given[n + 1 :]] for n in range(len(given))],
        "replace_random": [[*given[:n], word, *given[n + 1 :]] for n in range(len(given))],
    }
    return people in right.get(task, [facts.get("answer")])


LISTS = (
    "copy", "reverse", "sort", "shuffle", "insert_index", "insert_random", "remove_index", "remove_random",
    "replace_index", "replace_random",
)  # fmt: skip


def is_latin(text: str, symbols: Sequence[str]) -> bool:
    """Whether the first n lines that hold exactly the n symbols, apart by commas, are a Latin square.

    Lines with anything else are passed over; there is one reading only.
    """
    wanted = set(symbols)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.split("\n")]
    rows = [row for row in rows if set(row) == wanted][: len(wanted)]
    return len(rows) == len(wanted) and all(set(column) == wanted for column in zip(*rows, strict=False))


def read_grid(text: str, *, strict: bool = False) -> list[str] | None:
    """The 4x4 grid of digits in a text, as four strings.

    Args:
        text: a reply.
        strict: four lines of four digits and nothing else but empty lines. Lenient: lines whose digits are not four
            are passed over, and all but digits within a line is.

    Returns:
        None where there are not exactly four such lines.
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if strict:
        return lines if len(lines) == 4 and all(re.fullmatch("[0-9]{4}", line) for line in lines) else None
    rows = [row for line in lines if len(row := "".join(re.findall("[0-9]", line))) == 4]
    return rows if len(rows) == 4 else None


def is_right(task: str, text: str, facts: Facts, *, strict: bool = False) -> bool:
    """Whether a reply to a list task or a puzzle is right.

    Args:
        task: one of `LISTS`, `latin_square` or `sudoku`.
        text: the reply.
        facts: `answer` or `input` and `word` of lists, `symbols` of a square, `answer` of a Sudoku.
        strict: how the reply is read.
    """
    if task == "latin_square":
        return is_latin(text, facts["symbols"])
    if task == "sudoku":
        return read_grid(text, strict=strict) == facts["answer"].split("\n")
    people = read_list(text, strict=strict)
    return people is not None and is_right_list(task, people, facts)


def includes(text: str, words: Sequence[str]) -> bool:
    """Whether every word occurs, in its own spelling, alone or within another word."""
    return all(word in text for word in words)


class GrammarChecker:
    """LanguageTool, American English, its default rules; a local server that `close` ends."""

    def __init__(self, tool: Any) -> None:
        self.tool = tool
        self._known: dict[str, bool] = {}

    def is_clean(self, text: str) -> bool:
        """Whether there is a text and the tool finds nothing in it."""
        text = text.strip()
        if text not in self._known:
            self._known[text] = bool(text) and not self.tool.check(text)
        return self._known[text]

    def close(self) -> None:
        """Ends the server."""
        self.tool.close()


def open_grammar(mode: Grammar) -> tuple[GrammarChecker | None, str]:
    """The checker, and what a result says about it.

    Args:
        mode: `auto` goes without it where it does not start, and says why; `off` never starts it; `languagetool`
            insists.

    Raises:
        InputError: `languagetool`, and it does not start.
    """
    if mode == "off":
        return None, "off: inclusion only"
    package = "language_tool_python"
    try:
        require(find_spec(package) is not None, "it is not installed (pip install language_tool_python)")
        import language_tool_python  # starts a Java server, after a download of 250 MB the first time

        tool = language_tool_python.LanguageTool("en-US")
    except Exception as error:  # no package, no Java, no download: each has its own kind of error
        why = f"{package}: {' '.join(str(error).split()) or type(error).__name__}"
        if mode == "languagetool":
            raise InputError(f"the grammar check does not start: {why}; --grammar off leaves it out") from error
        log.warning("no grammar check, inclusion only: %s", why)
        return None, f"not available, inclusion only: {why}"
    return GrammarChecker(tool), f"LanguageTool en-US, default rules, by {package} {version(package)}"
