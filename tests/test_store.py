"""The trajectory store: what goes in comes out, and nothing half-written, missing or doubled gets past the door."""

import dataclasses
import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adjust_dlm.data import store
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.types import GIVEN, MASKED, InputError, Trajectory

BIG = 151_642  # a token id that neither int16 nor uint16 can hold


def trajectory(row: int, *, seed: int = 0, prompt: int = 2, new: int = 3) -> Trajectory:
    """Prompt of `prompt` tokens, then `new` commits right to left, then one position that never was committed."""
    return Trajectory(
        tokens_L=torch.tensor([*range(prompt), *range(BIG, BIG + new), 7]) + row,
        order_L=torch.tensor([*[GIVEN] * prompt, *reversed(range(new)), MASKED]),
        row=row,
        seed=seed,
    )


def manifest(**changes: Any) -> dict[str, Any]:
    facts = {
        "format": 1, "base": "toy", "base_fingerprint": "abc", "mask_id": 9, "dtype": "float32", "seed": 0,
        "temperatures": [1.0], "decode": {"top_p": 1.0, "order": "entropy"}, "first_row": 0, "rows": 10,
        "prompts": {"source": "unconditional", "count": 1, "sha256": "0"}, "shard_rows": 4, "lengths": None,
        "versions": {},
    }  # fmt: skip
    return {**facts, **changes}


def write_store(folder: Path, **changes: Any) -> Path:
    """Ten rows in shards of four; row r has r % 3 + 1 prompt tokens."""
    facts = manifest(**changes)
    folder.mkdir()
    for rows in store.shard_ranges(facts["rows"], facts["shard_rows"], first_row=facts["first_row"]):
        made = [trajectory(r, seed=facts["seed"], prompt=r % 3 + 1) for r in range(*rows)]
        store.write_shard(folder, rows, made, [r % 3 + 1 for r in range(*rows)])
    store.write_manifest(folder, facts)
    return folder


def test_rows_come_back_exactly(tmp_path: Path) -> None:
    opened = TrajectoryStore(write_store(tmp_path / "s"))
    assert len(opened) == 10
    assert opened.columns.row_N.tolist() == list(range(10))
    assert [opened.manifests[0][key] for key in ("base_fingerprint", "mask_id")] == ["abc", 9]
    for r, got in enumerate(opened):
        want = trajectory(r, prompt=r % 3 + 1)
        assert torch.equal(got.tokens_L, want.tokens_L)
        assert torch.equal(got.order_L, want.order_L)
        assert (got.row, got.seed, got.tokens_L.dtype) == (r, 0, torch.int64)
        assert opened.columns.prompt_len_N[r] == r % 3 + 1
    assert int(opened[-1].tokens_L.max()) == BIG + 2 + 9
    with pytest.raises(IndexError, match="index out of range"):
        opened[10]


def test_columns_are_compact(tmp_path: Path) -> None:
    columns = TrajectoryStore(write_store(tmp_path / "s")).columns
    assert (str(columns.tokens_P.dtype), str(columns.order_P.dtype)) == ("int32", "int16")
    # prompts of 1, 2, 3, 1, 2, 3, 1, 2, 3, 1 tokens; each row has three commits and one open position more
    assert columns.start_N.tolist() == [0, 5, 11, 18, 23, 29, 36, 41, 47, 54, 59]


def test_state_of_a_row_that_ended_early_masks_what_was_never_committed() -> None:
    tokens_L, masked_L = trajectory(0).state(1, mask_id=9)  # commit 0 was the third new position
    assert tokens_L.tolist() == [0, 1, 9, 9, BIG + 2, 9]
    assert masked_L.tolist() == [False, False, True, True, False, True]


def test_length_stats_by_hand(tmp_path: Path) -> None:
    assert store.length_stats(TrajectoryStore(write_store(tmp_path / "s")).columns) == {
        "ended_early": 10, "prompt_min": 1, "prompt_max": 3, "prompt_mean": 1.9, "committed_min": 3,
        "committed_max": 3, "committed_mean": 3.0,
    }  # fmt: skip


def test_ranges_cover_every_row_once() -> None:
    assert store.shard_ranges(10, 4, first_row=3) == [(3, 7), (7, 11), (11, 13)]
    assert store.shard_name((0, 512)) == "shard-00000-00512.parquet"
    assert store.shard_name((99_840, 100_352)) == "shard-99840-100352.parquet"


def test_missing_lists_absent_and_damaged_shards(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    ranges = [(0, 4), (4, 8), (8, 10)]
    assert store.missing(folder, ranges) == []
    (folder / "shard-00000-00004.parquet").unlink()
    damaged = folder / "shard-00008-00010.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert store.missing(folder, ranges) == [(0, 4), (8, 10)]
    assert store.missing(folder, [(20, 23)]) == [(20, 23)]


def test_more_than_99999_rows_keep_their_order(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s", first_row=99_996)
    assert TrajectoryStore(folder).columns.row_N.tolist() == list(range(99_996, 100_006))


# --- what the door refuses, always with the file's name ----------------------------------------------------------


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    (folder / "shard-00004-00008.parquet").unlink()
    with pytest.raises(InputError, match=r"lacks rows 4\.\.7 \(shard-00004-00008\.parquet\)"):
        TrajectoryStore(folder)


def test_a_missing_last_shard_is_named(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    (folder / "shard-00008-00010.parquet").unlink()
    with pytest.raises(InputError, match=r"lacks rows 8\.\.9"):
        TrajectoryStore(folder)


def test_rows_twice_are_named(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    store.write_shard(folder, (2, 6), [trajectory(r) for r in range(2, 6)], [2] * 4)
    with pytest.raises(InputError, match=r"shard-00002-00006\.parquet repeats rows 2\.\.3"):
        TrajectoryStore(folder)


def test_rows_past_the_end_are_named(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    store.write_shard(folder, (10, 12), [trajectory(r) for r in (10, 11)], [2] * 2)
    with pytest.raises(InputError, match=r"shard-00010-00012\.parquet reaches past row 9"):
        TrajectoryStore(folder)


def test_a_file_with_other_rows_than_its_name_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    (folder / "shard-00000-00004.parquet").write_bytes((folder / "shard-00004-00008.parquet").read_bytes())
    with pytest.raises(InputError, match=r"shard-00000-00004\.parquet does not hold the rows 0\.\.3"):
        TrajectoryStore(folder)


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    folder = write_store(tmp_path / "s")
    path = folder / "shard-00004-00008.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cannot read .*shard-00004-00008\.parquet"):
        TrajectoryStore(folder)


def test_one_flipped_bit_in_the_data_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s", rows=512, shard_rows=512)
    path = folder / "shard-00000-00512.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"cannot read .*shard-00000-00512\.parquet"):
        TrajectoryStore(folder)


def test_shards_of_another_seed_are_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    store.write_shard(folder, (4, 8), [trajectory(r, seed=5) for r in range(4, 8)], [2] * 4)
    with pytest.raises(InputError, match=r"row 4 of .* has another seed than 0"):
        TrajectoryStore(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "manifest.json is missing"),
        ("{", "is not JSON"),
        ("[]", "an object is wanted"),
        ('{"format": 2}', "format 2"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    folder = write_store(tmp_path / "s")
    path = folder / store.MANIFEST
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=reason):
        TrajectoryStore(folder)


def test_a_manifest_without_a_field_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    (folder / store.MANIFEST).write_text(json.dumps({k: v for k, v in manifest().items() if k != "mask_id"}))
    with pytest.raises(InputError, match="lacks mask_id"):
        TrajectoryStore(folder)


# --- the same run, several folders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 3}, "seed was 0 and is now 3"),
        ({"base_fingerprint": "xyz"}, "base_fingerprint was 'abc' and is now 'xyz'"),
        ({"decode": {"top_p": 0.9, "order": "entropy"}}, "decode.top_p was 1.0 and is now 0.9"),
        ({"temperatures": [1.0, 0.6]}, r"temperatures was \[1.0\] and is now \[1.0, 0.6\]"),
        ({"rows": 20}, "rows was 10 and is now 20"),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_store(tmp_path / "s")
    store.check_same_run(folder, manifest(versions={"torch": "other"}))
    with pytest.raises(InputError, match=message):
        store.check_same_run(folder, manifest(**change))


def test_folders_of_one_base_are_one_store(tmp_path: Path) -> None:
    one, two = write_store(tmp_path / "a"), write_store(tmp_path / "b", seed=1)
    both = TrajectoryStore(one, two)
    assert both.columns.row_N.tolist() == [*range(10), *range(10)]
    assert [t.seed for t in both] == [0] * 10 + [1] * 10
    assert torch.equal(both[13].tokens_L, TrajectoryStore(two)[3].tokens_L)
    assert len(TrajectoryStore(one, write_store(tmp_path / "c", first_row=10))) == 20


def test_folders_of_two_bases_are_refused(tmp_path: Path) -> None:
    one, two = write_store(tmp_path / "a"), write_store(tmp_path / "b", seed=1, base_fingerprint="xyz")
    with pytest.raises(InputError, match=r"base_fingerprint 'xyz', .* has 'abc'"):
        TrajectoryStore(one, two)


def test_folders_with_copies_are_refused(tmp_path: Path) -> None:
    one, two = write_store(tmp_path / "a"), write_store(tmp_path / "b", first_row=9)
    with pytest.raises(InputError, match="share rows of seed 0 on the same prompts"):
        TrajectoryStore(one, two)


@pytest.mark.parametrize(
    ("source", "digest", "copies"), [("a", "0", True), ("unconditional", "1", True), ("a", "1", False)]
)
def test_copies_have_the_name_or_the_content_of_the_prompts_in_common(
    tmp_path: Path, source: str, digest: str, copies: bool
) -> None:
    prompts = {"source": source, "count": 1, "sha256": digest}
    folders = [write_store(tmp_path / "a"), write_store(tmp_path / "b", prompts=prompts)]
    with pytest.raises(InputError, match="hold copies") if copies else nullcontext():
        assert len(TrajectoryStore(*folders)) == 20


def test_only_what_is_written_twice_is_cleaned_away(tmp_path: Path) -> None:
    """Somebody may be at work on the shard that is not there yet."""
    folder = write_store(tmp_path / "s")
    parts = [folder / f".{name}.01.part" for name in (store.shard_name((0, 4)), store.shard_name((10, 14)), "manifest")]
    for part in parts:
        part.touch()
    store.clean(folder)
    assert [part.exists() for part in parts] == [False, True, True]


def test_the_digest_is_of_every_number_of_every_row(tmp_path: Path) -> None:
    opened = TrajectoryStore(write_store(tmp_path / "s"))
    whole, digests = opened.columns, {opened.digest()}
    for name in ("row_N", "seed_N", "tokens_P", "order_P"):
        other = getattr(whole, name).copy()
        other[-1] += 1
        opened.columns = dataclasses.replace(whole, **{name: other})
        digests.add(opened.digest())
    opened.columns = dataclasses.replace(whole, start_N=whole.start_N + (np.arange(11) == 5))  # another cut
    assert len(digests | {opened.digest()}) == 6


# --- writing -----------------------------------------------------------------------------------------------------


def test_bytes_depend_on_rows_alone(tmp_path: Path) -> None:
    one, two = write_store(tmp_path / "a"), write_store(tmp_path / "b")
    names = sorted(p.name for p in one.iterdir())
    assert names == ["manifest.json", *(store.shard_name(r) for r in ((0, 4), (4, 8), (8, 10)))]
    assert all((one / n).read_bytes() == (two / n).read_bytes() for n in names)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_store(tmp_path / "s")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*shard-00000-00004\.parquet: No space left on device") as caught:
        store.write_shard(folder, (0, 4), [trajectory(r, new=2) for r in range(4)], [2] * 4)
    assert caught.value.errno == errno.ENOSPC
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_an_order_past_int16_is_an_error_and_not_a_wrap(tmp_path: Path) -> None:
    long = Trajectory(tokens_L=torch.zeros(2, dtype=torch.long), order_L=torch.tensor([0, 40_000]), row=0, seed=0)
    with pytest.raises(ValueError, match="40000"):
        store.write_shard(tmp_path, (0, 1), [long], [0])
