"""Models and samplers by Hub id: the Hub library's local snapshot, and one clear line where there is none.

`huggingface_hub` is imported when something is really fetched; its own switches (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME,
HF_TOKEN) count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from adjust_dlm.types import InputError

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # of a model: no code, no pickles
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(
    name: str, files: Sequence[str], *, revision: str | None = None, cache_dir: Path | str | None = None,
    endpoint: str | None = None, kind: str = "model",
) -> Path:  # fmt: skip
    """The local folder of `files` of a Hub repository, fetched if it is not in the Hub library's cache.

    `kind` is what the Hub calls the type of a repository: model or dataset.

    Raises:
        InputError: neither the Hub nor its cache has it.
    """
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(files), cache_dir=cache_dir, endpoint=endpoint
        )
    except Exception as error:  # those of its HTTP library, too, which changes with its major versions
        at = "" if revision is None else f" at revision {revision!r}"
        said = " ".join(str(error).split()) or "no reason given"
        raise InputError(
            f"no folder {name!r} here, and the Hub gave none{at}: {type(error).__name__}: {said}"
        ) from error
    return Path(found)
