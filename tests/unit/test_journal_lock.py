"""Who owns an output in a bucket: claims, heartbeats, and owners that have been replaced."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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
def folder(request: pytest.FixtureRequest) -> StoragePath:
    return storage_path(f"memory://{request.node.name}")


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Parts of names; objects with one of them cannot be written, and their writers wait for it."""
    parts, written = set[str](), RemotePath.write

    def write(path: RemotePath, data: bytes) -> None:
        if any(part in path.url for part in parts):
            raise Unavailable("The bucket cannot be reached.")
        written(path, data)

    monkeypatch.setattr(RemotePath, "write", write)
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
    folder: StoragePath, cut_off: set[str], monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(RemotePath, "write", write)
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
