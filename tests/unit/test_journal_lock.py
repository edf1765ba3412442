"""Who owns an output in a bucket: claims, heartbeats, and owners that have been replaced."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from penstock.data.journal.lock import JobLock, OutputLocked, acquire_lock, is_locked
from penstock.data.storage.paths import RemotePath, StoragePath, storage_path
from penstock.errors import Unavailable
from penstock.jobs.storage import JobStorage

pytestmark = pytest.mark.parity("X2")


class Record(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.journal.lock.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("penstock.data.journal.lock._WATCH_S", 0.2)


@pytest.fixture
def folder() -> StoragePath:
    return storage_path(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def cut_off(patched) -> set[str]:
    """Parts of names; objects with one of them cannot be written, and their writers wait for it."""
    parts, written = set[str](), RemotePath.write

    def write(path: RemotePath, data: bytes) -> None:
        if any(part in path.url for part in parts):
            raise Unavailable("The bucket cannot be reached.")
        written(path, data)

    patched(RemotePath, "write", write)
    return parts


def test_a_living_owner_keeps_its_output_and_a_released_one_is_free(folder: StoragePath):
    assert not is_locked(folder)
    first = acquire_lock(folder)
    assert is_locked(folder)
    with pytest.raises(OutputLocked, match="works on this output already"):
        acquire_lock(folder)
    first.release()
    assert not is_locked(folder)
    second = acquire_lock(folder)
    assert second.version > first.version
    second.release()


def test_on_a_disk_the_kernel_keeps_the_lock(tmp_path: Path):
    journal = storage_path(tmp_path / "new" / "out.journal")
    assert is_locked(journal) is False
    lock = acquire_lock(journal)
    assert is_locked(journal) is True
    with pytest.raises(OutputLocked, match=rf"^Process {os.getpid()} on {socket.gethostname()} works on"):
        acquire_lock(journal)
    lock.check()
    assert lock.lost() is False
    lock.release()
    lock.release()
    assert is_locked(journal) is False
    acquire_lock(journal).release()


def test_one_who_looks_at_a_lock_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paused: list[float] = []
    journal = storage_path(tmp_path)
    acquire_lock(journal).release()
    with (tmp_path / "driver").open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        monkeypatch.setattr("penstock.data.journal.lock.time.sleep", paused.append)
        with pytest.raises(OutputLocked):
            acquire_lock(journal)
        assert paused == [0.05] * 9

        def goes(_: float) -> None:
            fcntl.flock(looked_at, fcntl.LOCK_UN)

        monkeypatch.setattr("penstock.data.journal.lock.time.sleep", goes)
        acquire_lock(journal).release()


def test_a_file_system_without_locks_is_named(tmp_path: Path, patched):
    (tmp_path / "driver").touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    patched(fcntl, "flock", refuse)
    for call in (acquire_lock, is_locked):
        with pytest.raises(Unavailable, match=r"driver' cannot be locked: No locks available\. Write"):
            call(storage_path(tmp_path))


def test_a_lock_names_its_owner_alone(tmp_path: Path):
    (tmp_path / "driver").write_text("x" * 4000)
    lock = acquire_lock(storage_path(tmp_path))
    assert json.loads((tmp_path / "driver").read_bytes())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize(
    ("beat", "said"),
    [
        (b'{"owner": "x", "host": "there", "pid": 7}', "^Process 7 on there works on this output"),
        (b"torn", r"^Another process works on this output already \('memory:"),
    ],
    ids=["named", "torn"],
)
def test_who_is_outranked_as_it_starts_goes_at_once(folder: StoragePath, patched, beat: bytes, said: str):
    def other(_: float) -> None:
        (folder / "drivers" / "ffffffffff00-0123abcd").write(beat)

    patched("penstock.data.journal.lock.time.sleep", other)
    with pytest.raises(OutputLocked, match=said):
        acquire_lock(folder)
    assert [file.name for file in (folder / "drivers").files()] == ["ffffffffff00-0123abcd"]


def test_a_claim_is_kept_alive_and_goes_with_its_owner(folder: StoragePath):
    (folder / "drivers" / "000000000001-0123abcd").write(b"dead")
    lock = acquire_lock(folder)
    assert [file.name for file in (folder / "drivers").files()] == [lock.version]
    assert {one.daemon for one in threading.enumerate() if one.name == "heartbeat"} == {True}
    lock.release()
    assert list((folder / "drivers").files()) == []
    assert not [one for one in threading.enumerate() if one.name == "heartbeat"]


def test_an_owner_hears_of_its_successor_by_its_next_heartbeat(folder: StoragePath, cut_off: set[str]):
    first = acquire_lock(folder)
    cut_off.add(first.version)
    second = acquire_lock(folder)
    for _ in range(200):
        if first.lost():
            break
        time.sleep(0.01)
    assert first.lost() is True
    second.release()
    first.release()


def test_a_lock_where_no_folder_can_be_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="cannot be written: File exists"):
        acquire_lock(storage_path(tmp_path / "file"))


def test_an_owner_that_slept_asks_the_bucket_itself(folder: StoragePath, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("penstock.data.journal.lock._ClaimLock._keep_alive", lambda self: None)
        first = acquire_lock(folder)
    second = acquire_lock(folder)
    assert first.lost() is False
    with pytest.raises(OutputLocked, match="Another driver has taken over"):
        first.check()
    assert first.lost() is True
    second.release()
    first.release()


def test_an_owner_that_missed_heartbeats_takes_itself_for_replaced(folder: StoragePath, monkeypatch, patched):
    lock, written = acquire_lock(folder), RemotePath.write
    beats, told = iter("x" * 15 + "." + "x" * 16), threading.Event()

    def write(path: RemotePath, data: bytes) -> None:
        beat = next(beats, None)
        if beat == "x":
            assert not lock.lost()
            raise Unavailable("The bucket cannot be reached.")
        written(path, data)
        if beat is None:
            told.set()

    monkeypatch.setattr("penstock.data.journal.lock.HEARTBEAT_S", 0.002)
    patched(RemotePath, "write", write)
    assert told.wait(20)
    assert lock.lost() is True
    lock.release()


def test_a_successor_comes_after_owners_whose_clock_was_ahead(folder: StoragePath):
    ahead = "ffffffffff00-0123abcd"
    (folder / "drivers" / ahead).write(b"{}")
    lock = acquire_lock(folder)
    assert lock.version.startswith("ffffffffff01-")
    lock.check()
    lock.release()


def test_an_owner_without_heartbeat_is_replaced_and_knows_it(folder: StoragePath, cut_off: set[str]):
    first = acquire_lock(folder)
    cut_off.add(first.version)
    second = acquire_lock(folder)
    cut_off.clear()
    with pytest.raises(OutputLocked, match="Another driver has taken over"):
        first.check()
    second.check()
    second.release()
    with pytest.raises(OutputLocked):  # it does not come back when its successor has gone
        first.check()
    first.release()


def test_of_owners_that_start_at_once_one_is_left(folder: StoragePath):
    def acquired(_: int) -> JobLock | None:
        with suppress(OutputLocked):
            return acquire_lock(folder)
        return None

    with ThreadPoolExecutor(4) as pool:
        left = [lock for lock in pool.map(acquired, range(4)) if lock is not None]
    owners = [lock for lock in left if not _is_lost(lock)]
    assert len(owners) == 1
    for lock in left:
        lock.release()


def _is_lost(lock: JobLock) -> bool:
    try:
        lock.check()
    except OutputLocked:
        return True
    return False


def test_a_replaced_owner_writes_no_record(folder: StoragePath, cut_off: set[str]):
    first, second = JobStorage(folder.url), JobStorage(folder.url)
    lock = first.lock()
    first.write("batches", "a", Record("first"))
    cut_off.add(lock.version)
    successor = second.lock()
    cut_off.clear()
    assert list(second.read_all("batches", Record).values()) == [Record("first")]
    for refused in (
        lambda: first.write("batches", "a", Record("late")),
        lambda: first.write("batches", "b", Record("late")),
        lambda: first.remove("batches", "a"),
    ):
        with pytest.raises(Unavailable, match="moved to another process"):
            refused()
    assert list(JobStorage(folder.url).read_all("batches", Record).values()) == [Record("first")]
    lock.release()
    successor.release()


def test_a_record_that_arrives_late_replaces_none_of_a_successor(
    folder: StoragePath, cut_off: set[str], patched
):
    """Its owner was stopped between its look at the lock and its write."""
    first, second = JobStorage(folder.url), JobStorage(folder.url)
    lock, written = first.lock(), RemotePath.write
    first.write("batches", "a", Record("first"))
    sends, goes_on = threading.Event(), threading.Event()

    def write(path: RemotePath, data: bytes) -> None:
        if b"late" in data:
            sends.set()
            goes_on.wait(60)
        written(path, data)

    patched(RemotePath, "write", write)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(first.write, "batches", "a", Record("late"))
        assert sends.wait(60)
        cut_off.add(f"drivers/{lock.version}")
        successor = second.lock()
        assert list(second.read_all("batches", Record).values()) == [Record("first")]
        second.write("batches", "a", Record("second"))
        goes_on.set()
        with pytest.raises(Unavailable, match="moved to another process"):
            late.result(60)
    assert list(JobStorage(folder.url).read_all("batches", Record).values()) == [Record("second")]
    lock.release()
    successor.release()
