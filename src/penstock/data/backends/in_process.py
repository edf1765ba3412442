"""An engine in this process: rows reach its own HTTP application without a socket.

It stands between the window and one engine with its layers, and turns the engine's death into EngineDead for
whatever was in it. It names no engine.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock import sources
from penstock.asgi_client import call
from penstock.data.backends.json_fields import with_fields
from penstock.data.backends.protocol import Answer
from penstock.data.backends.queue_depth import Appetite
from penstock.data.backends.started_engine import Model
from penstock.data.rows.request import Kind, Request
from penstock.engine import Load, Prepared, Progress, prepared, silent
from penstock.errors import BadRequest, EngineDead, Unavailable
from penstock.hooks.context import authors_ask
from penstock.layers.adapters import asking_for
from penstock.layers.preprocessing import GENERATING, stand_in
from penstock.openai.errors import form

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_STOPPED = "The engine was stopped."
_DYING_S = 0.3  # an error this close before the engine's death is the death's
_TOLD = "enable_prompt_tokens_details"
_TELLING = ("vllm", "sim")  # engines that have that argument

_RUNNERS: Mapping[Kind, Mapping[str, str]] = {
    "generate": {},
    "embed": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
}
"""vLLM's arguments; by itself it runs a model that can generate for that only."""

_ADAPTERS = {"dynamic_lora_loading_path", "adapters"}
_HOOKS = ("preprocessor", "preprocessor_options", "postprocessor", "postprocessor_options")
_SIZES = frozenset(
    {
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)
"""Engine arguments that say how fast an engine answers, not what."""


class OwnEngine:
    """One engine, made anew by `start` after each death."""

    def __init__(self, config: LLMConfig) -> None:
        self._config = for_batch(config)
        self._model: Model | None = None
        self._dead: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._open: set[asyncio.Task[Answer]] = set()
        self._appetite = Appetite()

    async def start(self, progress: Progress = silent) -> None:
        """Raises: EngineStartFailed, also when `engine_start_timeout_s` has passed; ConfigError."""
        async with self._starting:
            if self._model is not None and self._dead is None:
                return
            await self._end()
            sources.use_fast_transfers()
            self._model = await Model.started(self._config, progress)
            self._dead, self._appetite = None, Appetite()
            self._watch = asyncio.create_task(self._until_dead(self._model))

    async def stop(self) -> None:
        async with self._starting:
            self._fail(_STOPPED)
            await self._end()
            self._dead = None

    async def ask(self, request: Request) -> Answer:
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
            self._appetite.answered(model.engine.load())

    def load(self) -> Load:
        return self._model.engine.load() if self._model is not None else Load()

    def room(self, in_flight: int) -> int:
        return self._appetite.room(self.load(), in_flight) if self._dead is None else 0

    async def _end(self) -> None:
        model, self._model = self._model, None
        if self._watch is not None:
            self._watch.cancel()
        if model is not None:
            await model.stop()

    async def _until_dead(self, model: Model) -> None:
        reason = await model.engine.wait_dead()
        log.error("The engine of model '%s' died: %s", self._config.model_id, reason)
        self._fail(f"The engine died: {reason.rstrip('.')}.")

    def _fail(self, why: str) -> None:
        """All that is open ends with EngineDead."""
        self._dead = self._dead or why
        for task in self._open:
            task.cancel()

    async def _answer(self, model: Model, request: Request) -> Answer:
        try:
            headers, body = self._headers(request), self._body(request)
        except BadRequest as error:
            return Answer(error.status, form(request.path).envelope(error))
        authors_ask.set(True)
        answer = await call(model.app, request.path, body, headers)
        try:
            whole = Answer(answer.status, await answer.read())
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
            ours = Prepared(pickle.loads(request.prompt))
            prepared.set(ours)
            fields |= stand_in(ours, request.path)
        return with_fields(request.body, fields)


def for_batch(config: LLMConfig) -> LLMConfig:
    """The same config, with what batch wants to know of every answer, unless the user says otherwise."""
    if config.engine_name not in _TELLING:
        return config
    return config.model_copy(update={"engine_kwargs": {_TOLD: True, **config.engine_kwargs}})


def for_task(config: LLMConfig, kind: Kind) -> LLMConfig:
    """The same config, so that vLLM runs the model for this task, unless the user says how."""
    kwargs = config.engine_kwargs
    if config.engine_name != "vllm" or kwargs.keys() & {"runner", "convert"}:
        return config
    return config.model_copy(update={"engine_kwargs": {**_RUNNERS[kind], **kwargs}})


def engine_identity(config: LLMConfig) -> dict[str, object]:
    """What of a config its answers depend on, as JSON can hold it: neither sizes nor places."""
    kwargs = config.engine_kwargs
    hooks = {name: getattr(config, name) for name in _HOOKS}
    return {
        "model": config.model_loading_config.model_dump(),
        "engine": config.engine_name,
        "adapters": config.lora_config and config.lora_config.model_dump(include=_ADAPTERS),
        "engine_kwargs": {name: str(value) for name, value in kwargs.items() if name not in _SIZES},
        **{name: str(getattr(hook, "__qualname__", hook)) for name, hook in hooks.items()},
    }


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
