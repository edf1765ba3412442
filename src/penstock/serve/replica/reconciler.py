"""A replica's reconciler: brings its engine into the desired state, and reports the actual one.

It stands between control, to which it keeps a link, and the engine. Gateways hear of a state that takes no
requests before it begins, so that they send nothing more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import astuple
from ray import serve

from penstock.engine import Engine
from penstock.engine_control import EngineControl, PauseMode, control_of
from penstock.errors import Conflict, EngineStartFailed, Unsupported
from penstock.layers.adapters import Store
from penstock.serve.control import operations
from penstock.serve.control.link import ControlLink
from penstock.serve.control.state import (
    NAME,
    Command,
    DesiredState,
    Done,
    Outcome,
    ReplicaStatus,
    SharingGroup,
    Started,
    Update,
)
from penstock.serve.replica.adapter_changes import AdapterChanges, sentence

_RETRY_S = 10.0
"""Between two attempts to reach a desired state."""
_FIRST_S = 120.0
"""How long a replica that starts waits for control. Serve replaces one that hangs in some 20 s."""


@dataclass(eq=False)
class Reconciler:
    """Of one engine. Performs its operations one after the other.

    tell: called when `actual` has changed. group: the models whose memory it shares. store: of adapters, if
    the model has some. role: as in `ReplicaStatus`. started: set once the engine has been started.
    """

    _engine: Engine
    _start_engine: Callable[[], Awaitable[None]]
    _tell: Callable[[], None]
    _replica: str
    _group: SharingGroup | None = None
    _model: str = ""
    _store: Store | None = None
    role: str = ""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    _requested_at: float = field(default_factory=time.monotonic)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _transition: Started | None = None
    _level: int = 0  # of the last sleep
    _link: ControlLink | None = None
    _following: asyncio.Task[None] | None = None
    _reconciling: asyncio.Task[None] | None = None
    _starting: bool = True
    _latest: DesiredState | None = None  # that control has sent
    _desired: DesiredState = field(default_factory=DesiredState)
    _version: int = 0
    _error: str = ""
    _unsupported: bool = False
    _failed_at: float = 0.0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    _taken: set[int] = field(default_factory=set[int])  # ids of commands

    def __post_init__(self) -> None:
        self._adapters = AdapterChanges(self._store, self._report)

    @property
    def _control(self) -> EngineControl:
        """Looked up each time: an engine may have another one once it runs."""
        return control_of(self._engine)

    @property
    def actual(self) -> Started:
        """The current state, or the target of a transition during which no requests are accepted."""
        if self._transition is not None:
            return self._transition
        if not self.started.is_set() or self._control.is_sleeping():
            return "asleep"
        return "paused" if self._control.is_paused() else "ready"

    def request_arrived(self) -> None:
        """Counts as use of the engine."""
        self._requested_at = time.monotonic()

    def weights_version(self) -> str:
        return self._control.weights_version()

    # -- following

    async def start(self, link: ControlLink | None) -> None:
        """Starts the engine in the desired state; if that is asleep, the engine starts when it is woken. From
        then on follows control, if there is any.

        Raises: what `start_engine` raises; EngineStartFailed when control does not answer, since the engine
        must not start in an earlier state, or when the desired weights cannot be loaded.
        """
        try:
            desired = await self._first(link) if link is not None else DesiredState()
            await self._adapters.settled()  # before the engine loads those that are pinned
            if not desired.sleep:
                await self._start()
                try:
                    await self._reach(desired)
                except Unsupported as error:  # an engine that lacks it can still serve
                    self._record(str(error), unsupported=True)
        except BaseException:
            self.close()
            raise
        self._desired, self._version = desired, desired.version
        self._starting = False
        if link is not None:
            self._report()
            self._reconcile()

    async def _first(self, link: ControlLink) -> DesiredState:
        """Begins to report, at once and all the while it loads: control takes a silent replica's memory for
        free. Updates wait for the start to end."""
        self._link, first = link, asyncio.Event()

        def received(update: Update) -> None:
            self._latest = update.desired
            if update.adapters is not None:
                self._adapters.received(update.adapters)
            first.set()
            for command in update.commands:
                if command.id in self._taken:  # control could not know that it had come
                    continue
                self._taken.add(command.id)
                task = asyncio.create_task(self._run(command, link))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._reconcile()

        self._following = asyncio.create_task(link.follow(self.status, Update, received))
        try:
            async with asyncio.timeout(_FIRST_S):
                await first.wait()
        except TimeoutError:
            raise EngineStartFailed(
                f"Control ({NAME}) has not told the desired state within {_FIRST_S:g} s; see its log."
            ) from None
        return self._latest or DesiredState()

    def close(self) -> None:
        """Stops following, and what control has asked for."""
        self._adapters.close()
        for task in (self._following, self._reconciling, *self._tasks):
            if task is not None:
                task.cancel()

    async def _start(self) -> None:
        await self._start_engine()
        self.started.set()
        self._report()

    def _report(self) -> None:
        """Gateways and control see it at once."""
        self._tell()
        if self._link is not None:
            self._link.report()

    def _reconcile(self) -> None:
        """Begins to reach what control has sent last, unless that is under way, or done."""
        is_idle = self._reconciling is None or self._reconciling.done()
        is_retry_due = self._error and time.monotonic() - self._failed_at > _RETRY_S
        if not self._starting and is_idle and (self._is_behind() or is_retry_due):
            self._reconciling = asyncio.create_task(self._reach_latest())

    def _is_behind(self) -> bool:
        return self._latest is not None and self._latest.version != self._desired.version

    async def _reach_latest(self) -> None:
        """Errors are reported, not raised; what was reached stays."""
        again = True
        while again:
            self._desired = desired = self._latest or self._desired
            try:
                await self._reach(desired)
            except Exception as error:
                said = sentence(error, f"Version {desired.version} of the desired state was not reached")
                self._record(said, unsupported=isinstance(error, Unsupported))
            else:
                self._record("")
            self._version = desired.version
            self._report()
            again = self._is_behind()

    def _record(self, sentence: str, *, unsupported: bool = False) -> None:
        """Records the outcome of the last transition; "" is success."""
        self._error, self._unsupported, self._failed_at = sentence, unsupported, time.monotonic()

    async def _reach(self, desired: DesiredState) -> None:
        if desired.sleep:
            await self.sleep(desired.sleep, desired.sleep_mode)
            return
        await self.wakeup()
        if desired.weights is not None and desired.weights.version != self._control.weights_version():
            await self.update_weights(*astuple(desired.weights))
        if desired.pause is not None:
            await self.pause(desired.pause, desired.clear_cache)
        else:
            await self.resume()

    async def _run(self, command: Command, link: ControlLink) -> None:
        def say(outcome: Outcome) -> None:
            link.say(Done(command.id, self._replica, outcome))

        try:
            say({"result": await self.perform(command.operation, command.arguments)})
        except Exception as error:
            say({"error": sentence(error, f"{command.operation} failed")})

    def status(self) -> ReplicaStatus:
        """What the replica reports to control."""
        return ReplicaStatus(
            replica=self._replica,
            actual="starting" if self._starting else self.actual,
            weights=self._control.weights_version(),
            version=self._version,
            desired=self._desired,
            error=self._error,
            group=self._group,
            idle_s=0.0 if self._engine.load().running else time.monotonic() - self._requested_at,
            role=self.role,
            unsupported=self._unsupported,
            in_transition=self._transition is not None,
            model=self._model,
            adapters=self._adapters.tried,
            adapters_fault=self._adapters.fault,
        )

    # -- operations

    async def perform(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """One of `OPERATIONS`. Raises: BadRequest; what the engine raises."""
        parsed = operations.parse(operation, arguments)
        match operation:
            case "sleep" | "wakeup" | "pause" | "resume" | "update_weights":
                return await getattr(self, operation)(*astuple(parsed))
            case "is_sleeping":
                return self.actual == "asleep"
            case "is_paused":
                return self._control.is_paused()
            case _:
                return await getattr(self._control, operation)(*astuple(parsed))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Raises: Conflict when it sleeps at another level."""
        async with self._lock:
            if not self.started.is_set():
                return
            if not self._control.is_sleeping():
                self._level = level  # before: it may sleep although the caller is cancelled
                await self._transition_to("asleep", self._control.sleep(level, mode))
            elif level != self._level:
                raise Conflict(
                    f"It sleeps at level {self._level}; wake it up before it can sleep at level {level}."
                )

    async def wakeup(self, parts: Collection[str] | None = None) -> None:
        """parts: as in `EngineControl.wakeup_parts`; an engine that was never started starts whole."""
        async with self._lock:
            if not self.started.is_set():
                await self._transition_to("asleep", self._start())
            elif self._control.is_sleeping():
                control = self._control
                step = control.wakeup() if parts is None else control.wakeup_parts(parts)
                await self._transition_to("asleep", step)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        async with self._lock:
            await self._transition_to("paused", self._control.pause(mode, clear_cache))

    async def resume(self) -> None:
        async with self._lock:
            if self._control.is_paused():
                await self._transition_to("paused", self._control.resume())

    async def update_weights(self, source: str, version: str, mode: PauseMode) -> None:
        async with self._lock:
            await self._transition_to("paused", self._control.update_weights(Path(source), version, mode))

    async def _transition_to(self, state: Started, step: Awaitable[None]) -> None:
        """Gateways send no new requests while it lasts."""
        self._transition = state
        self._report()
        try:
            await step
        finally:
            self._transition = None
            self._report()


def find_control() -> ControlLink | None:
    """A link to the control of this replica's application; None if it has none. Blocks.

    Raises: what Serve raises when its controller does not answer: a replica that did not follow control would
    miss updates of weights, and could not be put to sleep.
    """
    try:
        handle: Any = serve.get_deployment_handle(NAME)
    except KeyError:  # the application has no such deployment
        return None
    return ControlLink(handle, ray.get_runtime_context().get_node_id())
