"""Models and samplers by Hub id: the Hub library's local snapshot, and one clear line where there is none.

`huggingface_hub` is imported when something is really fetched; its own switches (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME,
HF_TOKEN) count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adjust_dlm.types import DEFAULT_BASE, InputError, refusing, require
from adjust_dlm.words import known

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # of a model: no code, no pickles
SAMPLER = "sampler.json"  # the config of a g
BASES = ("adapted", "antiberty", "checkpoint", "exact", "smol", "smol-block")  # that `bases` registers
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    return _HUB_ID.fullmatch(name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: there is none, or a name stands in it twice.
    """
    with refusing(f"{path} is not JSON", OSError, ValueError):
        content: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    require(isinstance(content, dict), f"{path} holds a {type(content).__name__}; an object is wanted")
    return dict(content)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text; raises ValueError for a name that stands there twice, where json takes the last."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice; give it once")
    return found


def local(name: Path | str, files: Sequence[str], *, revision: str | None = None) -> Path:
    """The path itself, or the snapshot of a Hub id where there is no such path; a path may point at nothing.

    Raises:
        InputError: neither the Hub nor its cache has it; a revision of a path.
    """
    path = Path(name)
    if path.exists() or not is_hub_id(path.as_posix()):
        require(revision is None, f"revision is {revision!r}, but {path} is no Hub id; folders have no revisions")
        return path
    return snapshot(path.as_posix(), files, revision=revision)


def require_device(name: str) -> None:
    """Raises InputError for what is no name of a device."""
    good = re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None
    require(good, f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")


def require_base(name: str, names: Iterable[str]) -> None:
    """Raises InputError unless a base is one of these names, a path that is there, or a Hub id."""
    path = Path(name)
    if name in names or path.exists() or is_hub_id(path.as_posix()):
        return
    require("/" not in name and path.suffix != ".gguf", f"there is no file or folder {name!r}")
    others = "a folder that `adjust adapt` wrote, or the path or Hub id of a published checkpoint (docs/models.md)"
    raise InputError(f"unknown base {name!r}; {known(name, names)}, {others}")


def require_sampler(folder: Path) -> Path:
    """The config file of a sampler's folder; raises InputError where there is none."""
    require((folder / SAMPLER).is_file(), f"{folder} holds no sampler ({SAMPLER} is missing)")
    return folder / SAMPLER


def require_ar(folder: Path, source: str) -> None:
    """Raises InputError unless a folder, named by its source, holds an autoregressive model."""
    require((folder / "config.json").is_file(), f"no autoregressive model at {source!r} (config.json is missing)")


def check_named(settings: object) -> None:
    """Raises InputError for no device, and for a base, sampler or AR model that is neither there nor a Hub id."""
    require_device(getattr(settings, "device", "auto"))
    if "adjust_dlm.bases" not in sys.modules:  # else `load_base` says it, which knows what was registered besides
        require_base(getattr(settings, "base", DEFAULT_BASE), getattr(settings, "bases", BASES))
    for name in ("sampler", "judge", "partner", "ar"):
        source = str(getattr(settings, name, None) or "smol")
        if source == "smol" or (is_hub_id(source) and not Path(source).exists()):
            continue
        if name == "sampler":
            require_sampler(Path(source))
        else:
            require_ar(Path(source), source)


def require_init(init: str) -> None:
    """Raises InputError unless training can start there."""
    good = init == "fresh" or Path(init).is_dir()
    require(good, f"init is {init!r}; it must be fresh or the folder of a sampler")


def snapshot(name: str, files: Sequence[str], *, revision: str | None = None, kind: str = "model") -> Path:
    """The local folder of `files` of a Hub repository, fetched if it is not in the Hub library's cache.

    `kind` is what the Hub calls the type of a repository: model or dataset.

    Raises:
        InputError: neither the Hub nor its cache has it.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # those of its HTTP library, too, which changes with its major versions
        at = "" if revision is None else f" at revision {revision!r}"
        said = " ".join(str(error).split()) or "no reason given"
        raise InputError(
            f"no folder {name!r} here, and the Hub gave none{at}: {type(error).__name__}: {said}"
        ) from error
