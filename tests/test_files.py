"""Files and folders that are whole or absent, whatever ends the writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from adjust_dlm.files import new_folder, sweep, write_whole


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_texts_bytes_and_writers_in_folders_that_were_not_there(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a" / "x", tmp_path / "a" / "y", tmp_path / "b" / "z"
    write_whole({a: "\u00e4\n", b: b"\x00", c: lambda file: file.write(b"1")})
    assert contents(tmp_path) == {"a/x": b"\xc3\xa4\n", "a/y": b"\x00", "b/z": b"1"}


@pytest.mark.parametrize("reason", ["full", "interrupt", "rename"])
def test_all_or_nothing(tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "kept" / "old", tmp_path / "new" / "deep" / "file"
    write_whole({old: "1"})

    def fails(*_: object) -> None:
        if reason == "interrupt":
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if reason == "rename":
        monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(KeyboardInterrupt if reason == "interrupt" else OSError) as caught:
        write_whole({old: "2", new: fails if reason != "rename" else "2"})
    assert contents(tmp_path) == {"kept/old": b"1"} and not (tmp_path / "new").exists()
    if reason == "full":
        assert str(caught.value) == f"[Errno 28] cannot write {new}: No space left on device"
        assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC


def test_a_folder_with_something_else_in_it_stays(tmp_path: Path) -> None:
    def other(_: object) -> None:
        (tmp_path / "new" / "other").touch()
        raise ValueError

    with pytest.raises(ValueError):
        write_whole({tmp_path / "new" / "file": other})
    assert contents(tmp_path) == {"new/other": b""}


def test_what_killed_writers_left_of_one_file_is_swept(tmp_path: Path) -> None:
    for name in ("a[1].pt", ".a[1].pt.01.part", ".a[1].pt.02.part", ".b.pt.01.part"):
        (tmp_path / name).touch()
    sweep(tmp_path / "a[1].pt")
    assert sorted(contents(tmp_path)) == [".b.pt.01.part", "a[1].pt"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "folder.tmp" / "made").mkdir(parents=True)  # of a crash
    (tmp_path / "folder.tmp" / "made" / "junk").touch()
    for name in ("a", "b"):
        with new_folder(folder) as made:
            (made / name).touch()
            (made.parent / "scratch").touch()
        assert contents(tmp_path) == {f"folder/{name}": b""}
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as made:
        (made / "c").touch()
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"folder/b": b""}
