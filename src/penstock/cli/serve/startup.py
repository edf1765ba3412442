"""The blocking calls of `penstock serve`, one after another on one thread, and the events that report them.

The thread lives as long as the process (see `ray_cluster`). It knows neither signals nor the display.
"""

import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import psutil

from penstock import progress
from penstock.cli.client.service import Service
from penstock.cli.models.engine_arguments import read_engine_words
from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import ServePlan, gateway_options, is_file, make_plan
from penstock.cli.serve.ray_cluster import Cluster, cpus_needed, preprocessors
from penstock.config.fleet.document import (
    Document,
    StartSettings,
    as_guest,
    document,
    keys_of_environment,
)
from penstock.config.loading.watched_files import WatchedFiles
from penstock.errors import ConfigError, EngineStartFailed, Unavailable, reason
from penstock.json_logs import LOG_FORMAT
from penstock.processes.lifeline import when_ended

ARGUMENTS, RAY, SERVE, SERVICE = "Engine arguments", "Ray", "Serve", "Service"

_LOOK_S = 0.1
_STREAMS_S = 2.0
_RAY_PROCESSES = ("gcs_server", "raylet")
_OVER = ("DEPLOY_FAILED", "UNHEALTHY")
_SPARE_CPUS = 64  # for models that are added later
_OF_BUILDERS = ("PENSTOCK_ACCELERATOR", "PENSTOCK_CLUSTER", "PENSTOCK_ENGINE_CLS")
"""By which the same fleet becomes the same deployments."""

_SLOW_START = "to initialize"
_SLOW_WORKERS = (
    "This cluster runs its workers at niceness {}, which costs an engine tokens where CPUs are full; "
    "start its nodes with RAY_worker_niceness=0."
)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know; nothing stops."""

    text: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Requests are answered from now on."""

    plan: ServePlan


@dataclass(frozen=True, slots=True)
class Failed:
    """The service does not start, or ended by itself."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class RayEnded(Failed):
    """A process is gone without which calls to Ray never return."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The application is gone, and Ray too if it was ours."""


Event = progress.Step | Note | Serving | Failed | Stopped
"""A step of this process is one of a part of the start."""

Report = Callable[[Event], None]


class Steps:
    """Starts the service, waits for `stop`, ends it. Reports each step as an event."""

    def __init__(self, plan: ServePlan, arguments: Arguments, report: Report) -> None:
        self._plan, self._arguments, self._report = plan, arguments, report
        self._stop = threading.Event()
        # From here on: a model takes its time to start, and files may be saved meanwhile.
        self._files = WatchedFiles(filter(is_file, arguments.sources)) if arguments.watch else None
        self._cluster: Cluster | None = None
        self.deployed = False
        self._deployments: dict[str, str | None] = {}  # their versions, by name

    def begin(self) -> None:
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def stop(self) -> None:
        """Asks for the end; `Stopped` is the last event."""
        self._stop.set()

    @property
    def log_dir(self) -> str | None:
        """Where Ray and its workers write on this node; None while Ray is not there."""
        return self._cluster.log_dir if self._cluster else None

    def _run(self) -> None:
        try:
            self._start()
        except BaseException as error:
            self._report(Failed(error))
        self._stop.wait()
        try:
            self._end()
        except BaseException as error:
            self._report(Failed(error))
        self._report(Stopped())
        threading.Event().wait()  # see `ray_cluster`: Ray ends with this thread

    def _start(self) -> None:
        with ThreadPoolExecutor() as meanwhile:
            engine_arguments = meanwhile.submit(read_engine_words, self._plan)
            engine_arguments.add_done_callback(self._report_failure)  # at once, not when Ray is up
            with self._part(RAY, "connecting" if self._arguments.address else "starting"):
                import ray  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before two threads need it

                meanwhile.submit(import_module, "penstock.serve.builders")  # a second of imports
                cluster = self._cluster = Cluster(
                    self._arguments.address,
                    # The engine's words, not read yet, may ask for a worker per CPU of a large machine.
                    cpus=cpus_needed(self._plan.configs) + _SPARE_CPUS,
                    passes_objects=bool(preprocessors(self._plan.configs)),
                    verbose=self._arguments.verbose,
                    on_message=lambda text: self._report(Note(text)),
                )
            if cluster.own:
                _watch_ray(self._report)
            with self._part(SERVE, "starting"):
                cluster.start_serve(self._plan.gateway.log_format.upper())
            with self._part(ARGUMENTS, "reading") if not engine_arguments.done() else nullcontext():
                plan = engine_arguments.result()
        self._deploy(cluster, plan)
        self._wait_until_serving(cluster, plan)
        if self._files is not None:  # beside this thread, so that the end waits for no apply
            threading.Thread(target=self._watch, args=(self._files,), name="watch", daemon=True).start()

    def _deploy(self, cluster: Cluster, plan: ServePlan) -> None:
        from penstock.serve.builders import build_openai_app
        from penstock.serve.control.application import deploy
        from penstock.serve.replica.version import built

        if self._stop.is_set():
            return
        self._step(SERVICE, "deploying")
        serving = plan.serving
        if not cluster.own:
            serving = as_guest(serving, cluster.here(), self._guest_variables())
        cluster.refuse_taken(self._arguments.name)
        with built() as self._deployments:
            application = build_openai_app(serving)
        self.deployed = True  # from here on there may be something to remove
        deploy(application, self._arguments.name, plan.gateway.log_format)
        if not cluster.own and (niceness := cluster.niceness()):
            self._report(Note(_SLOW_WORKERS.format(niceness)))

    def _wait_until_serving(self, cluster: Cluster, plan: ServePlan) -> None:
        from penstock.serve.control.application import state

        shown: set[str] = set()
        gateway = Service(plan.gateway.local_url, own=True)
        while not self._stop.wait(_LOOK_S):
            status, why = state(self._arguments.name)
            messages = [*why.values()]
            for message in messages:
                if _SLOW_START in message:
                    continue  # the display says what takes its time
                if status in _OVER or EngineStartFailed.__name__ in message:
                    raise EngineStartFailed("\n".join(messages))
                if reason(message) not in shown:
                    shown.add(reason(message))
                    self._report(Note(reason(message)))
            if status == "RUNNING" and gateway.is_healthy():
                self._record(cluster, plan)
                self._step(SERVICE, progress.READY)
                self._report(Serving(plan))
                return

    def _record(self, cluster: Cluster, plan: ServePlan) -> None:
        """Has control know what runs, so that it can be changed by a file."""
        from penstock.serve.fleet_file import Control

        try:
            fleet = document(plan.serving)
        except ConfigError as error:
            self._report(Note(f"The fleet cannot be changed while it runs: {error}"))
            return
        kept = {"port": plan.gateway.port, "log_format": plan.gateway.log_format}
        start = StartSettings(
            gateway_options(self._arguments),
            {**kept, **keys_of_environment(plan.gateway)},
            "" if cluster.own else cluster.here(),
            {} if cluster.own else self._guest_variables(),
            {name: os.environ[name] for name in _OF_BUILDERS if name in os.environ},
        )
        control = Control(self._arguments.name, "penstock serve")
        control.record(start, fleet, self._deployments)

    def _watch(self, files: WatchedFiles) -> None:
        from penstock.serve.fleet_file import Control, follow

        control = Control(self._arguments.name, "penstock serve --watch")
        follow(files, self._read, control.save, lambda text: self._report(Note(text)), self._stop)

    def _read(self) -> Document:
        """The fleet of the command, with its files as they are now. Raises: ConfigError."""
        plan = make_plan(self._arguments)
        plan.refuse_serve_only()
        return document(read_engine_words(plan).serving)

    def _guest_variables(self) -> dict[str, str]:
        names = (progress.ENVIRONMENT, progress.LOG_ENVIRONMENT, LOG_FORMAT)
        return {name: os.environ[name] for name in names if name in os.environ}

    def _end(self) -> None:
        if self._cluster is None:
            return
        if self.deployed:
            self._cluster.remove(self._arguments.name)
        self._cluster.leave()

    def _report_failure(self, task: Future[ServePlan]) -> None:
        if error := task.exception():
            self._report(Failed(error))

    @contextmanager
    def _part(self, label: str, phase: str) -> Generator[None]:
        self._step(label, phase)
        yield
        self._step(label, progress.READY)

    def _step(self, label: str, phase: str) -> None:
        self._report(progress.Step(label, phase, os.getpid(), time.monotonic()))


def end_streams(port: int) -> None:
    """Kills all workers but gateways, without a call to Ray, so that gateways end their streams with an error
    event. Returns when they have, after 2 s at most.
    """
    processes = psutil.Process().children(recursive=True)
    gateways = [process for process in processes if _connections(process, port, psutil.CONN_LISTEN)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            # With the raylet all workers would end, gateways too.
            if process not in gateways and process.name() not in _RAY_PROCESSES:
                process.kill()
    deadline = time.monotonic() + _STREAMS_S
    while time.monotonic() < deadline and any(
        _connections(gateway, port, psutil.CONN_ESTABLISHED) for gateway in gateways
    ):
        time.sleep(_LOOK_S)


def _connections(process: psutil.Process, port: int, status: str) -> bool:
    """True if the process has a connection of this status at its own `port`."""
    with suppress(psutil.Error):
        return any(one.status == status and one.laddr.port == port for one in process.net_connections("tcp"))
    return False


def _watch_ray(report: Report) -> None:
    """Reports the end of a process without which Ray is gone."""
    for process in psutil.Process().children():
        if (name := process.name()) in _RAY_PROCESSES:
            gone = RayEnded(Unavailable(f"Ray ended by itself: its process {name!r} is gone."))
            when_ended(process.pid, partial(report, gone))
