"""The contestants: how each is started, when it is ready, how it is stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import processes
from benchmarks.load import CHAT
from benchmarks.workload import DEVICE, EXECUTORS, MODEL_ID, ROOT, Workload

_START_LIMIT_S = 240.0
_STOP_LIMIT_S = 60.0
_LAST_WORDS_S = 2.0
_LOOK_S = 0.05


class DidNotStart(Exception):
    """Says why, as far as the contestant's own output tells."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to serve the model. `command` gets the port and a folder for files.

    by_name_only: whether it is measured only where `--only` names it.
    """

    name: str
    title: str
    command: Callable[[Workload, int, Path], list[str]]
    executors: tuple[str, ...] = EXECUTORS
    environment: Callable[[Path], Mapping[str, str]] = field(default=lambda folder: {})
    by_name_only: bool = False


def _vllm_server(workload: Workload, port: int, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *("--model", str(workload.model), "--served-model-name", MODEL_ID),
        *workload.engine_flags(),
    ]


def penstock_serve(workload: Workload, port: int, folder: Path) -> list[str]:
    """`penstock serve` with a config file in `folder`."""
    config = folder / "bench.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model_loading_config": {"model_id": MODEL_ID, "model_source": str(workload.model)},
                "accelerator_config": {"kind": DEVICE},
                "engine_kwargs": workload.engine_kwargs(),
            }
        )
    )
    command = [sys.executable, "-c", "from penstock.cli import main; main()"]  # installed or not
    return [*command, "serve", str(config), "--port", str(port)]


def _serve_app(name: str) -> Callable[[Workload, int, Path], list[str]]:
    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        module = [sys.executable, "-m", "benchmarks.serve_apps"]
        return [*module, name, str(port), str(workload.model), workload.executor]

    return command


def _haproxy(folder: Path) -> Mapping[str, str]:
    """Its files in `folder`: the defaults are one place for every cluster of the machine."""
    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock"}
    files |= {"SERVER_STATE_BASE": "state", "SERVER_STATE_FILE": "state/server-state"}
    places = {f"RAY_SERVE_HAPROXY_{name}": str(folder / "haproxy" / file) for name, file in files.items()}
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", **places}


BEFORE = "PENSTOCK_BEFORE"
"""Names the folder of another commit, for a change's before and after."""

CONTESTANTS = (
    Contestant("vllm", "vllm serve", _vllm_server),
    # On CPU it overrides every other executor by "mp".
    Contestant("ray-llm", "Ray Serve LLM", _serve_app("ray-llm"), ("mp",)),
    Contestant(
        "ray-llm-haproxy", "Ray Serve LLM, HAProxy + direct", _serve_app("ray-llm"), ("mp",), _haproxy
    ),
    Contestant("penstock", "penstock serve", penstock_serve),
    Contestant(
        "penstock-plain",
        "penstock serve, no capabilities",
        penstock_serve,
        environment=lambda folder: {"PENSTOCK_VLLM_CAPABILITIES_OFF": "all"},
        by_name_only=True,
    ),
    Contestant(
        "penstock-before",
        "penstock serve of PENSTOCK_BEFORE",
        penstock_serve,
        environment=lambda folder: {"PYTHONPATH": os.environ[BEFORE] + "/src"},
        by_name_only=True,
    ),
    Contestant("penstock-serve-run", "Penstock, serve.run", _serve_app("penstock")),
    Contestant(
        "penstock-haproxy", "Penstock, serve.run, HAProxy", _serve_app("penstock"), environment=_haproxy
    ),
)


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a contestant ended. left_over: its processes that were still there when it said it was done."""

    seconds: float
    left_over: tuple[str, ...]


class Running:
    """A contestant from its start until `stop`. Its output goes to `log` in a folder of its own."""

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: Path, port: int) -> None:
        self.port = port
        self.folder = folder
        self.log = folder / "output.log"
        self.started_at = time.monotonic()
        self._paused: list[psutil.Process] = []
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @classmethod
    def start(cls, contestant: Contestant, workload: Workload) -> Running:
        """Starts the processes and returns at once."""
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))  # short: Ray's socket paths have a limit
        port = free_port()
        environment = {**workload.environment(folder), **contestant.environment(folder)}
        return cls(contestant.command(workload, port, folder), environment, folder, port)

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_token(self, workload: Workload) -> float:
        """Seconds from the start of the process to the first streamed token. Asks until it is answered.

        Raises: DidNotStart when the process ends, or at the time limit.
        """
        deadline = self.started_at + _START_LIMIT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DidNotStart(f"It ended with code {self._process.returncode}: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if (at := _first_token_at(self.port, workload.body())) is not None:
                    return at - self.started_at
            time.sleep(_LOOK_S)
        raise DidNotStart(f"It gave no token within {_START_LIMIT_S:g} s: {self.last_words()}")

    def check_answer(self, workload: Workload) -> None:
        """Raises: DidNotStart unless an answer has exactly the tokens that tok/s are reckoned with."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps(workload.body(stream=False)), _HEADERS)
            answer = json.loads(connection.getresponse().read())
        if (found := answer.get("usage", {}).get("completion_tokens")) != workload.tokens:
            raise DidNotStart(f"It answered {found} tokens, not {workload.tokens}: {str(answer)[:300]}")

    def processes(self) -> list[psutil.Process]:
        """All that it started, orphans too: nothing else runs below this process but a load generator."""
        return processes.descendants()

    def pause(self) -> None:
        """From now on none of its processes runs."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            leader = psutil.Process(self.pid)
            self._paused = [leader, *processes.descendants(leader)]
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """All processes that `pause` stopped run again."""
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._paused = []

    def wait(self, limit_s: float) -> int | None:
        """Its exit status; None while it runs on after `limit_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def stop(self) -> Stopped:
        """SIGTERM, as a supervisor would; whatever outlives it is named, then ended."""
        began_at = time.monotonic()
        family = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_LIMIT_S)
        seconds = time.monotonic() - began_at
        left = processes.wait_ended(family, _LAST_WORDS_S)
        left_over = tuple(f"{process.pid} {processes.title(process)[:80]}" for process in left)
        processes.end_all()
        self._process.poll()
        return Stopped(seconds, left_over)

    def forget(self) -> None:
        """Removes its files; not called where the log is still of use."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def last_words(self) -> str:
        """The end of its output, and where all of it is."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{' | '.join(lines[-3:])[-500:]} (all of it: {self.log})"


_HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer fake-key"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _first_token_at(port: int, body: Mapping[str, Any]) -> float | None:
    """When the first event with text came; None when the answer is no stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(body), _HEADERS)
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        for line in answer:
            if line.startswith(b"data: {") and b'"content":""' not in line and b'"error"' not in line:
                return time.monotonic()
    return None
