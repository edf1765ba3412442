import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import progress


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[progress.ProgressReader]:
    reader = progress.ProgressReader(tmp_path / "progress")
    monkeypatch.setenv(progress.ENVIRONMENT, str(reader.path))
    yield reader
    reader.close()


def test_steps_arrive_in_order_with_sender_and_time(reader: progress.ProgressReader):
    before = time.monotonic()
    progress.report("demo", "import")
    progress.report("demo", progress.FAILED)
    first, second = reader.read()
    assert (first.model_id, first.phase, first.pid) == ("demo", "import", os.getpid())
    assert second.phase == progress.FAILED
    assert before <= first.at <= second.at <= time.monotonic()


def test_reading_again_gives_only_new_steps(reader: progress.ProgressReader):
    progress.report("demo", "import")
    assert len(reader.read()) == 1
    assert reader.read() == []


def test_full_socket_does_not_block_the_sender(reader: progress.ProgressReader):
    for _ in range(10_000):
        progress.report("demo", "load")
    assert 0 < len(reader.read()) < 10_000


def test_a_note_beyond_a_message_is_cut(reader: progress.ProgressReader):
    progress.note("A file of keys has 2000 faults: " + "\U0001f511" * 10_000)
    progress.report("demo", "load")
    cut, after = reader.read()
    assert (cut.phase[:31], cut.phase[-4:], after.phase) == (
        "A file of keys has 2000 faults:",
        " ...",
        "load",
    )


def test_a_deep_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("x" * 200)
    deep.mkdir()
    reader = progress.ProgressReader(deep / "progress")
    monkeypatch.setenv(progress.ENVIRONMENT, str(reader.path))
    progress.report("demo", "load")
    assert [step.phase for step in reader.read()] == ["load"]
    reader.close()
    assert list(deep.iterdir()) == []


def test_what_is_reported_without_a_reader_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(progress.ENVIRONMENT, raising=False)
    progress.report("demo", "nowhere")
    monkeypatch.setenv(progress.ENVIRONMENT, str(tmp_path / "progress"))
    progress.report("demo", "too early")
    assert list(tmp_path.iterdir()) == []
    reader = progress.ProgressReader(tmp_path / "progress")
    progress.report("demo", "import")
    assert [step.phase for step in reader.read()] == ["import"]
    reader.close()
    progress.report("demo", "too late")
    assert list(tmp_path.iterdir()) == []


def test_closed_reader_leaves_no_file(tmp_path: Path):
    reader = progress.ProgressReader(tmp_path / "progress")
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_log_lines_reach_the_commands_stderr(monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(progress.LOG_ENVIRONMENT, f"/proc/{os.getpid()}/fd/{writing}")
    with progress.log_stream() as stream:
        stream.write("a line\n")
        assert os.read(reading, 100) == b"a line\n"
    os.close(reading)
    os.close(writing)


def test_log_lines_without_a_command_go_to_stderr(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(progress.LOG_ENVIRONMENT, "/proc/0/fd/0")
    assert progress.log_stream() is sys.stderr
    monkeypatch.delenv(progress.LOG_ENVIRONMENT)
    assert progress.log_stream() is sys.stderr
