"""How varied texts are. NLL alone can be lowered by dull text, so it is never shown without these."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from adjust_dlm.types import require

Tokens = Sequence[Sequence[int]]


def distinct_n(token_lists: Tokens, n: int) -> float:
    """Unique n-grams / all n-grams, over all texts together; nan when no text has n tokens.

    It falls with the amount of text: compare only sets of the same size.
    """
    grams = [gram for ids in token_lists for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def token_entropy(token_lists: Tokens) -> float:
    """Entropy of the tokens of a text, in nats, averaged over the texts that have any; nan when none has.

    The usual companion of generative perplexity. At most the log of the length: compare only texts of the same length.
    """
    found = []
    for ids in filter(len, token_lists):
        shares = [count / len(ids) for count in Counter(ids).values()]
        found.append(-sum(share * math.log(share) for share in shares))
    return sum(found) / len(found) if found else math.nan


def repeated_share(token_lists: Tokens, *, n: int = 4, above: float = 0.2) -> float:
    """Share of texts in which one repeated n-gram covers more than `above` of the tokens.

    Catches the loops (copies of one line, one word over and over) that low temperatures fall into.
    """
    require(len(token_lists) > 0, "no texts to look for repetition in")
    return sum(repeat_coverage(ids, n) > above for ids in token_lists) / len(token_lists)


def repeat_coverage(ids: Sequence[int], n: int) -> float:
    """Largest share of the tokens that lie inside occurrences of one n-gram that occurs at least twice."""
    starts = defaultdict(list)
    for i, gram in enumerate(_ngrams(ids, n)):
        starts[gram].append(i)
    covered = [len({i + j for i in at for j in range(n)}) for at in starts.values() if len(at) > 1]
    return max(covered, default=0) / max(len(ids), 1)


def _ngrams(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    require(n >= 1, f"n is {n}; an n-gram has at least 1 token")
    return zip(*(ids[j:] for j in range(n)), strict=False)
