"""Short questions with a known answer, such as "What is the capital of France?", for corpora and for evaluation.

A fact is held out or not by what it is about: a country, a word, a pair of numbers, whatever the question. No question
of the training stream names a held-out one, not even as its answer. Facts and wording are this project's own.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HELD_OUT_EVERY = 3  # one in so many countries, words and pairs of numbers
MOST = 20  # the largest number of a pair

_WORDS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
WORDING: dict[str, tuple[str, ...]] = {kind: tuple(forms) for kind, forms in _WORDS["wording"].items()}
_SPOKEN = frozenset(re.findall(r"[\w'-]+", " ".join(itertools.chain(*WORDING.values())).lower()))
_NAMED = frozenset({"capital", "continent", "language"})  # a country's name is enough to ask about it
_ASKS = re.compile(
    r"opposite|contrary|antonym|synonym|another word|(same|similar) (thing )?(as|in meaning|to)|mean(s|ing)? the same"
    r"|colou?r|hue|baby|babies|young|plural|singular|past (tense|form|participle)|symbol|after|before|follow|precede"
    r"|tomorrow|yesterday|next",
    re.IGNORECASE,
)
_COUNTS_SOMETHING = re.compile(r"how many|number of|count", re.IGNORECASE)
_FILLING = {"a", "an", "the", "in", "on", "one", "our", "earth", "united"}  # not in "how many continents are there?"
_NUMBERS = _WORDS["numbers"].split()
_NUMBER = re.compile(rf"\b({'|'.join(_NUMBERS)})\b", re.IGNORECASE)
_REACHES = re.compile(  # a number, perhaps its unit, what is done with it, a number
    r"\d\s*[-+*/x\u00d7\u00f7\u2212\u2013]\s*\d"
    r"|\d\W*([a-z]+\W+){0,2}?(plus|minus|times|and|by|from|to|over|less)\W*\d"
    r"|\b(add|sum|subtract|difference|multipl|product|divid|total)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fact:
    """One thing that can be asked.

    Attributes:
        kind: a key of `WORDING`.
        asked: what the wording is filled with.
        answers: one of these words stands in a right answer.
        about: the country, words or pair of numbers (`3 5`) that the question and its answers name.
    """

    kind: str
    asked: tuple[str, ...]
    answers: tuple[str, ...]
    about: tuple[str, ...]

    def is_held_out(self) -> bool:
        """Whether what is asked about is held out."""
        return is_held_out(self.about[0])

    def is_clean(self) -> bool:
        """Whether neither question nor answers name anything that is held out."""
        countries, others, _ = _held_out_names()
        answered = (answer.lower() in countries | others for answer in self.answers)
        return not any(map(is_held_out, self.about)) and not any(answered)

    def wordings(self) -> list[str]:
        """The question in every wording."""
        return [wording.format(*self.asked) for wording in WORDING[self.kind]]

    def right(self, reply: str) -> bool:
        """Whether one of the answers stands in the reply as a word."""
        case = 0 if self.kind == "symbol" else re.IGNORECASE
        return any(re.search(rf"(?<!\w){re.escape(a)}(?!\w)", reply, case) for a in self.answers)


def is_held_out(name: str) -> bool:
    """Whether a country, a word or a pair of numbers is kept for evaluation; words of the wordings are not."""
    if name.lower() in _SPOKEN:
        return False
    digest = hashlib.blake2b(name.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


@cache
def facts() -> tuple[Fact, ...]:
    """All facts."""
    out = []
    for kind, table in _WORDS["facts"].items():
        for entry in table.split():
            asked, _, found = entry.replace("_", " ").partition(":")
            answers = tuple(found.split("|"))
            thing = asked.split()[-1] if kind == "color" else asked  # a banana: whatever is asked about bananas
            about = (thing, *answers) if kind in ("opposite", "synonym") else (thing,)
            out.append(Fact(kind, (asked,), answers, about))
    for word in _WORDS["regular"].split():
        out.append(Fact("plural", (word,), (word + ("es" if word.endswith(("ch", "sh", "s", "x")) else "s"),), (word,)))
    for continent, table in _WORDS["continents"].items():
        out += [Fact("continent", (name,), (continent,), (name,)) for name in table.split()]
    for a, b in itertools.product(range(1, MOST + 1), repeat=2):
        pair = f"{min(a, b)} {max(a, b)}"
        out.append(Fact("plus", (str(a), str(b)), (str(a + b),), (pair,)))
        if a > b and a != 2 * b:  # the answer is never one of the numbers that are asked
            out.append(Fact("minus", (str(a), str(b)), (str(a - b),), (pair,)))
        if min(a, b) >= 2 and max(a, b) <= 12:
            out.append(Fact("times", (str(a), str(b)), (str(a * b),), (pair,)))
    for name in ("day", "month"):
        ring = _WORDS[name].split()
        for early, late in zip(ring, ring[1:] + ring[:1], strict=True):
            out.append(Fact(f"{name} after", (early,), (late,), (early,)))
            out.append(Fact(f"{name} before", (late,), (early,), (late,)))
    return tuple(out)


def questions(seed: int, *, held_out: bool = False) -> Iterator[tuple[str, Fact]]:
    """An endless, reproducible stream of questions in any wording, all kinds equally often on average.

    Args:
        seed: names the stream.
        held_out: ask for held-out facts; without it no question or answer names one.
    """
    rng = random.Random(f"questions {seed} {held_out}")
    wanted = Fact.is_held_out if held_out else Fact.is_clean
    by_kind = {kind: [f for f in facts() if f.kind == kind and wanted(f)] for kind in WORDING}
    kinds = [kind for kind, found in by_kind.items() if found]
    while True:
        fact = rng.choice(by_kind[rng.choice(kinds)])
        yield rng.choice(fact.wordings()), fact


def asks_held_out(text: str) -> bool:
    """Whether a user's turn may ask for a held-out fact: it names the country, or asks about the word or the pair.

    "Japan's" and "Japanese" name Japan, "bananas" a banana, and "three plus five" is a pair.
    """
    words = {form for word in re.findall(r"[^\W_]+", text.lower()) for form in _singulars(word)}
    countries, others, counted = _held_out_names()
    if any(word.startswith(tuple(countries)) for word in words) or (_ASKS.search(text) and words & others):
        return True
    if _COUNTS_SOMETHING.search(text) and any(words >= things for things in counted):
        return True
    text = _NUMBER.sub(lambda found: str(_NUMBERS.index(found[0].lower())), text)
    numbers = [int(number) for number in re.findall(r"(?<!\d)\d{1,2}(?!\d)", text)]
    pairs = itertools.combinations(sorted(number for number in numbers if number <= MOST), 2)
    return bool(_REACHES.search(text)) and any(is_held_out(f"{a} {b}") for a, b in pairs)


def _singulars(word: str) -> set[str]:
    """The word, and what it may be the plural of."""
    return {word, _irregular().get(word, word), word.removesuffix("s"), word.removesuffix("es")} | (
        {word[:-3] + "y"} if word.endswith("ies") else set()
    )


@cache
def _irregular() -> dict[str, str]:
    """Plural -> singular."""
    return {answer: fact.asked[0] for fact in facts() if fact.kind == "plural" for answer in fact.answers}


@cache
def _held_out_names() -> tuple[frozenset[str], frozenset[str], tuple[frozenset[str], ...]]:
    """Held-out countries, words, and of things to count the words, in lower case and the singular."""
    countries: set[str] = set()
    others: set[str] = set()
    counted = []
    for fact in facts():
        name = fact.about[0].lower()
        if fact.kind in ("plus", "minus", "times") or not fact.is_held_out():
            continue
        if fact.kind == "count":
            told = [word for word in name.split() if word not in _FILLING]
            counted.append(frozenset(_irregular().get(word, word.removesuffix("s")) for word in told))
        else:
            (countries if fact.kind in _NAMED else others).add(name)
    return frozenset(countries), frozenset(others), tuple(counted)
