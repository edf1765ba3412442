import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.temporary_folder import temporary_folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_no_room_for_one_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(Unavailable, match=r"No temporary folder can be made: .*set TMPDIR"):
        temporary_folder("batch")


def test_each_is_new_and_says_what_it_is_for():
    folders = {temporary_folder("batch"), temporary_folder("batch")}
    assert len(folders) == 2
    assert all(folder.is_dir() and folder.name.startswith("penstock-batch-") for folder in folders)


def test_sockets_fit_into_one_however_deep_the_place_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    left = Path(tempfile.mkdtemp(prefix="penstock-engine-", suffix=".held", dir="/tmp"))
    folder = temporary_folder("engine", sockets=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "handshake"))
    finally:
        shutil.rmtree(folder)
    assert not left.exists()
    assert temporary_folder("batch").parent == deep


MAKER = """
import os, sys
from penstock.temporary_folder import temporary_folder
(temporary_folder("engine") / "socket").touch()
temporary_folder("serve", outlives=True)
print(flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_the_next_one_removes_what_a_dead_process_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert made.stdout
    assert made.stdin
    assert made.stdout.readline()
    own = temporary_folder("batch")
    (engines,) = tmp_path.glob("penstock-engine-*")
    made.stdin.close()
    made.wait()
    later = temporary_folder("batch")
    (log,) = tmp_path.glob("penstock-serve-*")
    assert set(tmp_path.iterdir()) == {own, later, log}
    assert not engines.exists()
