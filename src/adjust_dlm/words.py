"""Names of measures as a person reads them: results keep short keys, printed tables have words and units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

# Key -> words, or words and unit.
TITLES: dict[str, tuple[str, ...]] = {
    "temperature": ("T",), "tokens_per_step": ("K", "tokens/pass asked"), "tokens_per_pass": ("tokens/pass",),
    "tokens_per_second": ("tokens/s",), "seconds": ("seconds",), "base_calls": ("base passes",),
    "sampler_calls": ("g passes",), "partner_calls": ("AR passes",), "speedup": ("speed-up over joint",),
    "kl_qp": ("KL(q||p)", "nats/token"), "kl_pq": ("KL(p||q)", "nats/token"), "nll": ("NLL", "nats/token"),
    "kl_qp_below_parallel": ("KL(q||p) below parallel's", "share"), "nll_p": ("NLL under p", "nats/token"),
    "kl_pq_below_parallel": ("KL(p||q) below parallel's", "share"), "entropy_p": ("entropy of p", "nats/token"),
    "entropy_q": ("entropy of q", "nats/token"), "entropy": ("entropy of a text's tokens", "nats"),
    "mauve": ("MAUVE",), "ce": ("masked cross-entropy", "nats/token"), "perplexity": ("perplexity",),
    "distinct_2": ("distinct bigrams", "share"), "distinct-2": ("distinct bigrams", "share"),
    "distinct_4": ("distinct 4-grams", "share"),
    "repeated": ("texts that repeat themselves", "share"), "gap_closed": ("gap closed", "share"),
    "accuracy": ("accuracy", "share"), "mcnemar_p": ("McNemar p",), "mean_a": ("mean of A",),
    "mean_b": ("mean of B",), "difference": ("B - A",), "only_a": ("solved by A alone",),
    "only_b": ("solved by B alone",), "both": ("solved by both",), "neither": ("solved by neither",),
    "low": ("95 % interval from",), "high": ("95 % interval to",), "least": ("one-sided 95 % bound",),
    "n_empty": ("empty texts",), "n_reference": ("reference texts",), "n_tokens": ("tokens",),
    "base_fingerprint": ("fingerprint of the base",), "kl": ("KL(base||g)", "nats/token"),
    "stale": ("KL(base||earlier state)", "nats/token"), "top1": ("same likeliest token", "share"),
    "position": ("same next position", "share"), "own_kl": ("KL(base||g) at g's position", "nats/token"),
    "own_back": ("KL(g||base) at g's position", "nats/token"),
    "memory_gib": ("memory", "GiB"),
    "disk_gib": ("disk", "GiB"), "heldout": ("held-out trajectories",), "no_divergence": ("no KL, because",),
}  # fmt: skip


def title_of(key: str, *, unit: bool = False) -> str:
    """Words for a key, with their unit if asked; `kl_2` is the KL at depth 2. Other keys lose their underscores."""
    words, _, depth = key.rpartition("_")
    if key in TITLES or words not in TITLES or not depth.isdecimal():
        words, depth = key, ""
    name, *of = TITLES.get(words, (words.replace("_", " "),))
    return name + (f", depth {depth}" if depth else "") + (f" ({of[0]})" if of and unit else "")


def by_depth(values: Mapping[str, float]) -> str:
    """Values of `kl_1`, `kl_2`, ... in one line: KL(base||g) 0.61 / 0.93; and so on."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        found.setdefault(title_of(key.rpartition("_")[0]), []).append(f"{value:.4g}")
    return "; ".join(f"{name} {' / '.join(shown)}" for name, shown in found.items())


def counted(number: float, noun: str) -> str:
    """A number of things: 1 pass, 2 passes, 2.5 passes."""
    shown = number if isinstance(number, int) else f"{number:.4g}"
    return f"{shown} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def known(word: str, names: Iterable[str]) -> str:
    """The end of a message about a word that is none of the names: the nearest of them, and all."""
    names = list(names)
    near = get_close_matches(word, names, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(names)}"
