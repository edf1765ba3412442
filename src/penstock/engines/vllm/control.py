"""Controls a running vLLM: sleep, pause, caches, profiles, worker calls, new weights.

vLLM's own sleep mode frees GPU memory and must be enabled (`enable_sleep_mode`); there is none on CPU.
Without it, a sleeping engine has no core: the front-end stays with all its state, and waking up starts a new
core behind it. Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine_control import PARTS, EngineControl, PauseMode
from penstock.engines import weights
from penstock.engines.vllm import errors
from penstock.engines.vllm.adapters import LoadedAdapters
from penstock.engines.vllm.core import failure_reason
from penstock.engines.vllm.frontend.gated_llm import GatedLLM
from penstock.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EngineStartFailed,
    Unsupported,
)
from penstock.on_thread import completed

log = logging.getLogger(__name__)

_LOOK_S = 0.02


@dataclass(eq=False)
class VLLMControl(EngineControl):
    """Controls one started engine. Operations run one after another."""

    _llm: GatedLLM
    _adapters: LoadedAdapters | None
    _refuse_dead: Callable[[], None]
    _end_core: Callable[[], Awaitable[None]]
    _begin_core: Callable[[], Awaitable[None]]
    _calls: set[asyncio.Future[list[Any]]] = field(default_factory=set[asyncio.Future[list[Any]]])
    """Of the core's workers, under way; each may take as long as it likes."""
    _level: int = 0
    _awake: frozenset[str] = frozenset()
    """Parts that are awake while the engine sleeps."""
    _weights: Path | None = None
    _paused: bool = False

    def is_sleeping(self) -> bool:
        return self._level > 0

    def is_paused(self) -> bool:
        return self._paused

    def is_resting(self) -> bool:
        """Whether the engine need not make any step: it is paused, or its workers are busy with a call."""
        return self._paused or bool(self._calls)

    def weights_version(self) -> str:
        return self._llm.weights

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        if mode == "keep":
            raise BadRequest("What a sleeping engine held is gone: mode is 'wait' or 'abort'.", param="mode")
        if level not in (1, 2):
            raise BadRequest(f"The level of sleep is 1 or 2, not {level}.", param="level")
        self._refuse_in_gang("sleep")
        async with self._llm.sleep_lock:
            self._refuse_dead()
            if self.is_sleeping():
                return
            self._llm.gate.clear()
            try:
                await self._empty(mode)
                await completed(self._free(level))  # a core goes on with what it has begun
            except BaseException:
                if not self.is_sleeping():
                    await self._go_on()
                raise

    async def _empty(self, mode: PauseMode) -> None:
        """Returns when no request is in the engine; new ones wait at the gate."""
        if mode == "abort":
            await self._llm.pause_generation(mode="abort")
        elif self._paused:
            await self._llm.resume_generation()  # paused requests could never finish
        while self._llm.entering or self._llm.get_num_unfinished_requests():  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(_LOOK_S)

    async def _go_on(self) -> None:
        """Resumes and opens the gate, as before a sleep or a pause that was not completed."""
        if self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._llm.resume_generation()
        self._llm.gate.set()

    async def _free(self, level: int) -> None:
        if self._has_sleep_mode():
            await self._llm.sleep(level, mode="abort")
            self._level = level
        else:
            await self._llm.renderer.clear_mm_cache_async()  # it relies on the core's state
            self._level = level  # whatever its end raises
            await self._end_core()

    async def wakeup(self) -> None:
        await self.wakeup_parts(PARTS)

    async def wakeup_parts(self, parts: Collection[str]) -> None:
        self._refuse_dead()
        async with self._llm.sleep_lock:
            if self.is_sleeping():
                await self._wake(PARTS.intersection(parts) - self._awake)

    async def _wake(self, parts: frozenset[str]) -> None:
        if self._has_sleep_mode():
            await self._return_memory(parts)
        elif parts and not self._awake:
            await self._begin_core()
            await self._restore_or_end()
        self._awake |= parts
        if self._awake == PARTS:
            await completed(self._begin_again())  # else it would count as asleep, with all of its memory

    async def _begin_again(self) -> None:
        await self._restore_adapters()
        if self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        self._level, self._awake = 0, frozenset[str]()
        self._llm.gate.set()

    async def _return_memory(self, parts: frozenset[str]) -> None:
        """By vLLM's sleep mode; of level 2, with the weights' contents."""
        for part in (part for part in ("weights", "kv_cache") if part in parts):
            await self._llm.wake_up(tags=[part])
            if part == "weights" and self._level == 2:
                await self._load(self._weights)
                if self._weights is not None:
                    await self._llm.update_weight_version(self._llm.weights)

    async def _restore_or_end(self) -> None:
        """Gives a new core the last one's weights, or ends it. Raises: EngineStartFailed."""
        try:
            await self._answering()
            if self._weights is not None:
                await self._load(self._weights)
                await self._llm.update_weight_version(self._llm.weights)
        except BaseException as error:
            await self._end_core()
            if not isinstance(error, Exception):
                raise
            raise EngineStartFailed(
                f"The engine cannot wake up as it was: {failure_reason.describe(error).rstrip('.')}."
            ) from error

    async def _answering(self) -> None:
        """Retries until a new core answers: what is sent before it has connected is lost."""
        probes: set[asyncio.Task[bool]] = set()
        try:
            while not any(task.done() for task in probes):
                probes.add(asyncio.create_task(self._llm.is_paused()))
                await asyncio.wait(probes, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in probes:
                task.cancel()

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        self._refuse_in_gang("pause")
        async with self._llm.sleep_lock:
            self._refuse_dead()
            if not self.is_sleeping():
                try:
                    await self._hold(mode, clear_cache)
                except BaseException:
                    await self._go_on()
                    raise
            self._paused = True

    async def _hold(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stops generating; new requests wait. With 'keep' they wait in vLLM's core, else at the gate: vLLM
        0.33 would answer them with 503.
        """
        if mode != "keep":
            self._llm.gate.clear()
            while self._llm.entering:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(_LOOK_S)
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        self._refuse_dead()
        async with self._llm.sleep_lock:
            if self._paused and not self.is_sleeping():
                await self._llm.resume_generation()
                self._llm.gate.set()
            self._paused = False

    async def reset_prefix_cache(self) -> None:
        self._refuse_dead()
        if not self.is_sleeping() and not await self._llm.reset_prefix_cache():
            raise Conflict("Requests use the cache. Pause with mode 'wait' or 'abort' before.")

    async def start_profile(self) -> None:
        self._refuse_without_profiler()
        await self._llm.start_profile()

    async def stop_profile(self) -> None:
        self._refuse_without_profiler()
        await self._llm.stop_profile()

    def _refuse_without_profiler(self) -> None:
        self._refuse_asleep()
        if self._llm.vllm_config.profiler_config.profiler is None:
            raise Unsupported(
                "This engine was started without a profiler. Set profiler_config in engine_kwargs, "
                "for example {profiler: torch, torch_profiler_dir: /tmp/traces}."
            )

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._refuse_asleep()
        try:
            async with asyncio.timeout(timeout):
                return await self._on_workers(method, timeout, tuple(args), dict(kwargs or {}))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"The workers have not answered '{method}' within {timeout:g} s; what they began goes on."
            ) from error
        except Exception as error:
            errors.reraise_unless_refused(error)
            raise BadRequest(
                f"The workers refused '{method}': {_last_line(error)}", param="method"
            ) from error

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        self._refuse_dead()
        self._refuse_in_gang("take other weights")
        await asyncio.to_thread(_check_weights, source, Path(self._llm.model_config.model))
        async with self._llm.sleep_lock:
            self._refuse_dead()
            if self._has_no_weights():
                self._weights, self._llm.weights = source, version
                self._level = 2  # those that it has kept are the old ones
                return
            try:
                if not self.is_sleeping():
                    kept = self._paused and mode == "wait"  # a pause holds what runs
                    await self._hold("keep" if kept else mode, clear_cache=True)
                await completed(self._replace(source, version))  # workers go on with what they have begun
            finally:
                if not (self._paused or self.is_sleeping()):
                    await self._llm.resume_generation()
                    self._llm.gate.set()

    async def _replace(self, source: Path, version: str) -> None:
        try:
            await self._load(source)
        except Exception as error:
            errors.reraise_unless_refused(error)
            log.exception("The weights in %s could not be loaded; back to those before.", source)
            await self._load(self._weights)
            raise BadRequest(f"The weights in {source} cannot be loaded: {_last_line(error)}") from error
        finally:
            await self._llm.reset_prefix_cache()
            await self._restore_adapters()  # taking weights drops them
        self._weights, self._llm.weights = source, version
        await self._llm.update_weight_version(version)

    async def _load(self, source: Path | None) -> None:
        """None: the weights that the engine started with."""
        path = str(source) if source is not None else self._llm.model_config.model
        await self._on_workers("reload_weights", kwargs={"weights_path": path})

    async def _on_workers(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What the workers return. When this is cancelled, the call is still under way there."""
        call = asyncio.ensure_future(self._llm.collective_rpc(*args, **kwargs))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        await asyncio.wait({call})
        return call.result()

    def _has_sleep_mode(self) -> bool:
        return bool(self._llm.model_config.enable_sleep_mode)

    async def _restore_adapters(self) -> None:
        if self._adapters is not None:
            await self._adapters.restore()

    def _refuse_in_gang(self, what: str) -> None:
        """Cores of a gang stop together or not at all: one that is stopped alone waits for the others."""
        if self._llm.vllm_config.parallel_config.data_parallel_size > 1:
            raise Unsupported(
                f"An engine of a gang cannot {what} alone, as the others compute with it. "
                "Deploy the change as a second application and shift the model to it."
            )

    def _has_no_weights(self) -> bool:
        return self.is_sleeping() and "weights" not in self._awake

    def _refuse_asleep(self) -> None:
        self._refuse_dead()
        if self._has_no_weights():
            raise Conflict("The engine is asleep; wake it up before.")


def _check_weights(source: Path, current: Path) -> None:
    """vLLM would notice only after it has begun to overwrite the current weights."""
    if not any(source.glob("*.safetensors")):
        raise BadRequest(
            f"There are no weights in {source}: no folder with .safetensors files.", param="source"
        )
    try:
        found, wanted = weights.shapes_in(source), weights.shapes_in(current)
    except weights.Broken as error:
        raise BadRequest(f"The weights in {source} cannot be read: {error}.", param="source") from error
    for name, shape in wanted.items():
        if found.get(name) != shape:
            fault = f"has the shape {found[name]}, not {shape}" if name in found else "is missing"
            raise BadRequest(
                f"The weights in {source} are not of this model: '{name}' {fault}.", param="source"
            )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:500] if lines else type(error).__name__
