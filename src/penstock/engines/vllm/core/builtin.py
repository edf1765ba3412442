"""The engine core that vLLM's front-end starts itself, seen from its owner: for versions that `launch` does
not fit.

vLLM offers no way to reach that process; here it is the child of this one that appears while AsyncLLM is
constructed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from penstock.engines.vllm.core import failure_reason, kv_transfer, plugin
from penstock.engines.vllm.core.launch import said_by
from penstock.errors import EngineDead
from penstock.processes import tree

T = TypeVar("T")

_GRACE_S = 5.0
_WORKERS_S = 1.0
_LOOK_S, _LOOKS = 0.01, 100


class BuiltinCore:
    """The core of one AsyncLLM, which ends it, too."""

    def __init__(self, folder: Path) -> None:
        """folder: for the reason of a failure. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._reason_file = folder / "reason"
        failure_reason.clear(self._reason_file)
        self._before = set(multiprocessing.active_children())
        self._process: BaseProcess | None = None
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once it has ended."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, connect: Callable[[], T], vllm_config: Any) -> T:
        """What `connect` constructs, which starts the core and blocks until that is ready.

        Raises: EngineDead when it has failed; `ended` says why.
        """
        with self._surrounded(vllm_config):
            constructing = asyncio.ensure_future(asyncio.to_thread(connect))
            try:
                found = await asyncio.shield(constructing)
            except asyncio.CancelledError:
                await self._give_up(constructing)
                raise
            except Exception as error:
                self.ended.set_result(self._reason(failure_reason.describe(error)))
                raise EngineDead("The engine's process has ended.") from error
        new = set(multiprocessing.active_children()) - self._before
        self._process = next(iter(new), None)
        if self._process is not None:
            self._loop.add_reader(self._process.sentinel, self._on_end)
        return found

    def kill(self) -> None:
        """Kills it and its descendants at once."""
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def announce_death(self) -> None:
        """Ends it: vLLM's front-end, which watches its core, then ends all requests."""
        self.kill()

    def reason(self) -> str | None:
        """Why it ended, as it recorded."""
        return failure_reason.read(self._reason_file)

    async def stop(self) -> None:
        """Waits for its end, which the front-end's shutdown has begun, and helps. Idempotent."""
        below = self._tree()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, _GRACE_S)
            self._loop.remove_reader(self._process.sentinel)
            self._process = None
        await asyncio.to_thread(tree.end, below, _WORKERS_S, _GRACE_S)

    def _tree(self) -> list[psutil.Process]:
        if self.pid is None:
            return []
        try:
            return [psutil.Process(self.pid), *tree.descendants(self.pid)]
        except psutil.NoSuchProcess:
            return []

    async def _give_up(self, constructing: asyncio.Future[Any]) -> None:
        """The constructor cannot be cancelled: it fails when its core is gone."""
        while not constructing.done():
            for child in set(multiprocessing.active_children()) - self._before:
                child.kill()
            await asyncio.wait({constructing}, timeout=0.1)
        if constructing.exception() is None:
            await asyncio.to_thread(constructing.result().shutdown)

    @contextmanager
    def _surrounded(self, vllm_config: Any) -> Generator[None]:
        """The environment that the core and its workers inherit: our plugin, and ports that are held."""
        before = dict(os.environ)
        with ExitStack() as held:
            ours = {plugin.OWNER: str(os.getpid()), failure_reason.ENVIRONMENT: str(self._reason_file)}
            os.environ.update(ours | kv_transfer.prepared(vllm_config, held))
            try:
                yield
            finally:
                for name in os.environ.keys() - before.keys():
                    del os.environ[name]

    def _reason(self, otherwise: str) -> str:
        logged = failure_reason.read(failure_reason.logged(self._reason_file))
        return self.reason() or logged or otherwise

    def _on_end(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        self._tell_end(self._process, _LOOKS)

    def _tell_end(self, process: BaseProcess, looks: int) -> None:
        """vLLM waits for the same process in a thread; until that has noted the exit code, there is none."""
        code = process.exitcode
        if code is None and looks:
            self._loop.call_later(_LOOK_S, self._tell_end, process, looks - 1)
        elif not self.ended.done():
            said = said_by(code) if code is not None else "its process has ended"
            self.ended.set_result(self.reason() or said)
