"""A sampler as an artifact: a folder with weights, config and model card, on disk or on the Hugging Face Hub.

`huggingface_hub` is imported when something is really fetched or pushed; its own switches (HF_HUB_OFFLINE, HF_ENDPOINT,
HF_HOME, HF_TOKEN) count.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from adjust_dlm.bases import Base
from adjust_dlm.files import plain, write_whole
from adjust_dlm.hub import SAMPLER as CONFIG
from adjust_dlm.hub import is_hub_id, local
from adjust_dlm.sampler import WEIGHTS, Sampler, load_sampler
from adjust_dlm.types import require
from adjust_dlm.words import title_of

RUN, CARD = "run.yaml", "README.md"
LIBRARY = "adjust-dlm"
TAGS = (LIBRARY, "masked-diffusion", "diffusion-language-model", "text-generation")
_OWN = ("config", "base_fingerprint")  # keys of the config file that no provenance may replace


def save_pretrained(
    sampler: Sampler, folder: Path | str, *, run: Any = None, results: Mapping[str, Any] | None = None,
    sections: Sequence[str] = (), tags: Sequence[str] = (), **provenance: Any,
) -> Path:  # fmt: skip
    """Writes a sampler with its model card.

    Args:
        sampler: g; its weights are stored as bf16.
        folder: where to; made if need be.
        run: the resolved settings of the training run, a mapping or a dataclass: becomes `run.yaml`.
        results: content of a `result.json` (or its `results`); a K-table in it goes into the card.
        sections: more Markdown for the card.
        tags: more tags for the card.
        provenance: further facts for the config file; the card shows `base` (a name), `base_model` (a Hub id),
            `license`, `data`, `training` and `heldout`.

    Returns:
        The folder.

    Raises:
        InputError: provenance under a reserved name, a `base_model` that is no Hub id, or a folder whose README.md or
            run.yaml is not this sampler's.
    """
    folder = Path(folder)
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


def from_pretrained(path_or_id: Path | str, base: Base, *, revision: str | None = None) -> Sampler:
    """Loads g from a folder or from the Hub, for the one base it belongs to.

    Args:
        path_or_id: a folder, or a Hub id `ORG/NAME` where no such folder exists.
        base: the base; its dtype and device become the sampler's.
        revision: branch, tag or commit on the Hub.

    Raises:
        InputError: no sampler there or none to be fetched, damaged files, or another base by fingerprint.
    """
    return load_sampler(local(path_or_id, (CONFIG, WEIGHTS), revision=revision), base)


def read_provenance(folder: Path) -> dict[str, Any]:
    """What `save_pretrained` was told, from a folder that holds a sampler."""
    facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {key: value for key, value in facts.items() if key not in _OWN}


def push_to_hub(
    sampler: Sampler, repo_id: str, *, private: bool = False, message: str = "Upload sampler", **saved: Any
) -> str:
    """Saves the sampler as `save_pretrained` does and uploads it.

    Args:
        sampler: g.
        repo_id: `ORG/NAME`; made if it is not there.
        private: whether a new repository is private; one that exists stays as it is.
        message: of the commit.
        saved: see `save_pretrained`.

    Returns:
        The address of the commit.

    Raises:
        InputError: `repo_id` is no Hub id, or as `save_pretrained`.
    """
    with tempfile.TemporaryDirectory() as work:
        return upload(save_pretrained(sampler, work, **saved), repo_id, private=private, message=message)


def upload(folder: Path, repo_id: str, *, private: bool = False, message: str = "Upload sampler") -> str:
    """Uploads a folder that `save_pretrained` or `adjust export` wrote; returns the address of the commit."""
    check_hub_id("repo_id", repo_id)
    from huggingface_hub import HfApi

    api = HfApi(library_name=LIBRARY)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).commit_url)


def check_hub_id(what: str, repo_id: str) -> None:
    """Raises InputError unless `repo_id` has the form of a Hub id."""
    require(is_hub_id(repo_id), f"{what} is {repo_id!r}; it must be a Hub id, ORG/NAME")


def model_card(
    sampler: Sampler, facts: Mapping[str, Any], results: Mapping[str, Any], *, sections: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:  # fmt: skip
    """Markdown with YAML front matter, from the facts given and nothing else."""
    from jinja2 import Environment, FileSystemLoader

    head = {"library_name": LIBRARY, "tags": [*TAGS, *tags]}
    head |= {key: facts[key] for key in ("license", "base_model") if facts.get(key)}
    if "base_model" in head:
        check_hub_id("base_model", str(head["base_model"]))
    inner = results.get("results", results)
    table = inner if isinstance(inner, Mapping) else {}
    places = (facts, facts.get("training") or {}, table.get("config") or {})
    name = next((public_name(str(place["base"])) for place in places if place.get("base")), "a base without a name")
    training = facts.get("training") or {}
    data = facts.get("data") or "not given"
    if data == "not given" and "trajectories" in training and "data_digest" in training:
        data = f"{training['trajectories']} trajectories of the base, digest `{str(training['data_digest'])[:16]}`"
    page = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True)
    return page.get_template("card.md.j2").render(
        head=yaml.safe_dump(head, sort_keys=False), name=name, sampler=sampler, form=asdict(sampler.config), data=data,
        parameters=sum(p.numel() for p in sampler.parameters()), sections=sections, cells=table.get("cells"),
        config=table.get("config"), measured=_finite(table), heldout=_finite(facts.get("heldout") or {}),
        title_of=title_of, public_name=public_name, interval=_interval,
    )  # fmt: skip


def public_name(name: str) -> str:
    """A name as it stands; of a path on somebody's disk only the last part."""
    return Path(name).name if name.startswith(("/", "~", ".")) or "\\" in name else name


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    kinds = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: v for k, v in kinds.items() if math.isfinite(v)}


def _interval(cell: Mapping[str, Any], key: str, form: str) -> str:
    both = [cell.get(key), cell.get(f"{key}_ci95")]
    return " +- ".join(format(value, form) for value in both if value is not None and math.isfinite(value))
