"""`adjust export`: a sampler as a repository for the Hub and for transformers' `custom_generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from adjust_dlm.commands.output import Outcome, check_folder, say
from adjust_dlm.commands.settings import read_yaml
from adjust_dlm.types import DEFAULT_BASE, require

if TYPE_CHECKING:
    from adjust_dlm.bases import Base
    from adjust_dlm.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of `adjust export`. The repository gets no result.json: it holds what is to be shared and nothing else.

    Attributes:
        base: name of a base (see `adjust bases`) or a folder that `adjust adapt` wrote.
        sampler: folder or Hub id of a sampler; by default the one that ships for the base.
        from_released: checkpoint of the published Dream sampler (file, index or folder) to import instead.
        repository: folder to write.
        run: run.yaml of the training run, to go along.
        results: result.json of `adjust eval`, for the model card's table.
        license: of the sampler, as the Hub spells it (apache-2.0).
        base_model: Hub id of the base, for the model card.
        data: what the sampler was trained on, in a few words, for the model card.
        push: Hub id ORG/NAME to upload the repository to.
        private: make a new Hub repository private.
    """

    base: str = DEFAULT_BASE
    sampler: Path | None = None
    from_released: Path | None = None
    repository: Annotated[Path, tyro.conf.arg(aliases=["--output"])] = Path("runs/export")
    run: Path | None = None
    results: Path | None = None
    license: str | None = None
    base_model: str | None = None
    data: str | None = None
    push: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        """Flags that contradict each other."""
        both = self.sampler is not None and self.from_released is not None
        require(not both, "--sampler and --from-released exclude each other: both name the sampler")
        require(self.push is not None or not self.private, "--private is about --push, which is not given")


def run(flags: ExportConfig) -> Outcome:
    """Writes the repository, uploads it if asked to, prints where it is."""
    _check(flags)
    from adjust_dlm.artifacts import upload
    from adjust_dlm.bases import load_base
    from adjust_dlm.exported import export

    training = None if flags.run is None else read_yaml(flags.run)
    results = None if flags.results is None else read_yaml(flags.results)
    base = load_base(flags.base, dtype="bfloat16")  # what is written is bf16
    sampler, provenance, its_run = _sampler(flags, base)
    given = {"license": flags.license, "base_model": flags.base_model, "data": flags.data}
    provenance.pop("base", None)  # as this base is called here
    provenance |= {key: value for key, value in given.items() if value is not None}
    folder = export(sampler, base, flags.repository, run=training or its_run, results=results, **provenance)
    say(str(folder))
    commit = None
    if flags.push is not None:
        commit = upload(folder, flags.push, private=flags.private, message="Upload sampler")
        say(commit)
    return Outcome(results={"repository": folder, "commit": commit})


def _check(flags: ExportConfig) -> None:
    """All that can be refused before a model is loaded."""
    from adjust_dlm.artifacts import check_hub_id
    from adjust_dlm.sampler import default_sampler

    named = flags.sampler or flags.from_released or default_sampler(flags.base)
    require(named is not None, f"no sampler ships for base {flags.base!r}; name one with --sampler")
    for what, name in (("push", flags.push), ("base_model", flags.base_model)):
        if name is not None:
            check_hub_id(what, name)
    check_folder(flags.repository)


def _sampler(flags: ExportConfig, base: Base) -> tuple[Sampler, dict[str, Any], dict[str, Any] | None]:
    """(sampler, its provenance, its run.yaml) from what the flags name."""
    from adjust_dlm.artifacts import RUN, read_provenance
    from adjust_dlm.hub import SAMPLER as CONFIG
    from adjust_dlm.hub import local
    from adjust_dlm.released import import_released
    from adjust_dlm.sampler import WEIGHTS, default_sampler, load_sampler

    if flags.from_released is not None:
        return import_released(flags.from_released, base), {"imported_from": flags.from_released.name}, None
    folder = local(flags.sampler or default_sampler(flags.base) or "", (CONFIG, WEIGHTS, RUN))
    sampler = load_sampler(folder, base)
    its_run = read_yaml(folder / RUN) if (folder / RUN).is_file() else None
    return sampler, read_provenance(folder), its_run
