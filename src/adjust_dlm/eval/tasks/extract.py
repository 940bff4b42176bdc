"""The program in a reply: what a model wrote around it goes, what it needs to run stays.

A base model continues the prompt, so its code ends where something new begins at the left edge. A chat model answers
with a fenced block, prose around it, sometimes without a fence, and sometimes its tokens end before the fence does.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import textwrap
import warnings
from collections.abc import Collection
from typing import NamedTuple

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
_CODE_LINE = re.compile(r"^(?:(?:async +)?def |class |@\w|import \w|from [\w.]+ import )", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3")


class Block(NamedTuple):
    """A fenced block: the word behind its opening fence in lower case, what it holds, whether it is closed."""

    language: str
    text: str
    closed: bool


def lines_of(text: str) -> list[str]:
    """Lines with the ends that Python knows: unlike for `str.splitlines`, a form feed or U+2028 ends none."""
    return io.StringIO(text, newline="").readlines()


def blocks(reply: str) -> list[Block]:
    """All fenced blocks of a reply."""
    found: list[Block] = []
    fence, language, inside = "", "", list[str]()
    for line in (line.rstrip("\r\n") for line in lines_of(reply)):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, inside = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not match[2]:
            found.append(Block(language, "\n".join(inside), True))
            fence = ""
        else:
            inside.append(line)
    found += [Block(language, "\n".join(inside), False)] if fence else []
    return [block._replace(text=textwrap.dedent(block.text) + "\n") for block in found]


def defines(code: str, names: Collection[str]) -> bool:
    """Whether code defines a function, class or variable with one of the names at its left edge."""
    one = "|".join(map(re.escape, names))
    return bool(re.search(rf"^(?:(?:async +)?def +|class +)(?:{one})\b|^(?:{one}) *=[^=]", code, re.MULTILINE))


def fenced(reply: str, names: Collection[str]) -> str | None:
    """The block to run: the last whole one that defines a name, else an unclosed one, else the last of Python.

    Blocks of other languages count only if they define a name, as some models write another word for Python.
    """
    written = [block for block in blocks(reply) if block.text.strip()]
    good = [block for block in written if defines(block.text, names)]
    rest = [block for block in written if block.language in _PYTHON]
    for choice in (good, rest):
        whole = [block for block in choice if block.closed]
        if whole:
            return whole[-1].text
        if choice:  # unclosed: prose may follow
            return bare_code(choice[-1].text) or choice[-1].text
    return None


def bare_code(reply: str) -> str:
    """Code without a fence: from the first line of code on, without the lines at the end that are none.

    Empty where no line looks like code.
    """
    match = _CODE_LINE.search(reply)
    if match is None:
        return ""
    lines = [line.rstrip("\r\n") for line in lines_of(reply[match.start() :])]
    for end in range(len(lines), 0, -1):
        code = "\n".join(lines[:end]) + "\n"
        if _parses(code):
            return code
    return "\n".join(lines) + "\n"


def _parses(code: str) -> bool:
    refused = contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError)
    with warnings.catch_warnings(action="ignore"), refused:  # of odd escapes in strings
        ast.parse(code)
        return True
    return False


def cut_body(text: str) -> str:
    """A function's body: up to the first line that starts something new at the left edge.

    Closing brackets may stand there, and lines of a string in triple quotes.
    """
    before = ""
    for line in lines_of(text):
        in_string = any(before.count(quotes) % 2 for quotes in ('"""', "'''"))
        if line.strip() and line.lstrip("\f")[0] not in " \t)]}" and not in_string:
            return before
        before += line
    return text


def preamble(prompt: str, entry: str) -> str:
    """What a prompt says before the function to write: imports and helpers."""
    match = re.search(rf"^(?:async +)?def +{re.escape(entry)}\b", prompt, re.MULTILINE)
    return prompt[: match.start()] if match else ""


def continued(prompt: str, entry: str, reply: str) -> list[str]:
    """Parts of a program from what a base model wrote behind a prompt.

    A reply that starts over with the function (or the whole prompt) is taken up to the end of that function.
    """
    code = bare_code(reply) if _CODE_LINE.match(reply.lstrip("\r\n")) else ""
    head = re.search(rf"^(?:async +)?def +{re.escape(entry)}\b.*\n", code, re.MULTILINE)
    if head is None:
        return [prompt + cut_body(reply)]
    return [preamble(prompt, entry), code[: head.end()] + cut_body(code[head.end() :])]


def answered(prompt: str, entry: str, reply: str) -> list[str]:
    """Parts of a program from a chat model's reply: its block with the prompt's imports and helpers before it.

    Code that does not define the function is its body.
    """
    code = told(reply, {entry})
    if defines(code, {entry}):
        return [preamble(prompt, entry), code]
    body = fenced(reply, {entry}) or cut_body(_before_fence(reply)) or _before_fence(reply)
    lines = lines_of(textwrap.dedent(body))
    return [prompt + "".join(f"    {line}" if line.strip() else line for line in lines)]


def between_marks(reply: str, begin: str, end: str) -> str:
    """Text before the first `end`, and behind a `begin` that has no code before it."""
    text = reply.partition(end)[0].replace("\r\n", "\n")
    before, found, rest = text.partition(begin)
    return rest if found and not _CODE_LINE.search(before) else text


def told(reply: str, names: Collection[str]) -> str:
    """A whole program in a chat model's reply: its block, or its code without a fence."""
    block = fenced(reply, names)
    return bare_code(_before_fence(reply)) if block is None else block


def _before_fence(reply: str) -> str:
    lines = lines_of(reply)
    end = next((n for n, line in enumerate(lines) if _FENCE.match(line)), len(lines))
    return "".join(lines[:end])
