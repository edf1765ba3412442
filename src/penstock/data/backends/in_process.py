"""An engine in this process: rows reach its own HTTP application without a socket.

It stands between the window and one engine with its layers, and turns the engine's death into EngineDead for
whatever was in it. It names no engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from penstock import sources
from penstock.asgi import ASGIApp
from penstock.asgi_client import call
from penstock.data.backends.engine_config import with_usage_details
from penstock.data.backends.json_fields import with_fields
from penstock.data.backends.protocol import Response
from penstock.data.backends.queue_depth import QueueDepth
from penstock.data.rows.request import Request
from penstock.engine import Engine, Load, Progress, no_progress
from penstock.engines import engine_class
from penstock.errors import BadRequest, EngineDead, EngineStartFailed, Error, Unavailable
from penstock.hooks import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.hooks.context import authors_ask
from penstock.layers.adapters import Source, Store, asking_for
from penstock.layers.preprocessing import GENERATING, stand_in
from penstock.layers.stack import stacked
from penstock.openai.errors import form
from penstock.request_context import PreparedPrompt, prepared_prompt

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_STOPPED = "The engine was stopped."
_DYING_S = 0.3  # an error this close before the engine's death is the death's


class InProcessEngine:
    """One engine, made anew by `start` after each death."""

    def __init__(self, config: LLMConfig) -> None:
        self._config = with_usage_details(config)
        self._model: StartedEngine | None = None
        self._dead: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._open: set[asyncio.Task[Response]] = set()
        self._appetite = QueueDepth()

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: EngineStartFailed, also when `engine_start_timeout_s` has passed; ConfigError."""
        async with self._starting:
            if self._model is not None and self._dead is None:
                return
            await self._end()
            sources.use_fast_transfers()
            self._model = await StartedEngine.started(self._config, progress)
            self._dead, self._appetite = None, QueueDepth()
            self._watch = asyncio.create_task(self._until_dead(self._model))

    async def stop(self) -> None:
        async with self._starting:
            self._fail(_STOPPED)
            await self._end()
            self._dead = None

    async def send(self, request: Request) -> Response:
        if self._dead is not None:  # with no request in it, else somebody would have called `start`
            await self.start()
        if (model := self._model) is None:
            raise Unavailable("The engine is not running; call `start` first.")
        task = asyncio.create_task(self._answer(model, request))  # a context of its own
        self._open.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise EngineDead(self._dead or _STOPPED) from None  # by `_fail`; `stop` may be over already
        finally:
            self._open.discard(task)
            self._appetite.on_response(model.engine.load())

    def load(self) -> Load:
        return self._model.engine.load() if self._model is not None else Load()

    def available_slots(self, in_flight: int) -> int:
        return self._appetite.available_slots(self.load(), in_flight) if self._dead is None else 0

    async def _end(self) -> None:
        model, self._model = self._model, None
        if self._watch is not None:
            self._watch.cancel()
        if model is not None:
            await model.stop()

    async def _until_dead(self, model: StartedEngine) -> None:
        reason = await model.engine.wait_dead()
        log.error("The engine of model '%s' died: %s", self._config.model_id, reason)
        self._fail(f"The engine died: {reason.rstrip('.')}.")

    def _fail(self, why: str) -> None:
        """All that is open ends with EngineDead."""
        self._dead = self._dead or why
        for task in self._open:
            task.cancel()

    async def _answer(self, model: StartedEngine, request: Request) -> Response:
        try:
            headers, body = self._headers(request), self._body(request)
        except BadRequest as error:
            return Response(error.status, form(request.path).envelope(error))
        authors_ask.set(True)
        answer = await call(model.app, request.path, body, headers)
        try:
            whole = Response(answer.status, await answer.read())
        finally:
            await answer.body.aclose()
        if whole.status >= 500:
            await asyncio.sleep(_DYING_S)  # where it was a death, we are cancelled here
        return whole

    def _headers(self, request: Request) -> dict[str, str]:
        """Raises: BadRequest for an adapter where there are none."""
        own, named = self._config.model_id, request.model or ""
        if not named.startswith(f"{own}:"):
            return {}
        if self._config.lora_config is None:
            raise BadRequest(
                f"Model '{own}' takes no adapters: its config has no lora_config.", param="model"
            )
        return asking_for(named.removeprefix(f"{own}:"))

    def _body(self, request: Request) -> bytes:
        """Sets `prepared` for the running task where the row has a prompt for the engine.

        Raises: BadRequest where the endpoint takes none.
        """
        fields: dict[str, object] = {"model": request.model or self._config.model_id}
        if request.prompt is not None:
            if request.path not in GENERATING:
                raise BadRequest(
                    f"{request.path} takes no prompt for the engine; the input must be in the body."
                )
            ours = PreparedPrompt(pickle.loads(request.prompt))
            prepared_prompt.set(ours)
            fields |= stand_in(ours, request.path)
        return with_fields(request.body, fields)


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """One engine, and what to ask in its place. Whoever has it stops it."""

    engine: Engine
    app: ASGIApp
    adapters: Store | None

    @classmethod
    async def started(cls, config: LLMConfig, progress: Progress) -> StartedEngine:
        """Raises: EngineStartFailed, also after `engine_start_timeout_s`; ConfigError for a hook."""
        if ray.is_initialized():  # else workers that are Ray actors would start a cluster of their own
            os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        before, after = _hook(config, PREPROCESSOR), _hook(config, POSTPROCESSOR)
        engine = engine_class(config)(config)
        adapters = None
        if config.lora_config is not None:
            adapters = Store(engine, Source(config), config.lora_config)
        try:
            async with asyncio.timeout(config.engine_start_timeout_s):
                await engine.start(progress)
                if adapters is not None:
                    await _start(adapters, config)
            app = stacked(engine, config, adapters=adapters, preprocessor=before, postprocessor=after)
        except TimeoutError as error:
            await engine.stop()
            raise EngineStartFailed(
                f"The engine of model '{config.model_id}' was not ready after "
                f"{config.engine_start_timeout_s:g} s. Raise engine_start_timeout_s if it needs longer."
            ) from error
        except BaseException:
            await engine.stop()
            raise
        return cls(engine, app, adapters)

    async def stop(self) -> None:
        if self.adapters is not None:
            await self.adapters.stop()
        await self.engine.stop()


def _hook(config: LLMConfig, field: str) -> Hook | None:
    return None if getattr(config, field) is None else Hook(config, field)


async def _start(adapters: Store, config: LLMConfig) -> None:
    try:
        await adapters.start()
    except Error as error:
        sentence = f"Model '{config.model_id}' cannot start with its pinned adapters: {error}"
        raise EngineStartFailed(sentence) from error


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
