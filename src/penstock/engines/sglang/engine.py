"""SGLangEngine: SGLang's own HTTP server as a child process, with its control endpoints.

Its process, relay, `generate` and sleep are `ProcessEngine`'s; load comes from its /v1/loads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config.messages.problems import translated
from penstock.engine import Progress
from penstock.engine_control import DEFAULT_WEIGHTS, PauseMode
from penstock.engines import foreign, peft, weights
from penstock.engines.edge import Edge
from penstock.engines.process import completion
from penstock.engines.process.engine import ProcessEngine
from penstock.engines.process.gauges import Gauges
from penstock.engines.process.readiness import NotReady
from penstock.engines.process.relay import Relay
from penstock.engines.process.wire import BROKEN, Wire
from penstock.engines.sglang import parameters, server
from penstock.engines.sglang.flags import SGLangOptions, as_process
from penstock.engines.sglang.front import SGLangFront
from penstock.errors import BadRequest, Conflict, ModelNotFound, Unsupported
from penstock.on_thread import completed
from penstock.request_context import using_adapter

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_LOOKS = 20
_LIMIT_S = 5.0
_PAUSES: Mapping[PauseMode, str] = {"wait": "in_place", "keep": "in_place", "abort": "abort"}
"""SGLang's modes. For "wait", the requests have ended before."""


class SGLangEngine(ProcessEngine):
    """One model in one SGLang server. `engine_kwargs` are its server arguments, see `SGLangOptions`."""

    look_s = 0.05

    def __init__(self, config: LLMConfig) -> None:
        with translated(SGLangOptions, config.location / "engine_kwargs"):
            options = SGLangOptions.model_validate(config.engine_kwargs)
        super().__init__(as_process(config, options))
        self._app = Edge(SGLangFront(Relay(self), self), lambda: self._refusal, heard=server.heard)
        self._with_adapters = config.lora_config is not None or options.arguments().get("enable_lora") is True
        self._seeds = options.arguments().get("enable_deterministic_inference") is True
        self._known: dict[str, frozenset[str]] = {}
        self._paused = False
        self._weights: tuple[Path, str] | None = None
        log.info(
            "SGLang has no calls to workers, no partial wake-up and no stored responses, and %s seeds.",
            "obeys" if self._seeds else "without enable_deterministic_inference refuses",
        )

    def sampling(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.obeyed(completion.PATH, params)

    # -- control

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        """As its base; what is paused goes on until it ends."""
        goes_on = self._paused and mode == "wait" and not self._asleep
        try:
            if goes_on:
                await self._order("/continue_generation", {})
            await super().sleep(level, mode)
        except BaseException:
            if goes_on:
                await self._order("/pause_generation", {"mode": "in_place"})
            raise

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        async with self._turn:
            if self._paused:
                return
            if self._asleep:
                self._paused = True
                return
            try:
                if mode == "wait":
                    self._gate.opened.clear()
                    await self._gate.empty.wait()
                await completed(self._halt("retract" if clear_cache and mode == "keep" else _PAUSES[mode]))
            finally:
                self._gate.opened.set()
        if clear_cache:
            await self.reset_prefix_cache()

    async def _halt(self, word: str) -> None:
        await self._order("/pause_generation", {"mode": word})
        self._paused = True

    async def resume(self) -> None:
        async with self._turn:
            if self._paused and not self._asleep:
                await self._order("/continue_generation", {})
            self._paused = False

    def is_paused(self) -> bool:
        return self._paused

    async def reset_prefix_cache(self) -> None:
        if self._asleep:
            return  # and has none
        try:
            await self._order("/flush_cache", {})
        except BadRequest as error:
            raise Conflict("Requests use the cache. Pause with mode 'wait' or 'abort' before.") from error

    async def start_profile(self) -> None:
        """SGLang writes it where SGLANG_TORCH_PROFILER_DIR says."""
        await self._order("/start_profile", {})

    async def stop_profile(self) -> None:
        await self._order("/stop_profile", {})

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        if not await asyncio.to_thread(source.is_dir):  # SGLang would look for it on the hub
            raise BadRequest(f"There is no folder {source} with weights.")
        async with self._turn:
            if self._asleep:
                await self._take_when_awake(source, version)
            else:
                await completed(self._take(source, version, mode))  # SGLang goes on with what it has begun

    async def _take(self, source: Path, version: str, mode: PauseMode) -> None:
        retracted = mode == "keep" or self._paused
        if retracted:
            await self._order("/pause_generation", {"mode": "retract"})
        try:
            await self._order("/update_weights_from_disk", _update(source, version, mode))
            self._weights = source, version
        except BadRequest as error:
            why = str(error).replace(str(source), "it")
            raise BadRequest(f"The weights cannot be taken; SGLang says: {why}") from error
        finally:
            if retracted and not self._paused:
                await self._order("/continue_generation", {})

    async def _take_when_awake(self, source: Path, version: str) -> None:
        """The new process loads them before it answers. Raises: BadRequest for files it could not read."""
        try:
            await asyncio.to_thread(weights.check, source)
        except weights.Broken as error:
            raise BadRequest(f"The weights cannot be taken: {error}.", param="source") from error
        self._weights = source, version

    def weights_version(self) -> str:
        return self._weights[1] if self._weights else DEFAULT_WEIGHTS

    async def _order(self, path: str, value: Mapping[str, Any]) -> None:
        """Raises: BadRequest with what SGLang says; Conflict while it sleeps; Error when it fails."""
        self._refuse_dead()
        if self._wire is None:
            raise Conflict("The engine is asleep; wake it up first.")
        try:
            status, body = await self._wire.post(path, value)
        except BROKEN as error:
            raise await self._breakage() from error
        if status >= 400:
            log.warning("SGLang answered %s with status %d: %s", path, status, _message(body))
            raise BadRequest(_message(body)) if status == 400 else server.heard(body, status)

    # -- for the front

    def obeyed(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request to `path` under SGLang's names. Raises: BadRequest, EngineDead."""
        self._refuse_dead()
        return parameters.in_body(fields, self._known[path], seeds=self._seeds)

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request for `model` is for. Raises: ModelNotFound."""
        own = (self._config.model_id, *self._config.aliases)
        if (using := using_adapter.get()) is not None or model in own:
            return using
        name = model.removeprefix(f"{self._config.model_id}:")
        if name not in self._adapters:
            raise ModelNotFound(f"The model '{model}' does not exist.", param="model")
        return name

    async def abort(self, ids: list[str]) -> None:
        """Aborts requests in SGLang, which notices a disconnect late when it does not stream."""
        for rid in ids:
            with suppress(*BROKEN):
                if self._wire is not None:
                    await self._wire.post("/abort_request", {"rid": rid})

    async def ask(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's answer to a request that makes no tokens. Raises: Error."""
        async with self.at_work() as wire:
            status, body = await wire.post(path, fields)
        if status != 200:
            raise server.heard(body, status)
        return msgspec.json.decode(body, type=dict[str, Any])

    async def metrics(self) -> bytes:
        """Prometheus text."""
        async with self.at_work(waits=False) as wire:
            seen = await self._seen(wire)
            for _ in range(_LOOKS):  # a step's tokens come before its counts, also before an abort's
                if seen is None or seen.running + seen.waiting == self._gate.inside:
                    break
                await asyncio.sleep(self.look_s / _LOOKS)
                seen = await self._seen(wire)
            _, text = await wire.get("/metrics", _LIMIT_S)
        return server.exposition(text.decode(), self.names(None), seen or Gauges(0, 0)).encode()

    # -- of its process

    async def _ready(self, wire: Wire, progress: Progress) -> None:
        """As its base; then as it was before a sleep. Raises: NotReady."""
        await super()._ready(wire, progress)
        await server.warn_of_another_version(wire)
        self._known = await server.fields(wire)
        for path, value in self._before():
            status, body = await wire.post(path, value)
            if status >= 400:
                raise NotReady(f"it answered {path} with status {status}: {foreign.said(body)[0]}")

    def _before(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Requests that restore the last process's state in a new one."""
        loads = [("/update_weights_from_disk", _update(*self._weights, "wait"))] if self._weights else []
        return [*loads, *([("/pause_generation", {"mode": "in_place"})] if self._paused else [])]

    async def _seen(self, wire: Wire) -> Gauges | None:
        return await server.load(wire)

    async def _load(self, wire: Wire, name: str, path: Path) -> None:
        if not self._with_adapters:
            raise Unsupported(peft.NO_ROOM)
        status, body = await wire.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if status >= 400:
            why = " ".join(_message(body).replace(str(path), "it").split())
            raise peft.refusal(name, f"SGLang says: {why}")

    async def unload_adapter(self, name: str) -> None:
        if self._adapters.pop(name, None) is not None and not self._asleep:
            await self._order("/unload_lora_adapter", {"lora_name": name})


def _update(source: Path, version: str, mode: PauseMode) -> Mapping[str, Any]:
    return {"model_path": str(source), "weight_version": version, "abort_all_requests": mode == "abort"}


def _message(body: bytes) -> str:
    """The message of a failed operation; SGLang's are JSON of two forms, or text."""
    if not body.startswith(b"{"):
        return body.decode(errors="replace").strip()
    said: dict[str, Any] = msgspec.json.decode(body)
    return str(said.get("error_message") or foreign.said(body)[0])
