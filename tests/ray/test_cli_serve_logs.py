"""`penstock serve --log-format json`: every line that one of our processes writes is a JSON object."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray.command import client, serving

pytestmark = pytest.mark.full


@pytest.fixture
def folder() -> Iterator[Path]:
    """For Ray's session: its sockets allow no long path."""
    path = Path(tempfile.mkdtemp(prefix="logs-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """Fails at the first line that is not one."""
    return [json.loads(line) for line in lines]


def logged(lines: list[str]) -> list[str]:
    """The lines that came by Python's logging: Ray's marks (`:job_id:01`) and what C++ code prints by itself
    (`[W1124 14:12:07 utils.cpp:68] ...`) left out, which stand in Ray's files only.
    """
    return [line for line in lines if line and not line.startswith((":", "["))]


def written_by_actors(logs: Path) -> Iterator[tuple[str, list[str]]]:
    """What replicas of the application wrote: the engine's, the gateway's, control's."""
    for file in logs.glob("worker-*.*"):
        lines = file.read_text().splitlines()
        if any(line.startswith(":actor_name:ServeReplica:") for line in lines):
            yield file.name, lines


@pytest.mark.parity("S28")
def test_every_line_of_every_process_is_json(folder: Path, free_port: int):
    """A cluster of its own, since Ray's logs must be only those of this service, with a real engine."""
    words = ["demo", "--port", str(free_port), "--log-format", "json"]
    variables = {"RAY_TMPDIR": str(folder), "VLLM_LOGGING_LEVEL": "INFO", "PENSTOCK_ACCELERATOR": "cpu"}
    with serving(*words, **variables) as command:
        logs = folder / "ray" / "session_latest" / "logs"
        asked = client(free_port).chat.completions.create(
            model="penstock-demo", messages=[{"role": "user", "content": "What is Penstock?"}]
        )
        assert asked.choices[0].message.content
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{free_port}/v1/responses/resp_none")
        actors = dict(written_by_actors(logs))
        of_serve = [file.read_text().splitlines() for file in (logs / "serve").glob("replica_*.log")]
        assert actors
        for lines in [*actors.values(), *of_serve]:
            objects(logged(lines))
    shown = [*objects(command.out), *objects(command.err)]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, shown))
    loggers = {line["logger"].partition(".")[0] for line in shown}
    assert {"penstock", "vllm"} <= loggers
    assert {"part": "Ray", "phase": "starting"}.items() <= shown[0].items()
