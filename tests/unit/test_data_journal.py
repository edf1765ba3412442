"""The journal: what it says after processes were killed, and what it does not put up with."""

import errno
import os
import resource
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from bucket import s3_server

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


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path):
    path = write(tmp_path, "0001-a", Entry(0, ok()), Entry(1, ok()), Entry(2, ok()))
    path.write_bytes(path.read_bytes().replace(b'"row":1', b'"row":?'))
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
    assert next_run(storage_path(tmp_path)) == 1
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


class Failing:
    """A bucket's folder whose next writes fail: `failures` of them, with `error`."""

    is_local = False

    def __init__(self, failures: int, error: Exception) -> None:
        self.left, self.error = failures, error
        self.objects: dict[str, bytes] = {}

    def __truediv__(self, name: str):
        outer = self

        class Object:
            def write(self, data: bytes) -> None:
                if outer.left:
                    outer.left -= 1
                    raise outer.error
                outer.objects[name] = data

        return Object()


PASSING = Unavailable("The server cannot be reached.", retryable=True)


def test_lines_of_an_object_that_could_not_be_written_are_written_again(monkeypatch):
    monkeypatch.setattr("penstock.data.journal.segment.SYNC_S", 0.01)
    monkeypatch.setattr("penstock.data.journal.segment._PAUSE_S", 0.001)
    folder, durable = Failing(3, PASSING), threading.Event()
    segment = Segment(folder, "0001-a")
    segment.append(Entry(0, ok()), durable.set)
    segment.close()
    assert durable.is_set()
    assert list(folder.objects.values()) == [encode_entry(Entry(0, ok()))]


def test_an_object_is_written_when_much_waits_and_else_now_and_then(monkeypatch):
    monkeypatch.setattr("penstock.data.journal.segment.SYNC_S", 60.0)
    monkeypatch.setattr("penstock.data.journal.segment._SLOWEST_SYNC_S", 60.0)
    monkeypatch.setattr("penstock.data.journal.segment._MOST_PENDING_BYTES", 200)
    folder, durable = Failing(0, PASSING), [threading.Event() for _ in range(3)]
    segment = Segment(folder, "0001-a")
    segment.append(Entry(0, ok()), durable[0].set)
    assert not durable[0].wait(0.1)
    segment.append(Entry(1, ok("x" * 200)), durable[1].set)
    assert durable[1].wait(20)
    assert durable[0].is_set()
    segment.append(Entry(2, ok()), durable[2].set)
    assert not durable[2].wait(0.1)
    segment.close()
    assert durable[2].is_set()
    assert [name.split(".")[2:] for name in folder.objects] == [["000001", "jsonl"], ["000002", "jsonl"]]


def test_a_disk_is_asked_to_keep_only_what_is_new_and_not_too_often(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("penstock.data.journal.segment.SYNC_S", 0.1)
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    open_files = len(os.listdir("/proc/self/fd"))
    first = Segment(storage_path(tmp_path / "new" / "folder"), "0001-a")
    second = Segment(storage_path(tmp_path / "new" / "folder"), "0001-b")
    assert {one.daemon for one in threading.enumerate() if one.name == "journal"} == {True}
    for row in range(300):
        first.append(Entry(row, ok()), lambda: None)
        time.sleep(0.0005)
    time.sleep(0.3)
    first.close()
    second.close()
    assert len(synced) <= 8  # now and then while lines came, and twice at the end of each
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_bucket_that_is_away_is_asked_again_after_growing_pauses(monkeypatch):
    paused: list[float] = []
    monkeypatch.setattr("penstock.data.journal.segment.time.sleep", paused.append)
    segment = Segment(Failing(6, PASSING), "0001-a")
    segment.append(Entry(0, ok()), lambda: None)
    segment.close()
    assert paused == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize("error", [Unavailable("Access is denied."), PASSING])
def test_a_bucket_that_cannot_be_written_is_told_at_once_without_another_line(error, monkeypatch):
    monkeypatch.setattr("penstock.data.journal.segment.SYNC_S", 0.01)
    monkeypatch.setattr("penstock.data.journal.segment._PAUSE_S", 0.001)
    monkeypatch.setattr("penstock.data.journal.segment._OUTAGE_S", 0.01)
    broken: list[Exception] = []
    seen = threading.Event()
    segment = Segment(Failing(10**9, error), "0001-a", lambda error: (broken.append(error), seen.set()))
    segment.append(Entry(0, ok()), lambda: pytest.fail("it is not kept"))
    assert seen.wait(20)
    assert str(broken[0]) == f"The journal cannot be written: {error}"
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


def test_a_disk_that_does_not_take_what_was_written_is_told(tmp_path: Path, monkeypatch):
    broken = threading.Event()
    segment = Segment(storage_path(tmp_path), "0001-a", lambda error: broken.set())

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
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
