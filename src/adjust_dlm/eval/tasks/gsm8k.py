r"""GSM8K: word problems whose answer is a number, in the two forms that lm-evaluation-harness scores.

`cot` ends an answer with "The answer is 18." and asks with "Q:", as the harness' task `gsm8k_cot`; `hashes` ends it
with "#### 18" and asks with "Question:", as its task `gsm8k`. A completion is cut at its end token and at the stop
words; then `strict` looks for the first end of the form, `flexible` for the last number. Both compare text without
commas, $ and a last period; `value` compares the last number by value, as a reader sees it: 18.00 is 18, `1{,}234` and
1'234 are 1234, a no-break space groups digits, U+2212 is a minus, and 3/4, 10^3 and 2e3 are one number each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from adjust_dlm.eval.downstream import Scores, Task, cut_at_stop, evaluate, with_shots
from adjust_dlm.eval.tasks.settings import Gsm8kConfig
from adjust_dlm.eval.tasks.task_files import BUILTIN, EXAMPLES, Problem, Row, first_rows, read_rows
from adjust_dlm.types import require

END_WORDS = ("</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>")  # end tokens that a model has spelled out
TEXTS = ("question", "answer", "target")
_NUMBER = r"-?[.,]*[0-9][0-9.,]*"
_ANY_NUMBER = re.compile(r"(?:-|(?<![$.,]))[$.,]*[0-9][$0-9.,]*")  # never tried anew within a run of dots
_GROUPED = re.compile(r"(?<=[0-9])(?<![0-9]{4})(?:\{,\}|\\,|['\u00a0\u2007\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_TERM = re.compile(rf"({_ANY_NUMBER.pattern})(?:( ?/ ?|\^|\*\*|[eE]\+?)([0-9][0-9.,]*))?")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9.,]+)\}\{([0-9.,]+)\}")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class Form(NamedTuple):
    """How a {question} is asked, how an answer ends in a {number}, and what `strict` looks for."""

    ask: str
    end: str
    found: re.Pattern[str]


FORMS = {
    "cot": Form("Q: {question}\nA:", " The answer is {number}.", re.compile(f"The answer is ({_NUMBER})")),
    "hashes": Form("Question: {question}\nAnswer:", "\n#### {number}", re.compile(f"#### ({_NUMBER})")),
}


def run(config: Gsm8kConfig) -> dict[str, Any]:
    """Evaluates the decoders on GSM8K; see `evaluate`."""
    return evaluate(make_task(config), config)


def make_task(config: Gsm8kConfig) -> Task:
    """GSM8K in the form of the settings."""
    about = {
        "strict": f"first match of {FORMS[config.form].found.pattern!r}",
        "flexible": "last number, as text",
        "value": "last number, as a number",
    }
    return Task("gsm8k", problems, score, stop_words(config.form), about)


def stop_words(form: str) -> tuple[str, ...]:
    """Where a completion ends: at the word that begins the next question, too."""
    return (FORMS[form].ask.split()[0], *END_WORDS)


def problems(config: Gsm8kConfig) -> list[Problem]:
    """The file's problems in its order, each behind the examples.

    Raises:
        InputError: a row without question or answer, or too few examples.
    """
    form, shots = FORMS[config.form], _shots(config)
    out = []
    for number, row in enumerate(read_rows(config.data, ("question", "answer"), texts=TEXTS), start=1):
        facts = {"gold": clean(_split(row["answer"], f"{config.data}, row {number}")[1])}
        ask = form.ask.format(question=row["question"].strip())
        out.append(with_shots(str(number), ask, shots, facts, chat=config.chat))
    return out


def _shots(config: Gsm8kConfig) -> list[tuple[str, str]]:
    form, made = FORMS[config.form], []
    own = config.data == BUILTIN and config.shots_data == Gsm8kConfig.shots_data
    for number, row in enumerate(
        first_rows(EXAMPLES if own else config.shots_data, config.shots, ("question",), TEXTS), start=1
    ):
        where = f"{config.shots_data}, row {number}"
        target = row["target"].strip() if "target" in row else written(row, config.form, where)
        named = f"{where}: the example has no {form.end.strip().format(number='N')!r}, which form {config.form} wants"
        require(form.found.search(target) is not None, named)
        made.append((form.ask.format(question=row["question"].strip()), target))
    return made


def written(row: Row, form: str, where: str) -> str:
    """The solution of a GSM8K row as an answer in a form: without calculator marks, `cot` in one line.

    Raises:
        InputError: no answer in the row.
    """
    require("answer" in row, f"{where} has neither target nor answer")
    steps, number = _split(row["answer"], where)
    steps = _CALCULATOR.sub("", steps)
    return (" ".join(steps.split()) if form == "cot" else steps) + FORMS[form].end.format(number=number)


def _split(answer: str, where: str) -> tuple[str, str]:
    steps, mark, number = answer.rpartition("####")
    require(bool(mark and number.strip()), f"{where}: its answer does not end in '#### number'")
    return steps.strip(), number.strip()


def find_answers(text: str, form: str) -> tuple[str | None, str | None]:
    """What a completion answers, cut at the stop words first: (strict, flexible); None where there is none."""
    text = cut_at_stop(text, stop_words(form))
    first = FORMS[form].found.search(text)
    numbers = _ANY_NUMBER.findall(text)
    return clean(first[1]) if first else None, clean(numbers[-1]) if numbers else None


def clean(number: str) -> str:
    """A number without thousands separators, $ and the period of its sentence."""
    return number.replace(",", "").replace("$", "").strip().rstrip(".")


def grade(text: str, gold: str, form: str) -> Scores:
    """Scores of one completion against the cleaned gold number."""
    strict, flexible = find_answers(text, form)
    terms = _TERM.findall(_plain(cut_at_stop(text, stop_words(form))))
    same = bool(terms) and _value(*terms[-1]) == _value(_plain(gold))
    return {"strict": float(strict == gold), "flexible": float(flexible == gold), "value": float(same)}


def _plain(text: str) -> str:
    """Numbers as ASCII writes them, without the marks that TeX and printers group digits with."""
    return _FRACTION.sub(r" \1/\2", _GROUPED.sub("", text)).replace("\u2212", "-")


def _value(number: str, sign: str = "", other: str = "") -> Fraction | str:
    """Of a number alone, or of two with /, a power or e between them."""
    try:
        first, second = Fraction(clean(number)), Fraction(clean(other) or "1")
        if "/" in sign:
            return first / second
        if sign and (second.denominator > 1 or second > 99):
            raise ValueError
        return first * 10 ** int(second) if sign[:1] in ("e", "E") else first ** int(second) if sign else first
    except (ValueError, ZeroDivisionError):  # such as 1.2.3, a number of a section
        return number + sign + other


def score(items: Sequence[Problem], texts: Sequence[list[str]], config: Gsm8kConfig) -> list[list[Scores]]:
    """See `Task.score`."""
    pairs = zip(items, texts, strict=True)
    return [[grade(text, problem.facts["gold"], config.form) for text in group] for problem, group in pairs]
