"""Which services `penstock stop` finds and ends. Each has a guard, and a child that notes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cli.serve import started
from penstock.cli.serve.logs import logs
from penstock.errors import ConfigError, Unavailable

GUARD = """
import os, signal, sys
if os.fork() == 0:
    from pathlib import Path
    from penstock.cli.models.options import Arguments
    from penstock.cli.models.plan import make_plan
    from penstock.cli.serve import started
    arguments = Arguments(sources=("echo",), engine="sim", port=int(sys.argv[2]), name="app")
    started.note(Path(sys.argv[1]), make_plan(arguments), arguments, sys.argv[1])
    print("noted", flush=True)
    os._exit(0)
os.wait()
signal.pause()
"""


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running: list[subprocess.Popen[str]] = []

    def start(port: int) -> subprocess.Popen[str]:
        folder = tempfile.mkdtemp(prefix=f"penstock-{started.KIND}-")
        command = [sys.executable, "-c", GUARD, folder, str(port)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        assert running[-1].stdout.readline() == "noted\n"
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_the_only_service_is_ended_and_named(serve, capsys: pytest.CaptureFixture[str]):
    guard = serve(8123)
    assert started.stop([]) == 0
    assert f"Stopping echo at http://127.0.0.1:8123 (process {guard.pid});" in capsys.readouterr().out
    assert guard.wait(30) == -15
    with pytest.raises(Unavailable, match="No service runs here"):
        started.stop([])


def test_one_of_several_is_ended_by_its_process(serve, capsys: pytest.CaptureFixture[str]):
    first, second = serve(8123), serve(8124)
    with pytest.raises(ConfigError, match=f"2 services run here; .*8123 .process {first.pid}.*8124"):
        started.stop([])
    assert started.stop([second.pid], as_json=True) == 0
    (ended,) = json.loads(capsys.readouterr().out)
    assert (ended["id"], ended["models"]) == (second.pid, ["echo"])
    assert [one.id for one in started.running()] == [first.pid]
    with pytest.raises(ConfigError, match=f"No service of yours is process {second.pid}"):
        started.stop([second.pid])


def test_notes_of_ended_services_of_other_processes_and_of_other_users_do_not_count(serve, tmp_path: Path):
    gone = serve(8123)
    (note,) = tmp_path.glob("*/service.json")
    gone.kill()
    gone.wait()
    assert started.running() == []
    noted = json.loads(note.read_text())
    note.write_text(json.dumps(noted | {"id": os.getpid()}))  # its number, but not its start
    assert started.running() == []
    note.write_text("{")
    assert started.running() == []


def test_logs_are_those_of_the_processes_of_the_only_service(
    serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    serve(8123)
    (folder,) = tmp_path.glob("penstock-serve-*")
    assert logs() == 0
    assert capsys.readouterr().err.startswith("Nothing yet: ")
    serves_own = "INFO 2026-11-28 03:12:08,227 app_LLMRouter so81gadt -- Initialized DeploymentHandle."
    for number, (owner, text) in enumerate(
        {
            "app:LLMRouter": f"{serves_own}\nA client is slow.",
            "app:LLMServer:q_1": "".join(f"{one}\n" for one in range(300)),
            "other:LLMServer:q_1": "of another application",
        }.items()
    ):
        text = f":job_id:01000000\n:actor_name:ServeReplica:{owner}\n{text}\n"
        (folder / f"worker-{number}-01-{number}.err").write_text(text)
    assert logs() == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["gateway | A client is slow.", *(f"q_1 | {n}" for n in range(101, 300)), "q_1 | "]
    assert logs(["gateway"]) == 0
    assert capsys.readouterr().out == "gateway | A client is slow.\n"
    assert logs(["q.1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 200
    with pytest.raises(ConfigError, match="There is no x; there are gateway, q_1"):
        logs(["x"])
