"""ProcessEngine: the Engine protocol over any child process that speaks OpenAI HTTP.

Requests pass the gate, then go by `wire` to the child. A sleeping engine has no child; its load is the
requests open here plus the child's own gauges when last read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.asgi import ASGIApp
from penstock.config.messages.problems import translated
from penstock.engine import Delta, Load, Progress, Prompt, no_progress, plain_name
from penstock.engine_control import EngineControl, PauseMode
from penstock.engines import foreign, peft
from penstock.engines.edge import Edge
from penstock.engines.prepared import prepared
from penstock.engines.process import completion, gauges, readiness
from penstock.engines.process.child import Child
from penstock.engines.process.gate import Gate
from penstock.engines.process.gauges import Gauges
from penstock.engines.process.options import ProcessOptions, filled
from penstock.engines.process.readiness import NotReady
from penstock.engines.process.relay import ModelNames, Relay
from penstock.engines.process.wire import BROKEN, Wire
from penstock.engines.watchdog import STUCK_S, Watchdog
from penstock.engines.weights import Broken
from penstock.errors import (
    AdapterBroken,
    BadRequest,
    EngineDead,
    EngineStartFailed,
    Error,
    Unavailable,
    Unsupported,
)
from penstock.on_thread import completed
from penstock.request_context import using_adapter

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_LOOK_LIMIT_S = 5.0
_HEALTH_LIMIT_S = 20.0
_RETRY_AFTER_S = 5.0


class _Cut(Unavailable):
    """The request was ended because the engine was put to sleep."""


class ProcessEngine(EngineControl):
    """One model in one child process. Its options are the config's `engine_kwargs`, see `ProcessOptions`.

    look_s: seconds between two looks at the child's load.
    """

    look_s = 0.5

    def __init__(self, config: LLMConfig) -> None:
        self._config = config
        with translated(ProcessOptions, config.location / "engine_kwargs"):
            self.options = ProcessOptions.model_validate(config.engine_kwargs)
        self._source = config.model_source
        self._child: Child | None = None
        self._wire: Wire | None = None
        self._gate = Gate()
        self._turn = asyncio.Lock()
        self._app = Edge(Relay(self), lambda: self._refusal)
        self._asleep = False
        self._refusal: str | None = None
        self._death = ""
        self._died = asyncio.Event()
        self._window: int | None = None
        self.is_vllm = False
        self._gauges: Gauges | None = None
        self._looking: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._adapters: dict[str, Path] = {}

    async def start(self, progress: Progress = no_progress) -> None:
        if self._child is not None or self._asleep:
            return
        self._refusal = None
        self._died.clear()
        config = await prepared(self._config, progress, fetch=self.options.wants_model)
        self._source = config.model_source
        async with self._turn:
            await self._run(progress)

    async def stop(self) -> None:
        self._refuse("The engine was stopped.")
        self._asleep = False
        await self._end()

    def app(self) -> ASGIApp:
        return self._app

    async def generate(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        if (adapter := adapter or using_adapter.get()) is not None and adapter not in self._adapters:
            raise peft.not_loaded(adapter)
        model = self.names(adapter).childs
        request = completion.body(model, prompt, self.sampling(params))
        completion.check_room(prompt, self._window)
        outputs = params.get("n")
        reading = completion.CompletionReader(outputs if isinstance(outputs, int) else 1)
        try:
            async with (
                self.at_work() as wire,
                aclosing(wire.events(completion.PATH, request, request_id or uuid.uuid4().hex)) as events,
            ):
                async for event in events:
                    for delta in reading.add(event):
                        yield delta
        except _Cut:
            last = reading.cut()
        except msgspec.DecodeError as error:
            log.exception("The child answered %s with what is no completion", completion.PATH)
            raise Error() from error
        else:
            last = reading.rest()
        for delta in last:
            yield delta

    def sampling(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of `generate` as the child's completions have them. Raises: BadRequest."""
        return params

    async def load_adapter(self, name: str, path: Path) -> None:
        if name in self._adapters:
            return
        try:
            await asyncio.to_thread(peft.check, path, sys.maxsize, {})
        except Broken as error:
            raise peft.refusal(name, str(error)) from error
        async with self.at_work() as wire:
            await self._load(wire, name, path)
        self._adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self._adapters.pop(name, None) is None:
            return
        async with self.at_work() as wire:
            status, body = await wire.post("/v1/unload_lora_adapter", {"lora_name": self.names(name).childs})
        if status >= 400:
            log.warning("The child does not unload adapter %s: %s", name, foreign.said(body)[0])

    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    async def check_health(self) -> None:
        """Also probes the child, unless the engine sleeps or wakes up."""
        self._refuse_dead()
        wire = self._wire
        if wire is None:
            return
        try:
            status, _ = await wire.get(self.options.ready_path, _HEALTH_LIMIT_S)
        except (*BROKEN, TimeoutError) as error:
            if wire is not self._wire:  # it was put to sleep meanwhile
                return
            raise EngineDead("The engine does not answer any more.") from error
        if status != 200:
            raise EngineDead(f"The engine answers {self.options.ready_path} with status {status}.")

    async def wait_dead(self) -> str:
        await self._died.wait()
        return self._death

    def load(self) -> Load:
        """Open requests are counted here; how many of them wait comes from the last read of the gauges."""
        inside, seen = self._gate.inside, self._gauges
        if seen is None or not inside:
            return Load(inside, self._gate.waiting)
        waiting = min(seen.waiting, inside)
        running = inside - waiting
        unseen = max(0, running - seen.running)
        waiting_tokens = seen.waiting_tokens if waiting else 0
        return Load(running, waiting + self._gate.waiting, waiting_tokens, seen.kv_usage, unseen)

    def kv_tokens(self) -> int | None:
        return self._gauges.kv_tokens if self._gauges is not None else None

    def max_model_len(self) -> int | None:
        return self._window

    @property
    def control(self) -> EngineControl:
        """The engine itself."""
        return self

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        """Ends the child, whatever the level."""
        if mode == "keep":
            raise BadRequest("Sleep ends the engine's process; mode is 'wait' or 'abort'.")
        async with self._turn:
            if self._asleep:
                return
            self._refuse_dead()
            self._gate.opened.clear()
            try:
                if mode == "wait":
                    await self._gate.empty.wait()
                self._refuse_dead()
            except BaseException:
                self._gate.opened.set()
                raise
            self._asleep = True
            await self._end()

    async def wakeup(self) -> None:
        async with self._turn:
            if not self._asleep:
                return
            await self._run(no_progress)
            self._asleep = False
            self._gate.opened.set()

    def is_sleeping(self) -> bool:
        return self._asleep

    # -- for the relay

    def names(self, adapter: str | None) -> ModelNames:
        """The names of the model, or of an adapter."""
        model_id = self._config.model_id
        childs = self.options.served_model_name or model_id
        if adapter is None:
            return ModelNames(model_id, childs, tuple(self._config.aliases))
        return ModelNames(f"{model_id}:{plain_name(adapter)}", f"{childs}:{adapter}")

    @asynccontextmanager
    async def at_work(self, *, waits: bool = True) -> AsyncGenerator[Wire]:
        """The connection to the child, for one request. waits: through a sleep; otherwise it is rejected
        then.

        Raises: EngineDead; Unavailable, also when sleep ends the request; Error when the child breaks it off.
        """
        if self._asleep and not waits:
            raise Unavailable("The engine is asleep.", retry_after_s=_RETRY_AFTER_S)
        async with self._gate.passed() if waits else nullcontext():
            self._refuse_dead()
            assert self._wire is not None
            try:
                yield self._wire
            except BROKEN as error:
                raise await self._breakage() from error

    # -- the child's life

    async def _run(self, progress: Progress) -> None:
        """Starts a child that has made a token. Raises: EngineStartFailed, leaving no child."""
        port = self.options.port or _free_port()
        try:
            await self._run_at(port, progress)
        except EngineStartFailed:
            if self.options.port or not _is_listening(port):
                raise
            log.warning("Another program took port %d before the engine did; it is started anew", port)
            await self._run_at(_free_port(), progress)

    async def _run_at(self, port: int, progress: Progress) -> None:
        options, api_key = self.options, secrets.token_urlsafe(32)
        values = {
            "api_key": api_key,
            "host": _HOST,
            "model": self._source,
            "model_id": self._config.model_id,
            "port": str(port),
            "python": sys.executable,
        }
        progress("load")
        command = [filled(word, values) for word in options.command]
        environment = {name: filled(text, values) for name, text in options.environment.items()}
        try:
            self._child = child = Child(command, environment, options.stop_grace_s)
        except OSError as error:
            raise EngineStartFailed(
                f"Model '{self._config.model_id}' cannot start: no process can be started "
                f"({error.strerror}); free memory, or end others."
            ) from error
        wire = Wire(_HOST, port, api_key)
        try:
            await readiness.unless_ended(child, self._ready(wire, progress))
        except BaseException as error:
            self._wire = wire
            await self._end()
            if isinstance(error, NotReady | Error):
                raise self._failed(str(error), child) from error
            raise
        self._wire = wire
        child.ended.add_done_callback(lambda ended: self._on_end(child, ended.result()))
        self._looking = asyncio.create_task(self._look(wire))
        self._guarding = asyncio.create_task(self._guard(child, wire))

    async def _ready(self, wire: Wire, progress: Progress) -> None:
        """Raises: NotReady."""
        await readiness.answer(wire, self.options.ready_path)
        name = self.names(None).childs
        if self.options.warm_up:
            progress("warm up")
            await readiness.token(wire, name)
        card = await readiness.card(wire, name)
        self._window = self.options.max_model_len or card.max_model_len
        self.is_vllm = card.owned_by == "vllm"
        self._gauges = await self._seen(wire)
        for adapter, path in tuple(self._adapters.items()):
            if adapter in self._adapters:  # else unloaded meanwhile
                await self._restore(wire, adapter, path)

    async def _end(self) -> None:
        """Ends the child and its open requests, also where the caller gives up."""
        await completed(self._end_child())

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        wire, self._wire = self._wire, None
        for task in (self._looking, self._guarding):
            if task is not None:
                task.cancel()
        self._looking = self._guarding = None
        if wire is not None:
            await wire.close()
        if child is not None:
            await child.stop()

    def _on_end(self, child: Child, why: str) -> None:
        """The engine's death, unless we ended the child."""
        if child is not self._child or self._refusal is not None:
            return
        self._refuse("The engine behind this replica is gone.")
        self._death = why
        self._died.set()

    async def _guard(self, child: Child, wire: Wire) -> None:
        """Kills a child that is stuck. Its progress is unknown, and a slow client may stall it: it only has
        to answer.
        """
        watchdog = Watchdog(
            lambda: child.pid,
            steps=lambda: 0,
            working=lambda: False,
            probe=lambda: wire.get(self.options.ready_path, STUCK_S),
        )
        reason = await watchdog.stalled()
        self._on_end(child, reason)
        await asyncio.to_thread(child.kill)

    def _refuse(self, sentence: str) -> None:
        self._refusal = self._refusal or sentence
        self._gate.opened.set()

    def _refuse_dead(self) -> None:
        if self._refusal is not None:
            raise EngineDead(self._refusal)
        if self._wire is None and not self._asleep:
            raise EngineDead("The engine is not running.")

    async def _breakage(self) -> Error:
        """The error that a broken connection means."""
        if self._child is not None:
            await asyncio.wait({self._child.ended}, timeout=readiness.DYING_S)
        if self._refusal is not None:
            return EngineDead(self._refusal)
        if self._asleep:
            return _Cut("The engine was put to sleep.", retry_after_s=_RETRY_AFTER_S)
        return Error("The engine broke off its answer.")

    def _failed(self, why: str, child: Child) -> EngineStartFailed:
        words = child.last_words()
        said = f" The last that it said:\n{words}" if words else ""
        return EngineStartFailed(f"Model '{self._config.model_id}' cannot start: {why.rstrip('.')}.{said}")

    async def _look(self, wire: Wire) -> None:
        """Reads the child's gauges periodically while requests are open."""
        while self._gauges is not None:
            if not self._gate.inside:  # load seen during earlier work says nothing about the next
                self._gauges = Gauges(0, 0, 0.0, self._gauges.kv_tokens)
                await self._gate.busy.wait()
            self._gauges = await self._seen(wire) or self._gauges
            await asyncio.sleep(self.look_s)

    async def _seen(self, wire: Wire) -> Gauges | None:
        try:
            status, text = await wire.get(self.options.metrics_path, _LOOK_LIMIT_S)
        except (*BROKEN, TimeoutError):
            return None
        return gauges.read(text.decode(errors="replace")) if status == 200 else None

    # -- adapters

    async def _restore(self, wire: Wire, name: str, path: Path) -> None:
        """Loads it into a new child. Forgets one that is refused: the others shall be served."""
        try:
            await self._load(wire, name, path)
        except AdapterBroken as error:
            log.error("%s", error)
            self._adapters.pop(name, None)

    async def _load(self, wire: Wire, name: str, path: Path) -> None:
        request = {"lora_name": self.names(name).childs, "lora_path": str(path)}
        status, body = await wire.post("/v1/load_lora_adapter", request)
        if status < 400:
            return
        if status in readiness.ABSENT:
            raise Unsupported(
                "The engine's process has no /v1/load_lora_adapter. vLLM's has it when its environment says "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        message = foreign.said(body)[0].replace(str(path), "it").split()
        raise peft.refusal(name, f"the engine says: {' '.join(message)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


def _is_listening(port: int) -> bool:
    """Whether a process listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((_HOST, port)) == 0
