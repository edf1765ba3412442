"""The adapters loaded in a replica's engine: loaded on demand, refreshed, evicted when slots are needed.

A request holds the version that it uses, which stays in the engine until the last such request has ended,
whatever happens to its name meanwhile. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.engine import Engine
from penstock.errors import AdapterBroken, BadRequest, Error, ModelNotFound, Overloaded, SourceNotFound
from penstock.layers.adapters.source import Source

log = logging.getLogger(__name__)

_FAILURE_KEPT_S = 5.0  # a failed adapter is not retried before
_ROOM_WAIT_S = 30.0  # for a slot, while requests use all of them
_IDLE_WAIT_S = 1.0  # then an adapter in constant use is evicted, once its requests have ended
_RETRY_AFTER_S = 5.0


@dataclass(eq=False, slots=True)
class Version:
    """One version of an adapter. users: requests that hold it, or wait for it.

    origin: as `Source.origin` said. has_slot: it has taken a slot in the engine.
    """

    name: str
    key: str
    origin: str
    users: int = 0
    loading: asyncio.Task[None] | None = None
    has_slot: bool = False
    in_engine: bool = False
    stamp: str | None = None
    refused: str | None = None  # stamp of a newer one that is broken


class Store:
    """At most `max_num_adapters_per_replica` in the engine, and one more while it replaces another."""

    def __init__(self, engine: Engine, source: Source, changed: Callable[[], None] = lambda: None) -> None:
        """changed: called when an adapter has been loaded or evicted."""
        self._engine = engine
        self._source = source
        self._limit = source.lora.max_num_adapters_per_replica
        self._changed = changed
        self._current: OrderedDict[str, Version] = OrderedDict()
        """The version that a new request gets; least recently used first."""
        self._pinned: set[str] = set(source.lora.pinned)
        self._failures: dict[str, tuple[float, Error]] = {}
        self._refreshing: set[str] = set()
        self._numbers = itertools.count(1)
        self._slots = 0  # slots taken in the engine
        self._turn = asyncio.Lock()  # of those who want one
        self._wanted = False  # by somebody who waits for it
        self._freed = asyncio.Event()
        self._changing = asyncio.Lock()  # held by a start, and by each change of sources
        self._started = False
        self._freshening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Loads pinned adapters, lists all once, and starts to refresh them. Raises: what loading raises."""
        async with self._changing:
            for version in list(self._current.values()):
                if version.in_engine and version.key not in self._engine.adapters():  # stopped since
                    self._retire(version)
            self._spawn(self._source.check_listing())
            await asyncio.gather(*map(self.load_adapter, self._source.lora.pinned))
            self._started = True
            self._begin_to_refresh()

    async def stop(self) -> None:
        """Cancels work in progress. The engine keeps its adapters."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._source.close()

    # -- for requests

    @asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[str]:
        """The engine's name of an adapter, which stays loaded as long as this lasts.

        Raises: ModelNotFound, AdapterBroken, DownloadFailed, Overloaded when all slots stay in use.
        """
        version = self._current.get(name) or self._begin(name)
        self._current.move_to_end(name)
        version.users += 1
        try:
            if version.loading is not None:
                await asyncio.shield(version.loading)
            yield version.key
        finally:
            version.users -= 1
            self._left(version)
            self._give_up(version)

    def has(self, name: str) -> bool:
        """Whether `use` will not have to wait."""
        version = self._current.get(name)
        return version is not None and version.in_engine

    def stamp(self, name: str, key: str) -> str | None:
        """Of the version that the engine knows as `key`, equal for equal adapters. None once a newer one is
        there, and where that cannot be known.
        """
        version = self._current.get(name)
        if version is None or version.key != key or not version.stamp:
            return None
        return hashlib.sha256(f"{version.origin} {version.stamp}".encode(errors="replace")).hexdigest()[:32]

    # -- for operators

    async def load_adapter(self, name: str, pin: bool = False) -> None:
        """Loads it, and with `pin` keeps it from being evicted.

        Raises: as `use`; BadRequest for a pin too many.
        """
        if pin and len(self._pinned | {name}) > self._limit:
            raise BadRequest(f"All {self._limit} adapter slots are pinned; unload one of them first.")
        async with self.use(name):
            if pin:
                self._pinned.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Unpins and unloads it: requests that use it finish first, later ones load it again."""
        self._pinned.discard(name)
        if version := self._current.get(name):
            self._retire(version)

    async def change(self, fields: Mapping[str, Any]) -> None:
        """Takes over fields of `lora_config`, all but its number of adapters. What is loaded and comes from
        elsewhere now is loaded anew beside the old version; what is pinned now is loaded.

        Raises: BadRequest for a pin too many, what fetching raises: nothing has changed then. What loading
        raises: the old version of that adapter stays, and all else has changed.
        """
        async with self._changing:
            before = self._source.lora
            lora = before.model_copy(update=fields)
            source, pinned = self._source.changed(lora), self._pinned - {*before.pinned} | {*lora.pinned}
            if len(pinned) > self._limit:
                raise BadRequest(
                    f"{len(pinned)} adapters are to be pinned, and a replica holds {self._limit}: pin fewer, "
                    "unload some that were pinned by handle, or raise max_num_adapters_per_replica."
                )
            if self._started:
                await self._check(source)
            self._source, self._pinned = source, pinned
            self._failures.clear()
            if not self._started:
                return
            if lora.refresh_interval_s != before.refresh_interval_s:
                self._begin_to_refresh()
            if lora.dynamic_lora_loading_path != before.dynamic_lora_loading_path:
                self._spawn(source.check_listing())
            steps = (
                *((self._renew, name) for name in self._current),
                *((self.load_adapter, name) for name in lora.pinned),
            )
            errors = list[Error]()
            for step, name in steps:
                task = self._spawn(step(name))
                try:
                    await asyncio.shield(task)  # an engine is not interrupted while it loads
                except Error as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    async def _check(self, source: Source) -> None:
        """Fetches what will be loaded from there, and looks at other adapters that are new or changed.

        Raises: SourceNotFound, DownloadFailed.
        """
        lora, known = source.lora, self._source.lora.adapters

        async def check(name: str, read: Callable[[str], Awaitable[object]]) -> None:
            try:
                await read(name)
            except ModelNotFound as error:
                if name in lora.adapters or name in lora.pinned:  # else it is unloaded
                    why = error.__cause__ or error
                    raise SourceNotFound(f"The adapter '{name}' is not there: {why}") from error

        moved = {name for name, version in self._current.items() if version.origin != source.origin(name)}
        loads = moved | {*lora.pinned} - self._current.keys()
        others = {name for name, found in lora.adapters.items() if found != known.get(name)} - loads
        await asyncio.gather(
            *(check(name, source.fetch) for name in loads), *(check(name, source.stamp) for name in others)
        )

    async def _renew(self, name: str) -> None:
        """Has an adapter that comes from elsewhere now replaced, or unloaded where it is no more."""
        while (older := self._current.get(name)) and older.origin != self._source.origin(name):
            if older.loading is not None:
                await asyncio.wait({older.loading})
                continue
            newer = self._version(name)
            try:
                await self._bring(newer, self._take_spare_slot)
            except ModelNotFound:
                self._retire(older)
            else:
                self._replace(older, newer)

    def loaded(self) -> tuple[str, ...]:
        """Names of the loaded adapters, sorted."""
        return tuple(sorted(name for name, version in self._current.items() if version.in_engine))

    async def listed(self) -> list[str]:
        """Names of all that a request may name, sorted. Raises: SourceNotFound, DownloadFailed."""
        return await self._source.names()

    # -- loading

    def _begin(self, name: str) -> Version:
        until, failure = self._failures.get(name, (0.0, Error()))
        if time.monotonic() < until:
            raise type(failure)(str(failure), **failure.facts)
        version = self._current[name] = self._version(name)
        version.loading = self._spawn(self._load(version))
        return version

    def _version(self, name: str) -> Version:
        return Version(name, f"{name}@{next(self._numbers)}", self._source.origin(name))

    async def _load(self, version: Version) -> None:
        try:
            await self._bring(version, self._take_slot)
        except BaseException as error:
            self._forget(version)
            if isinstance(error, Error) and not isinstance(error, Overloaded):
                self._remember(version.name, error)
            raise
        version.loading = None
        self._left(version)  # all who wanted it may have gone

    async def _bring(self, version: Version, take_slot: Callable[[Version], Awaitable[None]]) -> None:
        """Fetches it, takes a slot, and loads it there."""
        began = time.monotonic()
        version.origin = self._source.origin(version.name)
        path, version.stamp = await self._source.fetch(version.name)
        fetched = time.monotonic()
        await take_slot(version)
        version.has_slot = True
        admitted = time.monotonic()
        try:
            await self._engine.load_adapter(version.key, path)
        except BaseException:
            self._give_back()
            raise
        version.in_engine = True
        spent = fetched - began, admitted - fetched, time.monotonic() - admitted
        log.info(
            "Loaded adapter %s: %.3f s to fetch, %.3f s for a slot, %.3f s to load.", version.key, *spent
        )
        self._changed()

    def _give_up(self, version: Version) -> None:
        """Nobody waits for it any more: it need not evict another one. Its files stay."""
        if version.loading is not None and not (version.users or version.has_slot):
            version.loading.cancel()
            self._forget(version)

    def _remember(self, name: str, error: Error) -> None:
        now = time.monotonic()
        while self._failures and next(iter(self._failures.values()))[0] <= now:  # the oldest is the first
            del self._failures[next(iter(self._failures))]
        self._failures.pop(name, None)
        self._failures[name] = now + _FAILURE_KEPT_S, error

    # -- slots

    async def _take_slot(self, version: Version) -> None:
        """Takes a slot, first come, first served. Raises: Overloaded."""
        if version.name not in self._pinned and len(self._pinned) >= self._limit:
            raise Overloaded(f"All {self._limit} adapter slots are pinned; '{version.name}' finds none.")
        try:
            async with asyncio.timeout(_ROOM_WAIT_S), self._turn:
                while not await self._take(self._limit):
                    await self._wait_for_slot()
        except TimeoutError:
            raise Overloaded(
                f"All {self._limit} adapter slots are in use; try again, or raise "
                "lora_config.max_num_adapters_per_replica.",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    async def _take_spare_slot(self, version: Version) -> None:
        """The same for a version that replaces another: may use the spare slot, out of turn."""
        while not await self._take(self._limit + 1):
            self._freed.clear()
            await self._freed.wait()

    async def _take(self, limit: int) -> bool:
        """Takes a slot if one is free, or can be freed by unloading an unused adapter."""
        while self._slots >= limit:
            idle = next((version for version in self._evictable() if not version.users), None)
            if idle is None:
                return False
            self._forget(idle)
            await asyncio.shield(self._drop(idle))  # its slot is released, whichever caller gives up
        self._slots += 1
        return True

    async def _wait_for_slot(self) -> None:
        """After a while evicts an adapter in constant use, as soon as its requests have ended."""
        self._freed.clear()
        self._wanted = True
        try:
            async with asyncio.timeout(_IDLE_WAIT_S):
                await self._freed.wait()
        except TimeoutError:
            for version in self._evictable()[:1]:
                self._retire(version)
        finally:
            self._wanted = False

    def _evictable(self) -> list[Version]:
        """In the order of eviction."""
        return [one for one in self._current.values() if one.in_engine and one.name not in self._pinned]

    def _left(self, version: Version) -> None:
        """A user or loader has gone: the last one unloads it if it is not to stay."""
        if version.users or not version.in_engine:
            return
        if self._wanted and version.name not in self._pinned:
            self._forget(version)
        if self._current.get(version.name) is not version:
            self._drop(version)

    def _retire(self, version: Version) -> None:
        """New requests do not get it any more."""
        self._forget(version)
        self._left(version)

    def _forget(self, version: Version) -> None:
        if self._current.get(version.name) is version:
            del self._current[version.name]

    def _drop(self, version: Version) -> asyncio.Task[None]:
        version.in_engine = False
        return self._spawn(self._unload(version))

    async def _unload(self, version: Version) -> None:
        try:
            await self._engine.unload_adapter(version.key)
        except Error as error:
            log.warning("Adapter %s could not be unloaded: %s", version.key, error)
        except Exception:  # an engine's own: the request that needs the slot did nothing wrong
            log.exception("Adapter %s could not be unloaded.", version.key)
        finally:
            self._give_back()
            self._changed()

    def _give_back(self) -> None:
        self._slots -= 1
        self._freed.set()

    # -- refreshing

    def _begin_to_refresh(self) -> None:
        if self._freshening is not None:
            self._freshening.cancel()
        interval_s = self._source.lora.refresh_interval_s
        self._freshening = None if interval_s is None else self._spawn(self._keep_fresh(interval_s))

    async def _keep_fresh(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            for version in self._current.values():
                if version.in_engine and version.name not in self._refreshing:
                    self._spawn(self._refresh(version))

    async def _refresh(self, version: Version) -> None:
        """Replaces it if its source has changed; a version that fails to load replaces nothing."""
        if version.key not in self._engine.adapters():  # it could not be restored after a sleep
            self._retire(version)
            return
        self._refreshing.add(version.name)
        try:
            stamp = await self._source.stamp(version.name)
            if stamp in (version.stamp, version.refused):
                return
            version.refused = stamp
            newer = self._version(version.name)
            await self._bring(newer, self._take_spare_slot)
        except ModelNotFound as error:
            log.info("Adapter %s has left its source: %s", version.key, error)
            self._retire(version)
        except AdapterBroken as error:
            log.warning("Adapter %s stays, for the newer one is broken: %s", version.key, error)
        except Error as error:
            version.refused = None  # retried next time
            log.warning("Adapter %s may have changed, which cannot be seen: %s", version.key, error)
        else:
            self._replace(version, newer)
        finally:
            self._refreshing.discard(version.name)

    def _replace(self, older: Version, newer: Version) -> None:
        """Unless the older version was evicted meanwhile: then the newer is unloaded, too."""
        if self._current.get(newer.name) is older:
            self._current[newer.name] = newer
        self._left(older)
        self._left(newer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Error):
            log.error("Work on adapters failed.", exc_info=error)
