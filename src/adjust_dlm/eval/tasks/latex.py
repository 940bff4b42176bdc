r"""Answers in LaTeX: where a text gives its answer, and one way of writing for equal answers.

Normalised answers are compared as strings, so a rule here may only join what is the same answer. `x = 5` and `5` are,
`0.\overline{3}` and `0.3` are not.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_FINAL = re.compile(r"Final Answer: The final answer is\s*(.*?)\.?\s*(?:I hope|\n|\Z)")

_TEXT = r"\\(?:text|textrm|textit|textnormal|mbox|mathrm|hbox|rm)"
_UNITS = (
    "square |cubic )?(?:units?|inch(?:es)?|in|feet|foot|ft|yards?|miles?|mi|mph|km|kilometers?|meters?|cm|centimeters?|"
    "mm|kg|grams?|gm|pounds?|lbs?|ounces?|oz|hours?|minutes?|seconds?|days?|weeks?|months?|years?|degrees?|dollars?|"
    "cents?|percent|points?|students?|people|ways?|edges?|digits?|integers?"
)
_ATOM = r"(?:\d*(?:\\pi|\\sqrt\{[^{}]*\}|[A-Za-z])|\d+)"
_DROPPED = (
    r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])",
    r"\\(?:displaystyle|textstyle|quad|qquad|limits)(?![A-Za-z])",
    r"(?<!\\)\\[!,;: ]|~",  # two backslashes are the end of a row
    r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\u00b0",
    r"\\?%|\\\$|\$|(?<!\\)\\[()\[\]]",
)
_REPLACED = (
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1"),
    (r"\\frac\s*([^\s{\\])\s*([^\s{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([^\s{\\])\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})\s*([^\s{\\])", r"\1{\2}"),
    (r"\\sqrt\s*(\[[^\]]*\])?\s*([^\s{\\\[])", r"\\sqrt\1{\2}"),
)


def find_answer(text: str) -> str | None:
    """The answer of a solution: what its last box holds; without a closed box what its final line says.

    Returns:
        None where there is neither.
    """
    boxed = last_boxed(text)
    return final_answer(text) if boxed is None else boxed


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed` or `\fbox`, up to the brace that closes it; None without one, or if it stays open.

    A box without braces holds the text up to white space or $.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0] or None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


def final_answer(text: str) -> str | None:
    """X of the first "Final Answer: The final answer is X. I hope it is correct."; the last words may lack."""
    found = _FINAL.search(text)
    return found[1].strip() or None if found else None


def normalize(answer: str) -> str:
    """One way of writing for the same answer."""
    answer = _plain_texts(_comma_groups(_bare(answer)))
    for dropped in _DROPPED:
        answer = re.sub(dropped, " ", answer)
    for pattern, by in _REPLACED:
        answer = re.sub(pattern, by, answer)
    answer = _without_name(_without_unit(answer))
    answer = re.sub(r"([_^])\{(\w)\}", r"\1\2", re.sub(r"\s+", "", answer)).rstrip(".,")
    return _number(_fraction(answer))


def _bare(answer: str) -> str:
    """Without the $ around it and the period of its sentence."""
    answer = answer.lstrip(" \t\n$")
    kept = answer.rstrip(" \t\n$.")
    return answer[: len(kept) + 1] if kept.endswith("\\") else kept  # an escaped dollar is none of them


def _comma_groups(answer: str) -> str:
    r"""Thousands of `1{,}000` and `1,\!000`; a comma alone counts only if it is the whole answer, see `_number`."""
    return re.sub(r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3})", "", answer)


def _plain_texts(answer: str) -> str:
    r"""Text commands: a note behind a number or formula goes (`5\text{ cm}^2`), all others become their words."""
    answer = re.sub(rf",?\s*{_TEXT}\s*\{{\s*and\s*\}}", ",", answer)
    note = rf"(?<=[\w}})!$])(?:\s|\\[,;: !~])*{_TEXT}\s*\{{(?!\s*[ap]\.?m\b)[^{{}}]*\}}(?:\s*\^\s*\{{?\d\}}?)?[\s.$]*$"
    answer = re.sub(note, "", answer)
    return re.sub(rf"(?:{_TEXT}|\\(?:textbf|mathbf|bold|boldsymbol))\s*\{{([^{{}}]*)\}}", r"\1", answer)


def _without_unit(answer: str) -> str:
    """Without a unit in plain letters behind a number."""
    return re.sub(rf"(?<=[\d}}])\s*(?:{_UNITS})(?:\s*\^\s*\{{?\d\}}?)?[\s.]*$", "", answer)


def _without_name(answer: str) -> str:
    r"""Without what is defined: `x = 5`, `f(x) = 5`, `x \in [0, 1]`; equations stay."""
    name = r"\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z, ]*\))?\s*(?:=|\\in(?![A-Za-z]))"
    found = re.match(name, answer)
    return answer[found.end() :] if found and answer.count("=") <= 1 else answer


def _fraction(answer: str) -> str:
    """a/b as a fraction, its sign in front; a letter in parentheses (a choice) without them."""
    answer = re.sub(rf"^(-?)({_ATOM})/({_ATOM})$", r"\1\\frac{\2}{\3}", answer)
    answer = re.sub(r"^\\frac\{-([^{}+-]+)\}(\{[^{}]*\})$", r"-\\frac{\1}\2", answer)
    return re.sub(r"^\(([A-Z])\)$", r"\1", answer)


def _number(answer: str) -> str:
    """.5 as 0.5 everywhere; a whole answer of digits without thousands commas and zeros at the end."""
    answer = re.sub(r"(?<![\d.])\.(?=\d)", "0.", answer)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    if re.fullmatch(r"-?\d+\.\d+", answer):
        answer = answer.rstrip("0").rstrip(".")
    return answer
