"""The journal: what it says after processes were killed, and what it does not put up with."""

import errno
import itertools
import math
import os
import resource
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from bucket import s3_server
from virtual import Clock, virtual

from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import classify_response
from penstock.data.journal.answer_cache import AnswerCache, CacheKey
from penstock.data.journal.index import Index
from penstock.data.journal.lock import acquire_lock
from penstock.data.journal.segment import Entry, Segment, encode_entry, next_run
from penstock.data.journal.segment_reader import JournalBroken, outcomes_in
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.storage.paths import storage_path
from penstock.errors import Unavailable

pytestmark = pytest.mark.parity("X5")


def ok(text: str = "hi") -> Outcome:
    return Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode({"text": text})))


def failed(code: str = "bad") -> Outcome:
    return Outcome(state="failed", failure=Failure(code=code, message="No.", stage="engine"))


def write(folder: Path, name: str, *entries: Entry) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join(map(encode_entry, entries)))
    return path


def index(folder: Path) -> Index:
    return Index(storage_path(folder))


def test_a_kept_entry_is_in_the_file_before_it_is_told(tmp_path: Path):
    segment, seen = Segment(storage_path(tmp_path), "0001-engine-1"), []
    path = tmp_path / "0001-engine-1.jsonl"
    segment.append(Entry(3, ok()), lambda: seen.append(path.read_bytes()))
    assert seen == [encode_entry(Entry(3, ok()))]
    segment.close()


def test_an_outcome_comes_back_as_it_was(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, ok("x")), Entry(1, failed()))
    found = index(tmp_path)
    assert bytes(found.outcome(0).body) == b'{"text":"x"}'
    assert found.outcome(1) == failed()


def test_an_answer_over_many_lines_is_one_line(tmp_path: Path):
    body = msgspec.Raw(b'{\n  "text": "a\\nb"\n}')
    write(tmp_path, "0001-a", Entry(0, Outcome(state="ok", body=body)), Entry(1, ok()))
    assert bytes(index(tmp_path).outcome(0).body) == b'{"text":"a\\nb"}'


def test_a_torn_last_line_counts_as_not_written(tmp_path: Path):
    path = write(tmp_path, "0001-a", Entry(0, ok()), Entry(1, ok()))
    path.write_bytes(path.read_bytes()[:-5])
    assert [index(tmp_path).state(row) for row in (0, 1)] == ["ok", None]


def test_a_tail_of_zeros_counts_as_not_written(tmp_path: Path):
    path = write(tmp_path, "0001-a", Entry(0, ok()))
    path.write_bytes(path.read_bytes() + b"\0" * 40 + b"\n")
    assert index(tmp_path).counts()["ok"] == 1


@pytest.mark.parametrize("damage", [b'"row":?', b'"row":"1"', b'"row":1,"key":"\xff"'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, damage: bytes):
    path = write(tmp_path, "0001-a", Entry(0, ok()), Entry(1, ok()), Entry(2, ok()))
    path.write_bytes(path.read_bytes().replace(b'"row":1', damage))
    with pytest.raises(JournalBroken, match=r"0001-a.jsonl' is damaged in line 2"):
        index(tmp_path)


def test_the_first_ok_counts(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, failed()), Entry(0, ok("first")))
    write(tmp_path, "0002-a", Entry(0, ok("second")), Entry(0, failed()))
    assert bytes(index(tmp_path).outcome(0).body) == b'{"text":"first"}'


def test_of_failures_the_last_counts(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, failed("first")))
    write(tmp_path, "0002-a", Entry(0, failed("second")))
    found = index(tmp_path)
    assert found.outcome(0).failure.code == "second"
    assert found.error_kinds[0][0] == "second"


def test_a_row_with_anothers_answer_has_its_body(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(4, ok("shared")))
    write(tmp_path, "0001-driver", Entry(7, duplicate_of=4))
    found = index(tmp_path)
    assert found.state(7) == "ok"
    assert bytes(found.outcome(7).body) == b'{"text":"shared"}'
    assert found.reused == 1


def test_a_journal_takes_less_than_40_bytes_a_row_in_memory(tmp_path: Path):
    rows = 30_000
    entries = (Entry(row, ok(), key=f"key {row}", tokens=(1, 0, 1)) for row in range(rows))
    write(tmp_path, "0001-a", *entries)
    for load in (lambda: index(tmp_path), lambda: AnswerCache(str(tmp_path))):
        load()  # what is imported counts once
        tracemalloc.start()
        try:
            loaded = load()
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        loaded.close()
        assert used < 40 * rows
    assert loaded._take(CacheKey(f"key {rows - 1}", is_sampled=False)) is not None
    assert index(tmp_path).row_with("key 7") == 7


def test_deaths_of_a_row_are_no_end_of_it(tmp_path: Path):
    write(tmp_path, "0001-driver", Entry(2, deaths=1), Entry(2, deaths=2))
    found = index(tmp_path)
    assert found.state(2) is None
    assert found.deaths == {2: 2}


def test_tokens_of_all_answers_are_summed(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, ok(), tokens=(10, 4, 3)), Entry(1, ok(), tokens=(5, 0, 2)))
    assert index(tmp_path).tokens == [15, 4, 5]


def test_rows_of_a_dead_worker_are_read_from_its_segment(tmp_path: Path):
    path = write(tmp_path, "0001-engine-1", Entry(0, ok()), Entry(1, ok()))
    write(tmp_path, "0001-engine-1-2", Entry(5, ok()))
    path.write_bytes(path.read_bytes()[:-3])
    assert [row for row, _ in outcomes_in(storage_path(tmp_path), "0001-engine-1", range(9))] == [0]


def test_each_run_has_a_number_of_its_own(tmp_path: Path):
    assert next_run(storage_path(tmp_path)) == 1
    (tmp_path / "job.json").touch()
    (tmp_path / "notes.jsonl").touch()
    assert next_run(storage_path(tmp_path)) == 1
    write(tmp_path, "0003-driver")
    assert next_run(storage_path(tmp_path)) == 4


def test_no_two_processes_write_one_segment(tmp_path: Path):
    Segment(storage_path(tmp_path), "0001-a").close()
    with pytest.raises(Unavailable, match="File exists"):
        Segment(storage_path(tmp_path), "0001-a")


def test_in_a_bucket_an_entry_is_told_when_its_object_is_there(tmp_path: Path, monkeypatch):
    with s3_server("jobs") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        folder, durable = storage_path("s3://jobs/out.jsonl.journal"), threading.Event()
        segment = Segment(folder, "0001-engine-1")
        for row in range(3):
            segment.append(Entry(row, ok(str(row))), durable.set)
        assert durable.wait(20)
        assert len(outcomes_in(folder, "0001-engine-1", range(9))) == 3
        segment.append(Entry(3, ok()), lambda: None)
        segment.close()
        found = Index(folder, tmp_path)
        assert found.counts()["ok"] == 4
        assert bytes(found.outcome(2).body) == b'{"text":"2"}'
        assert len(os.listdir(tmp_path)) == 2


def test_a_journal_of_many_objects_is_read_with_few_open_files(tmp_path: Path):
    for number in range(300):
        write(tmp_path, f"0001-engine-1.{number:06d}", Entry(number, ok(str(number))))
    found = index(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for row in range(300):
        assert bytes(found.outcome(row).body) == b'{"text":"%d"}' % row
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_answers_are_read_by_several_threads_at_a_time(tmp_path: Path):
    for number in range(200):
        write(tmp_path, f"0001-engine-1.{number:06d}", Entry(number, ok(str(number))))
    found = index(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda row: bytes(found.outcome(row % 200).body), range(2000)))
    assert bodies == [b'{"text":"%d"}' % (row % 200) for row in range(2000)]


PASSING = Unavailable("The server cannot be reached.", retryable=True)


class Bucket:
    """A bucket's folder, of which the next `failures` writes fail with `error`."""

    is_local = False

    def __init__(self, failures: int = 0, error: Exception = PASSING) -> None:
        self._left, self._error = failures, error
        self.objects: dict[str, bytes] = {}
        self.asked: list[float] = []
        """When it was asked to write."""

    def __truediv__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(write=partial(self._write, name))

    def _write(self, name: str, data: bytes) -> None:
        self.asked.append(time.monotonic())
        if self._left:
            self._left -= 1
            raise self._error
        self.objects[name] = data

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.asked)]


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with virtual(clock):
        yield clock


def test_lines_for_a_bucket_become_an_object_after_a_second_or_when_they_are_many(clock: Clock):
    folder, durable = Bucket(), list[int]()
    segment = Segment(folder, "0001-a")
    for row in range(2):
        segment.append(Entry(row, ok()), partial(durable.append, row))
    clock.sleep(0.9)
    assert durable == []
    clock.sleep(0.2)
    assert durable == [0, 1]
    segment.append(Entry(2, ok("x" * (16 << 20))), partial(durable.append, 2))
    clock.sleep(0)
    assert durable == [0, 1, 2]
    segment.append(Entry(3, ok()), partial(durable.append, 3))
    clock.sleep(0)
    assert durable == [0, 1, 2]
    segment.close()
    assert (durable, clock.now) == ([0, 1, 2, 3], pytest.approx(1.1))
    assert [name.split(".")[2:] for name in folder.objects] == [[f"{n:06d}", "jsonl"] for n in (1, 2, 3)]


def test_in_a_long_run_objects_are_written_less_often(clock: Clock):
    folder = Bucket()
    segment = Segment(folder, "0001-a")
    for row in range(2002):
        segment.append(Entry(row, ok()), lambda: None)
        while len(folder.asked) <= row:
            clock.step(math.inf)
    segment.close()
    assert (folder.asked[0], *folder.pauses[199::1800]) == pytest.approx((1, 2, 10))


def test_a_line_that_comes_while_the_last_object_is_written_is_in_another_one(clock: Clock):
    class Slow(Bucket):
        def _write(self, name: str, data: bytes) -> None:
            super()._write(name, data)
            if len(self.objects) == 1:
                segment.append(Entry(1, ok()), lambda: None)

    folder = Slow()
    segment = Segment(folder, "0001-a")
    segment.append(Entry(0, ok()), lambda: None)
    clock.sleep(0)
    segment.close()
    assert list(folder.objects.values()) == [encode_entry(Entry(row, ok())) for row in range(2)]


def test_a_disk_is_asked_to_keep_what_is_new_once_a_second(tmp_path: Path, clock: Clock, patched):
    synced, real = [], os.fsync
    patched(os, "fsync", lambda file: (synced.append(clock.now), real(file)))
    open_files = len(os.listdir("/proc/self/fd"))
    segment, *others = (
        Segment(folder, name)
        for folder in (storage_path(tmp_path / "new" / "folder"), Bucket())
        for name in ("0001-a", "0001-b")
    )
    assert {one.daemon for one in threading.enumerate() if one.name == "journal"} == {True}
    for row in range(25):
        segment.append(Entry(row, ok()), lambda: None)
        clock.sleep(0.1)
    clock.sleep(60)
    segment.append(Entry(25, ok()), lambda: None)
    clock.sleep(0.1)
    assert synced == pytest.approx([0, 1, 2, 3, 62.5])
    segment.append(Entry(26, ok()), lambda: None)
    segment.close()
    assert len(synced) == 6
    for other in others:
        other.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_bucket_that_is_away_is_asked_again_after_growing_pauses(clock: Clock):
    folder, durable = Bucket(6), list[int]()
    segment = Segment(folder, "0001-a")
    segment.append(Entry(0, ok()), partial(durable.append, 0))
    segment.close()
    assert folder.pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert durable == [0]
    assert list(folder.objects.values()) == [encode_entry(Entry(0, ok()))]


@pytest.mark.parametrize(
    ("error", "tries_s"), [(Unavailable("Access is denied."), 0), (PASSING, pytest.approx(305, abs=5))]
)
def test_a_bucket_that_cannot_be_written_is_told_without_another_line(
    error: Exception, tries_s: float, clock: Clock
):
    folder, broken = Bucket(10**9, error), list[Exception]()
    clock.sleep(600)
    segment = Segment(folder, "0001-a", broken.append)
    segment.append(Entry(0, ok()), lambda: pytest.fail("it is not kept"))
    clock.sleep(1)
    assert [str(told) for told in broken] == [f"The journal cannot be written: {error}"]
    assert folder.asked[-1] - folder.asked[0] == tries_s
    for call in (lambda: segment.append(Entry(1, ok()), lambda: None), segment.close):
        with pytest.raises(Unavailable, match="The journal cannot be written"):
            call()


def test_after_a_full_disk_no_line_goes_behind_the_torn_one(tmp_path: Path, monkeypatch):
    segment = Segment(storage_path(tmp_path), "0001-a")
    segment.append(Entry(0, ok()), lambda: None)
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 5:
            return real(file, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(Unavailable, match="No space left"):
            segment.append(Entry(1, ok()), lambda: None)
    with pytest.raises(Unavailable, match="No space left"):
        segment.append(Entry(2, ok()), lambda: pytest.fail("it is not kept"))
    with pytest.raises(Unavailable, match="No space left"):
        segment.close()
    assert [index(tmp_path).state(row) for row in range(3)] == ["ok", None, None]


def test_a_disk_that_does_not_take_what_was_written_is_told(tmp_path: Path, patched):
    broken = threading.Event()
    segment = Segment(storage_path(tmp_path), "0001-a", lambda error: broken.set())

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    patched(os, "fsync", failing)
    segment.append(Entry(0, ok()), lambda: None)
    assert broken.wait(20)
    with pytest.raises(Unavailable, match="Input/output error"):
        segment.append(Entry(1, ok()), lambda: None)
    with pytest.raises(Unavailable, match="Input/output error"):
        segment.close()


def test_zeros_in_the_middle_cost_only_the_rows_below_them(tmp_path: Path, caplog):
    """What a power cut leaves where pages reached the disk out of order."""
    path = write(tmp_path, "0001-a", *(Entry(row, ok("x" * 50)) for row in range(4)))
    data = path.read_bytes()
    at = data.index(b'{"row":1') + 10
    path.write_bytes(data[:at] + b"\0" * 60 + data[at + 60 :])
    found = index(tmp_path)
    assert found.state(0) == found.state(3) == "ok"
    assert found.state(1) is None
    assert "zeros" in caplog.text


def test_only_rows_that_a_dead_worker_had_are_read(tmp_path: Path):
    path = write(tmp_path, "0001-engine-1", *(Entry(row, ok(), tokens=(1, 0, 2)) for row in range(3)))
    path.write_bytes(path.read_bytes() + b'{"row":7,"end":{"\0\0\n{"row":8,"en')
    assert [
        (row, end.state) for row, end in outcomes_in(storage_path(tmp_path), "0001-engine-1", {1, 2, 9})
    ] == [
        (1, "ok"),
        (2, "ok"),
    ]


def test_runs_are_counted_beyond_four_digits(tmp_path: Path):
    for number in (9999, 10000):
        write(tmp_path, f"{number:04d}-driver", Entry(0, failed(str(number))))
    assert next_run(storage_path(tmp_path)) == 10001
    assert index(tmp_path).error_kinds[0][0] == "10000"


def test_an_answer_taken_from_another_job_counts_as_reused(tmp_path: Path):
    write(tmp_path, "0001-driver", Entry(0, ok(), reused=True), Entry(1, ok()))
    assert index(tmp_path).reused == 1


@pytest.mark.parametrize("body", [b'{"a": "x\ny"}', b'{"a": "x\x01y"}'])
def test_an_answer_with_raw_control_characters_is_no_answer(body: bytes):
    """Else it would break its line of the journal."""
    end = classify_response(Response(200, body), 1)
    assert end.failure is not None
    assert (end.failure.code, encode_entry(Entry(0, end)).count(b"\n")) == ("bad_answer", 1)


def test_a_lock_on_a_full_disk_is_one_sentence(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(Unavailable, match=r"driver' cannot be written: File too large\."):
            acquire_lock(storage_path(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == open_files
    acquire_lock(storage_path(tmp_path)).release()
