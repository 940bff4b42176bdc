"""A sampler as an artifact: a folder with weights, config and model card, on disk or on the Hugging Face Hub.

`huggingface_hub` is imported when something is really fetched or pushed; its own switches (HF_HUB_OFFLINE, HF_ENDPOINT,
HF_HOME, HF_TOKEN) count.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from adjust_dlm.bases import Base
from adjust_dlm.bases.hub import is_hub_id, snapshot
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import CONFIG, WEIGHTS, Sampler, load_sampler
from adjust_dlm.types import require

RUN, CARD = "run.yaml", "README.md"
LIBRARY = "adjust-dlm"
TAGS = (LIBRARY, "masked-diffusion", "diffusion-language-model", "text-generation")
_OWN = ("config", "base_fingerprint")  # keys of the config file that no provenance may replace


# Save and load -------------------------------------------------------------------------------------------------


def save_pretrained(
    sampler: Sampler, folder: Path | str, *, run: Any = None, results: Mapping[str, Any] | None = None,
    **provenance: Any,
) -> Path:  # fmt: skip
    """Writes a sampler with its model card.

    Args:
        sampler: g; its weights are stored as bf16.
        folder: where to; made if need be.
        run: the resolved settings of the training run, a mapping or a dataclass: becomes `run.yaml`.
        results: content of a `result.json` (or its `results`); a K-table in it goes into the card.
        provenance: further facts for the config file; the card shows `base` (a name), `base_model` (a Hub id),
            `license`, `data`, `training` and `heldout`.

    Returns:
        The folder.

    Raises:
        InputError: provenance under a reserved name, a `base_model` that is no Hub id, or a folder whose README.md or
            run.yaml is not this sampler's.
    """
    return write_artifact(sampler, Path(folder), run=run, results=results, provenance=provenance)


def write_artifact(
    sampler: Sampler, folder: Path, *, run: Any, results: Mapping[str, Any] | None, provenance: Mapping[str, Any],
    sections: Sequence[str] = (), tags: Sequence[str] = (),
) -> Path:  # fmt: skip
    """`save_pretrained` with more Markdown sections and tags in the card."""
    reserved = sorted(set(_OWN) & provenance.keys())
    require(not reserved, f"provenance may not be called {', '.join(reserved)}: the sampler itself writes that")
    facts = plain(provenance)
    card = model_card(sampler, facts, plain(results or {}), sections=sections, tags=tags)
    _check_foreign(folder, run)
    sampler.save(folder, **facts)
    texts = {} if run is None else {RUN: yaml.safe_dump(plain(run), sort_keys=False, allow_unicode=True)}
    write_whole({folder / name: text for name, text in (texts | {CARD: card}).items()})
    return folder


def _check_foreign(folder: Path, run: Any) -> None:
    card = folder / CARD
    ours = not card.exists() or f"library_name: {LIBRARY}" in card.read_text(encoding="utf-8", errors="replace")
    require(ours, f"{card} is no sampler's model card; give a folder of its own")
    stale = run is None and (folder / RUN).exists()
    require(not stale, f"{folder / RUN} would be taken for this sampler's; give its run, or another folder")


def from_pretrained(
    path_or_id: Path | str, base: Base, *, revision: str | None = None, cache_dir: Path | str | None = None,
    endpoint: str | None = None,
) -> Sampler:  # fmt: skip
    """Loads g from a folder or from the Hub, for the one base it belongs to.

    Args:
        path_or_id: a folder, or a Hub id `ORG/NAME` where no such folder exists.
        base: the base; its dtype and device become the sampler's.
        revision: branch, tag or commit on the Hub.
        cache_dir: the Hub library's cache, unless its default.
        endpoint: another Hub than the default one.

    Raises:
        InputError: no sampler there or none to be fetched, damaged files, or another base by fingerprint.
    """
    return load_sampler(artifact_folder(path_or_id, revision=revision, cache_dir=cache_dir, endpoint=endpoint), base)


def artifact_folder(
    path_or_id: Path | str, *, revision: str | None = None, files: Sequence[str] = (CONFIG, WEIGHTS),
    cache_dir: Path | str | None = None, endpoint: str | None = None,
) -> Path:  # fmt: skip
    """The folder itself, or the Hub library's local snapshot of `files`.

    Raises:
        InputError: neither a folder nor something that the Hub or its cache has; a revision of a folder.
    """
    folder = Path(path_or_id)
    name = folder.as_posix()
    if folder.is_dir() or not is_hub_id(name):
        require(revision is None, f"revision is {revision!r}, but {name} is no Hub id; folders have no revisions")
        return folder
    return snapshot(name, files, revision=revision, cache_dir=cache_dir, endpoint=endpoint)


def read_provenance(folder: Path) -> dict[str, Any]:
    """What `save_pretrained` was told, from a folder that holds a sampler."""
    facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {key: value for key, value in facts.items() if key not in _OWN}


# Push ----------------------------------------------------------------------------------------------------------


def push_to_hub(
    sampler: Sampler, repo_id: str, *, private: bool = False, run: Any = None,
    results: Mapping[str, Any] | None = None, message: str = "Upload sampler", endpoint: str | None = None,
    token: str | None = None, **provenance: Any,
) -> str:  # fmt: skip
    """Saves the sampler as `save_pretrained` does and uploads it; the repository is made if it is not there.

    Args:
        sampler: g.
        repo_id: `ORG/NAME`.
        private: whether a new repository is private; one that exists stays as it is.
        run: see `save_pretrained`.
        results: see `save_pretrained`.
        message: of the commit.
        endpoint: another Hub than the default one.
        token: unless the one of HF_TOKEN or `hf auth login`.
        provenance: see `save_pretrained`.

    Returns:
        The address of the commit.

    Raises:
        InputError: `repo_id` is no Hub id, or as `save_pretrained`.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = save_pretrained(sampler, work, run=run, results=results, **provenance)
        return upload(folder, repo_id, private=private, message=message, endpoint=endpoint, token=token)


def upload(
    folder: Path, repo_id: str, *, private: bool = False, message: str = "Upload sampler",
    endpoint: str | None = None, token: str | None = None,
) -> str:  # fmt: skip
    """Uploads a folder that `save_pretrained` or `adjust export` wrote; returns the address of the commit."""
    check_hub_id("repo_id", repo_id)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token, library_name=LIBRARY)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).commit_url)


def check_hub_id(what: str, repo_id: str) -> None:
    """Raises InputError unless `repo_id` has the form of a Hub id."""
    require(is_hub_id(repo_id), f"{what} is {repo_id!r}; it must be a Hub id, ORG/NAME")


# Model card ----------------------------------------------------------------------------------------------------

_INTRO = """\
# ADJUST sampler for {base}

One small transformer layer g for the masked diffusion language model {base}. After each pass of the frozen base,
`tokens_per_step` tokens are drawn one after another; g updates the base's states in between. Embedding and head are the
base's own and are not in this repository.
"""

_USE = """\
## Use

```python
from adjust_dlm import from_pretrained, generate, load_base

base = load_base("{base}")
g = from_pretrained("PATH_OR_ID", base)
print(generate(base, "Once", sampler=g, tokens_per_step=4))
```
"""

_LIMITS = """\
## Limits

- It is not lossless. With more than one token per pass the law of the text differs from the base's own law, which draws
  one token at a time; the distance grows with the number of tokens per pass. With one token per pass g is never called.
- It belongs to exactly one base, the one with the fingerprint above, and is refused on any other.
- It makes nothing truer or safer than the base's own text.
- Numbers in this card are those that were given when it was written; what is not here was not given.
"""


def model_card(
    sampler: Sampler, facts: Mapping[str, Any], results: Mapping[str, Any], *, sections: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:  # fmt: skip
    """Markdown with YAML front matter, from the facts given and nothing else."""
    name = _base_name(facts, results)
    parts = [
        _front_matter(facts, tags), _INTRO.format(base=name), _about(sampler, facts, name), _USE.format(base=name),
        *sections, _measured(facts, results), _LIMITS,
    ]  # fmt: skip
    return "\n".join(parts)


def _front_matter(facts: Mapping[str, Any], tags: Sequence[str]) -> str:
    head: dict[str, Any] = {"library_name": LIBRARY, "tags": [*TAGS, *tags]}
    if facts.get("license"):
        head["license"] = facts["license"]
    if facts.get("base_model"):
        check_hub_id("base_model", str(facts["base_model"]))
        head["base_model"] = facts["base_model"]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n"


def _base_name(facts: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The base as the user called it."""
    places = (facts, facts.get("training") or {}, _table(results).get("config") or {})
    name = next((str(place["base"]) for place in places if place.get("base")), None)
    return "a base without a name" if name is None else public_name(name)


def public_name(name: str) -> str:
    """A name as it stands; of a path on somebody's disk only the last part."""
    return Path(name).name if name.startswith(("/", "~", ".")) or "\\" in name else name


def _about(sampler: Sampler, facts: Mapping[str, Any], name: str) -> str:
    rows = {
        "base": f"`{name}`",
        "fingerprint of the base": f"`{sampler.base_fingerprint}`",
        "parameters": f"{sum(p.numel() for p in sampler.parameters()):,}, stored as bf16",
        "form": ", ".join(f"{key} {value}" for key, value in asdict(sampler.config).items()),
        "data": _data(facts),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""])


def _data(facts: Mapping[str, Any]) -> str:
    training = facts.get("training") or {}
    if facts.get("data"):
        return str(facts["data"])
    if "trajectories" in training and "data_digest" in training:
        return f"{training['trajectories']} trajectories of the base, digest `{str(training['data_digest'])[:16]}`"
    return "not given"


def _measured(facts: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The K-table, or plain numbers, and what training measured on held-out trajectories."""
    table, parts = _table(results), ["## Measured", ""]
    if table.get("cells"):
        parts += [_about_table(table.get("config") or {}), "", *_k_table(table["cells"])]
    elif numbers := _numbers(table):
        parts += ["| | value |", "|---|---|", *numbers]
    if heldout := _numbers(facts.get("heldout") or {}):
        parts += [""] * (len(parts) > 2)
        parts += ["On held-out trajectories, at the end of training:", "", "| | value |", "|---|---|", *heldout]
    return "\n".join(parts if len(parts) > 2 else [*parts, "No measurements were given."]) + "\n"


def _table(results: Mapping[str, Any]) -> dict[str, Any]:
    inner = results.get("results", results)
    return dict(inner) if isinstance(inner, Mapping) else {}


def _numbers(values: Mapping[str, Any]) -> list[str]:
    good = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return [f"| {key} | {value:.4g} |" for key, value in good.items()]


def _about_table(config: Mapping[str, Any]) -> str:
    judge = f" under `{public_name(str(config['judge']))}`" if config.get("judge") else ""
    length = f" of {config['max_new_tokens']} tokens" if config.get("max_new_tokens") else ""
    return f"Unconditional texts{length}; NLL in nats a token{judge}, MAUVE against joint text; 95 % intervals."


def _k_table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = ["| T | decoder | K | n | NLL | MAUVE | gap closed |", "|---|---|---|---|---|---|---|"]
    for cell in cells:
        values = [str(cell.get(key, "")) for key in ("temperature", "decoder")]
        values += [str(cell.get(key) or "") for key in ("tokens_per_step", "n")]  # a variant's K is 0: it has none
        values += [_interval(cell, "nll"), _interval(cell, "mauve"), _interval(cell, "gap_closed", percent=True)]
        rows.append("| " + " | ".join(values) + " |")
    return rows


def _interval(cell: Mapping[str, Any], key: str, *, percent: bool = False) -> str:
    mean, half = cell.get(key), cell.get(f"{key}_ci95")
    if mean is None:
        return ""
    text, sign = (f"{100 * mean:.1f}", " %") if percent else (f"{mean:.3f}", "")
    if half is not None:
        text += f" +- {100 * half:.1f}" if percent else f" +- {half:.3f}"
    return text + sign


# Small things --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as the types that JSON and YAML know."""
    return json.loads(json.dumps(value, default=lambda x: asdict(x) if is_dataclass(x) else str(x)))  # type: ignore[arg-type]
