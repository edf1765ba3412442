"""`penstock serve` as its users run it: a process of its own, known by what it prints and what it leaves."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import openai
import psutil

_MARK = "TEST_RUN"
_START_S = 240.0  # of a start on a machine that has much else to do
_GONE_S = 30.0

OF_NO_USE = {"dashboard.py", "monitor.py", "log_monitor.py"}
"""Ray's scripts that a Ray of a command's own runs without."""


def _environment() -> dict[str, str]:
    """Ours without the cluster that a server in this process may have named: a command is told of one."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


class Command:
    """A running `penstock serve`, or another verb; a mark in its environment finds every descendant."""

    def __init__(self, *words: str, verb: str = "serve", **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", verb, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**_environment(), **environment, _MARK: self._mark},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self.out, True)),
            threading.Thread(target=self._read, args=(self._process.stderr, self.err, False)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, kept: list[str], told: bool) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            if told:
                self._lines.put(line)
        if told:
            self._lines.put(None)

    def wait_for(self, text: str) -> None:
        """Returns when a line with `text` was printed."""
        deadline = time.monotonic() + _START_S
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.0, deadline - time.monotonic())):
                if text in line:
                    return
        raise AssertionError(f"{text!r} was never printed:\n" + "\n".join([*self.out, *self.err]))

    def said(self, *texts: str) -> bool:
        """Whether a line with all of these was printed."""
        return any(all(text in line for text in texts) for line in [*self.out, *self.err])

    def work(self) -> psutil.Process:
        """The process that does the work, a child of the one that was started."""
        (work,) = psutil.Process(self.pid).children()
        return work

    def gcs(self) -> psutil.Process:
        """The one process of its own cluster that knows all others."""
        (gcs,) = [process for process in self.living() if process.name() == "gcs_server"]
        return gcs

    def signal_group(self, signum: int) -> None:
        os.killpg(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()

    def exit_code(self) -> int:
        code = self._process.wait(_START_S)
        for reader in self._readers:
            reader.join()
        return code

    def left(self) -> list[str]:
        """What still lives of all that ever descended from the command, after the time that it may take."""
        deadline = time.monotonic() + _GONE_S
        while (living := self.living()) and time.monotonic() < deadline:
            psutil.wait_procs(living, timeout=0.5)
        return [f"{process.pid} {process.name()}" for process in living]

    def living(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def scripts(self) -> set[str]:
        """Names of the files that its processes run or are given."""
        return {Path(word).name for process in self.living() for word in process.cmdline()}

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark
        except psutil.Error:
            return False


@contextlib.contextmanager
def serving(*words: str, until: str = "Serving ", **environment: str) -> Iterator[Command]:
    """A command that printed `until`. Whatever a test does with it, nothing of it outlives the test."""
    command = Command(*words, **environment)
    try:
        command.wait_for(until)
        yield command
    finally:
        if command.living():
            command.signal_group(signal.SIGTERM)
            command.left()
        for process in command.living():
            process.kill()
        command.exit_code()


def client(port: int, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def ask(port: int, text: str, model: str) -> Generator[str]:
    """What it says, piece by piece."""
    stream = client(port).chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True
    )
    return (piece.choices[0].delta.content or "" for piece in stream)
