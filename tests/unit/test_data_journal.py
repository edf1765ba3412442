"""The journal: what it says after processes were killed, and what it does not put up with."""

import os
import threading
from pathlib import Path

import msgspec
import pytest
from bucket import s3_server

from penstock.data.index import Index, JournalBroken, ended_in
from penstock.data.journal import Entry, Segment, attempt, line
from penstock.data.outcome import Failure, Outcome
from penstock.data.place import place

pytestmark = pytest.mark.parity("X5")


def ok(text: str = "hi") -> Outcome:
    return Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode({"text": text})))


def failed(code: str = "bad") -> Outcome:
    return Outcome(state="failed", failure=Failure(code=code, message="No.", stage="engine"))


def write(folder: Path, name: str, *entries: Entry) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join(map(line, entries)))
    return path


def index(folder: Path) -> Index:
    return Index(place(folder))


def test_a_kept_entry_is_in_the_file_before_it_is_told(tmp_path: Path):
    segment, seen = Segment(place(tmp_path), "0001-engine-1"), []
    path = tmp_path / "0001-engine-1.jsonl"
    segment.keep(Entry(3, ok()), lambda: seen.append(path.read_bytes()))
    assert seen == [line(Entry(3, ok()))]
    segment.close()


def test_an_outcome_comes_back_as_it_was(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, ok("x")), Entry(1, failed()))
    found = index(tmp_path)
    assert bytes(found.end(0).body) == b'{"text":"x"}'
    assert found.end(1) == failed()


def test_an_answer_over_many_lines_is_one_line(tmp_path: Path):
    body = msgspec.Raw(b'{\n  "text": "a\\nb"\n}')
    write(tmp_path, "0001-a", Entry(0, Outcome(state="ok", body=body)), Entry(1, ok()))
    assert bytes(index(tmp_path).end(0).body) == b'{"text":"a\\nb"}'


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
    assert bytes(index(tmp_path).end(0).body) == b'{"text":"first"}'


def test_of_failures_the_last_counts(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, failed("first")))
    write(tmp_path, "0002-a", Entry(0, failed("second")))
    found = index(tmp_path)
    assert found.end(0).failure.code == "second"
    assert found.codes == {0: "second"}


def test_a_row_with_anothers_answer_has_its_body(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(4, ok("shared")))
    write(tmp_path, "0001-driver", Entry(7, of=4))
    found = index(tmp_path)
    assert found.state(7) == "ok"
    assert bytes(found.end(7).body) == b'{"text":"shared"}'
    assert found.reused == 1


def test_deaths_of_a_row_are_no_end_of_it(tmp_path: Path):
    write(tmp_path, "0001-driver", Entry(2, deaths=1), Entry(2, deaths=2))
    found = index(tmp_path)
    assert found.state(2) is None
    assert found.deaths == {2: 2}


def test_tokens_of_all_answers_are_summed(tmp_path: Path):
    write(tmp_path, "0001-a", Entry(0, ok(), used=(10, 4, 3)), Entry(1, ok(), used=(5, 0, 2)))
    assert index(tmp_path).used == [15, 4, 5]


def test_rows_of_a_dead_worker_are_read_from_its_segment(tmp_path: Path):
    path = write(tmp_path, "0001-engine-1", Entry(0, ok()), Entry(1, ok()))
    write(tmp_path, "0001-engine-1-2", Entry(5, ok()))
    path.write_bytes(path.read_bytes()[:-3])
    assert [row for row, _ in ended_in(place(tmp_path), "0001-engine-1")] == [0]


def test_each_run_has_a_number_of_its_own(tmp_path: Path):
    assert attempt(place(tmp_path)) == 1
    write(tmp_path, "0003-driver")
    assert attempt(place(tmp_path)) == 4


def test_no_two_processes_write_one_segment(tmp_path: Path):
    Segment(place(tmp_path), "0001-a").close()
    with pytest.raises(FileExistsError):
        Segment(place(tmp_path), "0001-a")


def test_in_a_bucket_an_entry_is_told_when_its_object_is_there(tmp_path: Path, monkeypatch):
    with s3_server("jobs") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        folder, told = place("s3://jobs/out.jsonl.journal"), threading.Event()
        segment = Segment(folder, "0001-engine-1")
        for row in range(3):
            segment.keep(Entry(row, ok(str(row))), told.set)
        assert told.wait(20)
        assert len(ended_in(folder, "0001-engine-1")) == 3
        segment.keep(Entry(3, ok()), lambda: None)
        segment.close()
        found = Index(folder, tmp_path)
        assert found.counts()["ok"] == 4
        assert bytes(found.end(2).body) == b'{"text":"2"}'
        assert len(os.listdir(tmp_path)) == 2
