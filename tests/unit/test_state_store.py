"""What is desired outlives whoever wrote it."""

import sqlite3
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.serve.control import desired
from penstock.serve.control.desired import DesiredStates, file_name
from penstock.serve.control.state import DesiredState

pytestmark = pytest.mark.parity("S25")


def opened(file: Path) -> DesiredStates:
    return DesiredStates(file)


def test_rows_are_there_for_the_next_one(tmp_path: Path):
    file = tmp_path / "below" / "x.sqlite"
    one = opened(file)
    one.set("m", DesiredState(version=1, sleep=1))
    one.set("m", DesiredState(version=2, replica="r", pause="keep"))
    two = opened(file)  # the first one was killed
    assert two.version == 2
    assert two.get("m") == two.get("m", "s") == DesiredState(version=1, sleep=1)
    assert two.get("m", "r") == DesiredState(version=2, replica="r", pause="keep")
    assert two.get("other") == DesiredState()


def test_another_cluster_at_the_same_address_starts_anew(tmp_path: Path):
    first, same, second, other_app = (
        tmp_path / file_name("10.0.0.1:6379", app, session)
        for app, session in [("a", "s1"), ("a", "s1"), ("a", "s2"), ("b", "s1")]
    )
    old = tmp_path / f"{first.name.partition('-')[0]}.sqlite"  # as earlier versions named it
    old.touch()
    opened(other_app).set("m", DesiredState(version=7))
    opened(first).set("m", DesiredState(version=1, sleep=1))
    assert opened(same).get("m").sleep == 1
    assert opened(second).get("m") == DesiredState()
    assert sorted(tmp_path.glob("*.sqlite")) == sorted([second, other_app])


def test_what_is_for_all_goes_before_what_was_for_one(tmp_path: Path):
    ledger = opened(tmp_path / "x.sqlite")
    ledger.set("m", DesiredState(version=1, replica="r", pause="keep"))
    ledger.set("n", DesiredState(version=2, replica="r", pause="keep"))
    ledger.set("m", DesiredState(version=3))
    again = opened(tmp_path / "x.sqlite")
    for one in (ledger, again):
        assert one.get("m", "r") == DesiredState(version=3)
        assert one.get("n", "r").pause == "keep"


def test_a_replica_that_is_gone_is_forgotten(tmp_path: Path):
    ledger = opened(tmp_path / "x.sqlite")
    ledger.set("m", DesiredState(version=1, replica="r", pause="keep"))
    ledger.forget("m", "r")
    ledger.forget("m", "never there")
    assert ledger.get("m", "r") == opened(tmp_path / "x.sqlite").get("m", "r") == DesiredState()


def test_of_a_model_that_is_gone_nothing_is_left(tmp_path: Path):
    ledger = opened(tmp_path / "x.sqlite")
    ledger.set("m", DesiredState(version=1, sleep=1))
    ledger.set("m", DesiredState(version=2, replica="r", pause="keep"))
    ledger.set("n", DesiredState(version=3, sleep=1))
    ledger.forget("m")
    for one in (ledger, opened(tmp_path / "x.sqlite")):
        assert one.get("m") == one.get("m", "r") == DesiredState()
        assert one.get("n").sleep


def test_an_orderly_end_leaves_nothing(tmp_path: Path):
    ledger = opened(tmp_path / "x.sqlite")
    ledger.set("m", DesiredState(version=1))
    ledger.remove()
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_does_not_keep_control_from_its_followers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "x.sqlite"
    file.write_bytes(b"no database" * 100)
    store = opened(file)
    store.set("m", DesiredState(version=1, sleep=1))
    assert store.get("m").sleep == 1
    assert "in memory only" in caplog.text


def test_a_full_disk_keeps_no_model_from_waking(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = opened(tmp_path / "x.sqlite")
    store.set("m", DesiredState(sleep=1))
    store.connection.execute("PRAGMA query_only = ON")  # every write fails, as there
    assert store.set("m", DesiredState(sleep=0)).version == 2
    store.set("m", DesiredState(replica="r", pause="keep"))
    store.forget("m", "r")
    assert (store.get("m").sleep, store.get("m", "r").pause) == (0, None)
    assert "m: the desired state is not stored: attempt to write" in caplog.text


def test_a_file_that_was_locked_is_read_by_the_next_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(desired, "_LOCKED_S", 0.01)
    file = tmp_path / "x.sqlite"
    opened(file).set("m", DesiredState(sleep=1))
    other = sqlite3.connect(file, isolation_level=None)  # a control that hangs while it writes
    other.execute("BEGIN EXCLUSIVE")
    store = opened(file)
    store.check()
    store.set("n", DesiredState(sleep=1))
    assert (store.get("m").sleep, store.get("n").sleep) == (0, 1)
    assert "in memory only until the file is free" in caplog.text
    other.rollback()
    with pytest.raises(Unavailable, match="control restarts"):
        store.check()
    again = opened(file)
    again.check()
    assert again.get("m").sleep == 1
