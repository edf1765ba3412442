import tempfile
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.temporary_folder import temporary_folder


def test_no_room_for_one_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(Unavailable, match=r"No temporary folder can be made: .*set TMPDIR"):
        temporary_folder("batch")


def test_each_is_new_and_says_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {temporary_folder("batch"), temporary_folder("batch")}
    assert len(folders) == 2
    assert all(folder.is_dir() and folder.name.startswith("penstock-batch-") for folder in folders)
