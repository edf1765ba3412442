"""A replica's steward: brings its engine into the state that is desired, and says how it is.

It stands between control, whose news it follows, and the engine. Gateways learn of a state that takes no
requests before it begins, so that nothing new is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.engine import Engine
from penstock.engine_control import EngineControl, PauseMode, control_of
from penstock.errors import Conflict, Error, Unsupported
from penstock.serve.control.state import (
    FOLLOW_S,
    WARN_AFTER,
    Actual,
    Desired,
    Group,
    News,
    Order,
    Outcome,
    Told,
    Weights,
    checked,
)

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_TRY_AGAIN_S = 10.0
"""After it failed, what is desired is tried again so often."""
_FIRST_S = 20.0
"""At its start a replica waits so long for control's word. Then it comes up as its config says."""

Follow = Callable[[Told, float], Awaitable[News]]
Done = Callable[[int, Outcome], Awaitable[None]]


class Steward:
    """Of one engine. What is done to it while it serves is done here, one thing after the other."""

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[], Awaitable[None]],
        tell: Callable[[], None],
        replica: str,
        group: Group | None = None,
    ) -> None:
        """begin: starts the engine. tell: called when `actual` has changed. group: where it takes turns."""
        self._engine = engine
        self._begin = begin
        self._tell = tell
        self._replica = replica
        self._group = group
        self.role = ""
        """What the replica is there for, as its status shows; "" for all of its model's work."""
        self._asked_at = time.monotonic()
        self._turn = asyncio.Lock()
        self._begun = False
        self._going: Actual | None = None
        self._level = 0  # at which it fell asleep last
        self._desired = Desired()
        self._done = 0
        self._error = ""
        self._unsupported = False
        self._failed_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.begun = asyncio.Event()
        """Set once the engine has been started."""

    @property
    def _control(self) -> EngineControl:
        return control_of(self._engine)

    @property
    def actual(self) -> Actual:
        """Also where it is going, when that takes no requests."""
        if self._going is not None:
            return self._going
        if not self.begun.is_set() or self._control.is_sleeping():
            return "asleep"
        return "paused" if self._control.is_paused() else "ready"

    def asked(self) -> None:
        """A request has come."""
        self._asked_at = time.monotonic()

    def weights_version(self) -> str:
        return self._control.weights_version()

    # -- at the start

    async def start(self, follow: Follow | None) -> None:
        """Starts the engine in the state that is desired; one that shall sleep is started when it wakes.

        Raises: what `begin` raises; EngineStartFailed when the weights that are desired cannot be had.
        """
        desired = await self._first(follow) if follow is not None else Desired()
        if not desired.sleep:
            await self._start()
            try:
                await self._reach(desired)
            except Unsupported as error:  # never was reached: no reason not to start
                self._failed(str(error), unsupported=True)
        self._desired, self._done = desired, desired.version

    async def _first(self, follow: Follow) -> Desired:
        try:
            async with asyncio.timeout(_FIRST_S):
                return (await follow(self._told("starting"), 0.0)).desired
        except Exception:  # Serve's and Ray's, of a control that is not there yet
            log.warning("Control has not answered within %g s; the replica starts without it.", _FIRST_S)
            return Desired()

    async def _start(self) -> None:
        await self._begin()
        self.begun.set()
        self._tell()

    # -- following

    async def follow(self, follow: Follow, done: Done) -> None:
        """For ever: hears news, and acts on them."""
        reaching: asyncio.Task[None] | None = None
        unanswered = 0
        while True:
            if reaching is not None:
                await asyncio.wait({reaching}, timeout=_AGAIN_S)
                reaching = None if reaching.done() else reaching
            try:
                news = await follow(self._told(self.actual), FOLLOW_S if reaching is None else 0.0)
            except Exception as error:  # Serve's and Ray's: control is restarted, or moves
                unanswered += 1
                level = logging.INFO if unanswered % WARN_AFTER else logging.WARNING
                log.log(level, "Control does not answer (%s: %s); asking again.", type(error).__name__, error)
                await asyncio.sleep(_AGAIN_S)
                continue
            unanswered = 0
            for order in news.orders:
                self._spawn(self._obey(order, done))
            is_new = news.desired.version != self._desired.version
            if reaching is None and (is_new or self._shall_try_again()):
                reaching = self._spawn(self._become(news.desired))

    def _shall_try_again(self) -> bool:
        return bool(self._error) and time.monotonic() - self._failed_at > _TRY_AGAIN_S

    async def _become(self, desired: Desired) -> None:
        """Errors are told, not raised: what was reached stays."""
        self._desired = desired
        try:
            await self._reach(desired)
        except Error as error:
            self._failed(str(error), unsupported=isinstance(error, Unsupported))
        except Exception as error:
            log.exception("The state of version %d was not reached", desired.version)
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._failed("")
        self._done = desired.version

    def _failed(self, sentence: str, *, unsupported: bool = False) -> None:
        """ "" for one that did not."""
        self._error, self._unsupported, self._failed_at = sentence, unsupported, time.monotonic()

    async def _reach(self, desired: Desired) -> None:
        if desired.sleep:
            await self.sleep(desired.sleep, desired.sleep_mode)
            return
        await self.wakeup()
        if desired.weights is not None and desired.weights.version != self._control.weights_version():
            await self.update_weights(desired.weights)
        if desired.pause is not None:
            await self.pause(desired.pause, desired.clear_cache)
        else:
            await self.resume()

    async def _obey(self, order: Order, done: Done) -> None:
        try:
            outcome: Outcome = {"result": await self.perform(order.operation, order.arguments)}
        except Error as error:
            outcome = {"error": str(error)}
        except Exception as error:
            log.exception("%s failed", order.operation)
            outcome = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(Exception):  # a control that is gone has forgotten who asked
            await done(order.id, outcome)

    def _told(self, actual: Actual) -> Told:
        return Told(
            replica=self._replica,
            actual=actual,
            weights=self._control.weights_version(),
            done=self._done,
            desired=self._desired,
            error=self._error,
            group=self._group,
            idle_s=0.0 if self._engine.load().running else time.monotonic() - self._asked_at,
            role=self.role,
            unsupported=self._unsupported,
            on_its_way=self._going is not None,
        )

    # -- what is done to the engine

    async def perform(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """One of `OPERATIONS`. Raises: BadRequest; what the engine raises."""
        asked = checked(operation, arguments)
        match operation:
            case "sleep":
                await self.sleep(asked.level, asked.mode)
            case "wakeup":
                await self.wakeup()
            case "pause":
                await self.pause(asked.mode, asked.clear_cache)
            case "resume":
                await self.resume()
            case "update_weights":
                await self.update_weights(asked)
            case "is_sleeping":
                return self.actual == "asleep"
            case "is_paused":
                return self._control.is_paused()
            case "collective_rpc":
                return await self._control.collective_rpc(
                    asked.method, asked.timeout, asked.args, asked.kwargs
                )
            case _:
                return await getattr(self._control, operation)()
        return None

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Raises: Conflict when it sleeps at another level."""
        async with self._turn:
            if not self.begun.is_set():
                return
            if not self._control.is_sleeping():
                await self._toward("asleep", self._control.sleep(level, mode))
                self._level = level
            elif level != self._level:
                raise Conflict(
                    f"It sleeps at level {self._level}; wake it up before it can sleep at level {level}."
                )

    async def wakeup(self) -> None:
        async with self._turn:
            if not self.begun.is_set():
                await self._start()
            elif self._control.is_sleeping():
                await self._toward("asleep", self._control.wakeup())

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        async with self._turn:
            await self._toward("paused", self._control.pause(mode, clear_cache))

    async def resume(self) -> None:
        async with self._turn:
            if self._control.is_paused():
                await self._toward("paused", self._control.resume())

    async def update_weights(self, weights: Weights) -> None:
        async with self._turn:
            update = self._control.update_weights(Path(weights.source), weights.version, weights.mode)
            await self._toward("paused", update)

    async def _toward(self, state: Actual, step: Awaitable[None]) -> None:
        """No new requests while it lasts."""
        self._going = state
        self._tell()
        try:
            await step
        finally:
            self._going = None
            self._tell()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
