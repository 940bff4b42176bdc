"""The trajectories of a training run, checked: of this base, long enough, and apart from the held-out ones."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import numpy as np

from adjust_dlm.bases import Base
from adjust_dlm.data.store import Columns, TrajectoryStore
from adjust_dlm.types import require

log = logging.getLogger(__name__)


def open_rows(
    folders: Sequence[str], heldout_folders: Sequence[str], heldout: int, base: Base
) -> tuple[TrajectoryStore, TrajectoryStore | None]:
    """Training trajectories, and the held-out ones if they have folders of their own; else `heldout` rows stay apart.

    Raises:
        InputError: no folder, another base or vocabulary, nothing to learn from, nothing left to train on, or rows that
            stand in both: the same seed, row number, tokens and order.
    """
    data = open_checked(folders, base)
    if not heldout_folders:
        require(
            len(data) > heldout,
            f"{len(data)} trajectories, of which {heldout} are held out; there must be some left to train on",
        )
        return data, None
    held = open_checked(heldout_folders, base)
    seen, mine = set(_digests(data.columns)), _digests(held.columns)
    texts, total = {text for *_, text in seen}, len(mine)
    same, equal = sum(row in seen for row in mine), sum(text in texts for *_, text in mine)
    require(
        same == 0,
        f"{same} of the {total} held-out trajectories are training trajectories, too; "
        "make them with another seed or first row",
    )
    if equal:  # of other rows: a base that says little, T = 0
        log.warning("%d of %d held-out trajectories equal a training one in tokens and order", equal, total)
    return data, held


def open_checked(folders: Sequence[str], base: Base) -> TrajectoryStore:
    """The trajectories in `folders`; raises InputError unless every row is of this base and some have two commits."""
    data = TrajectoryStore(*folders)
    names, manifest = ", ".join(map(str, data.folders)), data.manifests[0]
    require(
        manifest["base_fingerprint"] == base.fingerprint,
        f"the trajectories in {names} come from a base with fingerprint {manifest['base_fingerprint'][:16]}; "
        f"base {base.spec.name!r} has {base.fingerprint[:16]}",
    )
    top = int(data.columns.tokens_P.max())
    require(
        manifest["mask_id"] == base.spec.mask_id and top < base.spec.vocab_size,
        f"the trajectories in {names} have another vocabulary: mask token {manifest['mask_id']}, ids up to {top}; "
        f"base {base.spec.name!r} has mask token {base.spec.mask_id}, ids up to {base.spec.vocab_size - 1}",
    )
    commits_N = np.maximum.reduceat(data.columns.order_P, data.columns.start_N[:-1]) + 1
    require(
        bool((commits_N >= 2).any()),
        f"none of the {len(data)} trajectories in {names} has two commits, so g has nothing to learn from them; "
        "make them with more max_new_tokens, or with suppress_eos",
    )
    return data


def _digests(c: Columns) -> list[tuple[int, int, bytes]]:
    """Seed and number of each row, and a digest of its tokens and order."""
    parts = [slice(*ends) for ends in zip(c.start_N[:-1], c.start_N[1:], strict=True)]
    texts = [c.tokens_P[part].tobytes() + c.order_P[part].tobytes() for part in parts]
    found = [hashlib.blake2b(text, digest_size=16).digest() for text in texts]
    return list(zip(c.seed_N.tolist(), c.row_N.tolist(), found, strict=True))
