"""`penstock serve` inside its guard: start, show, wait, stop.

One inbox takes the events of `startup`, what replicas report, and signals. This thread reads it and alone
writes to the display; it makes no call to Ray, so it answers at any moment.
"""

import os
import queue
import select
import shutil
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType

import psutil

from penstock import progress
from penstock.cli.models.options import DEFAULT_PORT, Arguments
from penstock.cli.models.plan import ServePlan
from penstock.cli.process import guard
from penstock.cli.process.output import Output, redirect_output
from penstock.cli.serve import durations, started, startup
from penstock.cli.serve.display import Display, Plain, display_for
from penstock.cli.serve.greeting import greeting
from penstock.errors import ConfigError, EngineStartFailed, Error, Unavailable, reason
from penstock.json_logs import LOG_FORMAT
from penstock.processes.lifeline import when_ended
from penstock.processes.tree import adopt_orphans, end_descendants
from penstock.temporary_folder import temporary_folder

STOP_S = 24.0
"""From the first signal until the guard kills this process; what it leaves is gone 4 s later."""

_FINISH_S = 22.0  # for open streams, then for Serve and Ray
_FAILED, _BAD_CONFIG = 1, 2
_ONE_SIGNAL_S = 1.0
_SILENCE_S = 10.0  # without a change of the start, until lines say what goes on
_LEFT_ON_CLUSTER = "The application may still be on the cluster: see `serve status`."


@dataclass(frozen=True, slots=True)
class Signalled:
    """The user or a supervisor asks for the end."""

    signum: int


Event = startup.Event | Signalled


def run(plan: ServePlan, arguments: Arguments, signals_fd: int) -> int:
    """Serves until a signal comes.

    Exit code: 0 after serving, 128 + signal before it, 1 for a failure, 2 for a bad config.
    Raises: Unavailable where no temporary file can be written.
    """
    folder = temporary_folder(started.KIND, outlives=True)
    try:
        started.note(folder, plan, arguments)
        reader = progress.ProgressReader(folder / "progress")
        output = redirect_output(None if arguments.verbose else folder / "serve.log")
    except OSError as error:
        raise Unavailable(f"'{folder}' cannot be written: {error.strerror}. Set TMPDIR.") from error
    os.environ |= {progress.ENVIRONMENT: str(reader.path), progress.LOG_ENVIRONMENT: output.err_path}
    if plan.gateway.log_format == "json":
        os.environ[LOG_FORMAT] = "json"
    command = _Command(plan, arguments, output, folder)
    command.take_signals()
    threading.Thread(target=_forward_steps, args=(reader, command.inbox), daemon=True).start()
    threading.Thread(target=_forward_signals, args=(signals_fd, command), daemon=True).start()
    code = command.run()
    if code != _FAILED:
        shutil.rmtree(folder, ignore_errors=True)
    end_descendants()  # in case the guard was killed
    return code


class _Command:
    """One `penstock serve`, from its first step to its last word."""

    def __init__(self, plan: ServePlan, arguments: Arguments, output: Output, folder: Path) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._output = output
        self._note = partial(started.note, folder, plan, arguments)
        self._began = psutil.Process(os.getppid()).create_time() - time.time() + time.monotonic()
        self._as_json = plan.gateway.log_format == "json"
        self._quiet, self._silence_s = arguments.quiet, _SILENCE_S
        display = display_for(output.out, as_json=self._as_json, quiet=self._quiet)
        self._display: Display = display(output.out, self._began, last=durations.last())
        self._pids: dict[str, int] = {}  # by label
        self._ending = False
        self._signalled = -_ONE_SIGNAL_S
        self._own_cluster = arguments.address is None
        self._port = plan.gateway.port or DEFAULT_PORT
        self._steps = startup.Steps(plan, arguments, self.inbox.put)

    def take_signals(self) -> None:
        """For signals that are sent to this process itself. `SimpleQueue.put` may interrupt itself."""

        def receive(signum: int, frame: FrameType | None) -> None:
            self.signalled(signum)

        for signum in guard.STOPS:
            signal.signal(signum, receive)

    def signalled(self, signum: int) -> None:
        """One signal may come twice: to our process group, and passed on by the program that runs us."""
        now = time.monotonic()
        if now - self._signalled > _ONE_SIGNAL_S:
            self._signalled = now
            self.inbox.put(Signalled(signum))

    def run(self) -> int:
        self._steps.begin()
        event = self._read_until((startup.Serving, startup.Failed, Signalled))
        served = isinstance(event, startup.Serving)
        self._display.close(failed=isinstance(event, startup.Failed))
        if isinstance(event, startup.Serving):
            seconds = time.monotonic() - self._began
            text = greeting(event.plan.gateway, event.plan.configs, seconds)
            durations.remember(self._display.durations())
            self._silence_s = None
            if self._as_json or self._quiet:
                self._display.say(text.partition("\n")[0])
            else:
                self._display = Plain(self._output.out, self._began)
                self._display.say("\n" + text)
            event = self._read_until((startup.Failed, Signalled))
        if isinstance(event, startup.Failed):
            self._explain(event.error)
        elif served:
            self._display.say("\nStopping; open streams have 20 s to finish. Ctrl-C again cuts them.")
        if isinstance(event, startup.RayEnded):
            startup.end_streams(self._port)
        else:
            self._finish(served)
        return _code(event, served)

    def _finish(self, served: bool) -> None:
        """Ends what the guard cannot: streams that are open, and our application on a foreign cluster."""
        self._ending = True
        self._steps.stop()
        if not (served if self._own_cluster else self._steps.deployed):
            return
        event = self._read_until((startup.Stopped, startup.Failed, Signalled), _FINISH_S)
        if not self._own_cluster and not isinstance(event, startup.Stopped):
            self._display.say(_LEFT_ON_CLUSTER)

    def _read_until(self, kinds: tuple[type[Event], ...], limit_s: float | None = None) -> Event | None:
        """Shows every event up to the first of these kinds; None when it does not come in time."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left = self._silence_s if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self.inbox.get(timeout=left)
            except queue.Empty:
                if deadline is not None:
                    return None
                self._display.remind()
                continue
            if isinstance(event, kinds):
                return event
            self._show(event)

    def _show(self, event: Event) -> None:
        match event:
            case startup.Note(text) if not self._ending:
                self._display.say(text)
            case progress.Step("", text):
                self._show(startup.Note(text))
            case progress.Step(model_id, phase, pid, at):
                is_part = pid == os.getpid()
                label = model_id if is_part else self._label(model_id, pid)
                if is_part and (label, phase) == (startup.RAY, progress.READY):
                    self.take_signals()  # Ray has put handlers of its own in their place
                    self._note(self._steps.log_dir or "")
                elif not is_part and phase == progress.READY:
                    gone = startup.Note(f"{label}: its process {pid} has ended.")
                    when_ended(pid, partial(self.inbox.put, gone))
                if phase in (progress.READY, progress.FAILED):
                    self._display.end(label, at, failed=phase == progress.FAILED)
                else:
                    self._display.enter(label, phase, at)
            case _:
                return

    def _explain(self, error: BaseException) -> None:
        """One or two sentences for the user; everything else for the log."""
        text = str(error)
        self._output.note("".join(traceback.format_exception(error)))
        if isinstance(error, EngineStartFailed) or not isinstance(error, Error):
            text = reason(text or repr(error))
        sentences = [f"penstock serve: {text}"]
        if self._output.log is not None and not isinstance(error, ConfigError):
            where = f" Ray's own logs: {self._steps.log_dir}." if self._steps.log_dir else ""
            sentences.append(f"Full log: {self._output.log}.{where}")
        self._output.say_error(sentences, as_json=self._as_json)

    def _label(self, model_id: str, pid: int) -> str:
        """A replica's: the model's id, with a number from its second replica on.

        A replica that replaces a dead one gets its label.
        """
        for number in count(1):
            label = model_id if number == 1 else f"{model_id} ({number})"
            holder = self._pids.get(label, pid)
            if holder == pid or not psutil.pid_exists(holder):
                self._pids[label] = pid
                return label
        raise AssertionError


def _code(event: Event | None, served: bool) -> int:
    match event:
        case startup.Failed(error):
            return _BAD_CONFIG if isinstance(error, ConfigError) else _FAILED
        case Signalled(signum) if not served:
            return 128 + signum
        case _:
            return 0


def _forward_steps(reader: progress.ProgressReader, inbox: queue.SimpleQueue[Event]) -> None:
    while True:
        select.select([reader], [], [])
        for step in reader.read():
            inbox.put(step)


def _forward_signals(signals_fd: int, command: _Command) -> None:
    while signum := os.read(signals_fd, 1):
        command.signalled(signum[0])
    adopt_orphans()  # the guard was killed: this process takes over
    command.signalled(signal.SIGTERM)
