"""An engine in this process, called through its HTTP application without a socket; and Ray's options of an
actor that holds one: the same for jobs and pipelines, so that neither shows a secret or forgets a resource.

Between the window and one engine with its layers. Requests that are in the engine when it dies fail with
EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from penstock import sources
from penstock.asgi import ASGIApp
from penstock.asgi_client import ask
from penstock.config.derive import names
from penstock.config.derive.accelerators import Nodes, accelerator_kind
from penstock.config.derive.placement import Placement, place
from penstock.config.derive.serve_options import runtime_env, without_secrets
from penstock.data.backends.engine_config import adapter_name, downloader, with_usage_details
from penstock.data.backends.limits import QueueDepth
from penstock.data.backends.protocol import Response, RowInterrupted
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine import Engine, Load, Progress, no_progress
from penstock.engines import engine_class
from penstock.errors import BadRequest, Error, Unavailable
from penstock.hooks.hook import POSTPROCESSOR, PREPROCESSOR, authors_ask
from penstock.layers.adapters import Source, Store, asking_for
from penstock.layers.preprocessing import GENERATING, stand_in
from penstock.layers.stack import make_hook, stacked, start_engine
from penstock.openai.errors import form
from penstock.request_context import (
    PreparedPrompt,
    TokensProbe,
    prepared_prompt,
    tier,
    tokens_before,
    tokens_so_far,
)
from penstock.tiers import FLEX
from penstock.transport import continuation
from penstock.transport.continuation import NOTHING_MADE, Made, Origin

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_STOPPED = "The engine was stopped."
_DEATH_GRACE_S = 0.3  # an error response so shortly before the engine's death is due to the death


class InProcessEngine:
    """One engine, restarted by `start` after each death."""

    def __init__(self, config: LLMConfig) -> None:
        self._config = with_usage_details(config)
        self._started: StartedEngine | None = None
        self._dead: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._requests: dict[asyncio.Task[Response], TokensProbe] = {}
        self._queue_depth = QueueDepth()

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: EngineStartFailed, also when `engine_start_timeout_s` has passed; ConfigError."""
        async with self._starting:
            if self._started is not None and self._dead is None:
                return
            await self._end()
            sources.use_fast_transfers()
            self._started = await StartedEngine.start(self._config, progress)
            self._dead, self._queue_depth = None, QueueDepth()
            self._watch = asyncio.create_task(self._watch_death(self._started))

    async def stop(self) -> None:
        async with self._starting:
            self._fail(_STOPPED)
            await self._end()
            self._dead = None

    async def send(self, request: RowRequest) -> Response:
        if self._dead is not None:  # it died without a request in it, or the window would have called `start`
            await self.start()
        if (started := self._started) is None:
            raise Unavailable("The engine is not running; call `start` first.")
        probe = TokensProbe()
        task = asyncio.create_task(self._call(started, request, probe))  # with its own context
        self._requests[task] = probe
        try:
            response = await task
            if task.cancelling():  # vLLM answers that as if its client had gone
                raise asyncio.CancelledError
            return response
        except asyncio.CancelledError:
            if (this := asyncio.current_task()) is not None and this.cancelling():
                raise
            error = RowInterrupted(self._dead or _STOPPED)  # by `_fail`; `stop` may be over already
            error.keep(_made(probe), request.made)
            raise error from None
        finally:
            del self._requests[task]
            self._queue_depth.on_response(started.engine.load())

    def load(self) -> Load:
        """The engine's."""
        return self._started.engine.load() if self._started is not None else Load()

    def available_slots(self, in_flight: int) -> int:
        return self._queue_depth.available_slots(self.load(), in_flight) if self._dead is None else 0

    async def _end(self) -> None:
        started, self._started = self._started, None
        if self._watch is not None:
            self._watch.cancel()
        if started is not None:
            await started.stop()

    async def _watch_death(self, started: StartedEngine) -> None:
        reason = await started.engine.wait_dead()
        log.error("The engine of model '%s' died: %s", self._config.model_id, reason)
        self._fail(f"The engine died: {reason.rstrip('.')}.")

    def _fail(self, why: str) -> None:
        """Fails all requests in the engine with RowInterrupted."""
        self._dead = self._dead or why
        for task, probe in self._requests.items():
            probe.ask()  # the engine's app forgets it when it is cancelled
            task.cancel()

    async def _call(self, started: StartedEngine, request: RowRequest, probe: TokensProbe) -> Response:
        tokens_so_far.set(probe)
        if request.made is not None:
            probe.adapter = Origin.from_header(request.made[0]).adapter
            tokens_before.set(continuation.tokens_of(request.made))
        try:
            headers, body = self._headers(request), self._body(request)
            authors_ask.set(True)
            tier.set(FLEX)  # as a replica's rows, it takes the engine's shorter way where there is one
            answer = await ask(started.app, request.path, body, headers)
            response = Response(answer.status, answer.body)
        except Error as error:
            response = Response(error.status, form(request.path).envelope(error))
        if response.status >= 500:
            await asyncio.sleep(_DEATH_GRACE_S)  # cancelled here when the engine dies
        return response

    def _headers(self, request: RowRequest) -> dict[str, str]:
        """Raises: BadRequest for an adapter of a model without adapters."""
        adapter = names.adapter_in(self._config, request.model or "")
        if not adapter:
            return {}
        if self._config.lora_config is None:
            raise BadRequest(
                f"Model '{self._config.model_id}' takes no adapters: its config has no lora_config.",
                param="model",
            )
        return asking_for(adapter_name(adapter, self._config.lora_config))

    def _body(self, request: RowRequest) -> bytes:
        """Sets `prepared_prompt` for the running task where the request has an engine prompt.

        Raises: BadRequest where the endpoint takes none.
        """
        fields: dict[str, object] = {"model": request.model or self._config.model_id}
        if request.prompt is not None:
            if request.path not in GENERATING:
                raise BadRequest(
                    f"{request.path} does not take an engine prompt; put the input into the body."
                )
            ours = PreparedPrompt(pickle.loads(request.prompt))
            prepared_prompt.set(ours)
            fields |= stand_in(ours, request.path)
        return with_fields(request.body, fields)


def _made(probe: TokensProbe) -> Made:
    """What the dead engine had made, for the next one."""
    groups = probe.since(0) if probe.adapter is not None else ()
    if not groups:
        return NOTHING_MADE
    return Origin("", "", 0, "", probe.adapter or "").to_header(), continuation.handed(groups)


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A running engine with what a replica has around it, too: adapters, and the user's hooks.

    app: the engine's application under these layers. The caller stops it.
    """

    engine: Engine
    app: ASGIApp
    adapters: Store | None

    @classmethod
    async def start(cls, config: LLMConfig, progress: Progress) -> StartedEngine:
        """Raises: EngineStartFailed, also after `engine_start_timeout_s`; ConfigError for a hook."""
        before, after = make_hook(config, PREPROCESSOR), make_hook(config, POSTPROCESSOR)
        engine = engine_class(config)(config)
        adapters = None
        if config.lora_config is not None:
            adapters = Store(engine, Source(config, downloader(config.lora_config)))
        try:
            with _cluster_named():
                await start_engine(engine, config, adapters, progress)
        except BaseException:
            if adapters is not None:
                await adapters.stop()
            raise
        app = stacked(engine, config, adapters=adapters, preprocessor=before, postprocessor=after)
        return cls(engine, app, adapters)

    async def stop(self) -> None:
        try:
            if self.adapters is not None:
                await self.adapters.stop()
        finally:
            await self.engine.stop()


@contextmanager
def _cluster_named() -> Generator[None]:
    """Names the cluster to the block's processes: an engine's workers on Ray would start another one.

    Not longer: the process may be a user's program, whose next `ray.init()` would look for this cluster.
    """
    if not ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        yield
        return
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)


def in_process_engine(config: LLMConfig) -> InProcessEngine:
    """Call it in the actor's process: sets the secret variables that the actor's options must not show."""
    _, secrets = without_secrets(runtime_env(config))
    os.environ.update(secrets)
    return InProcessEngine(config)


def actor_options(config: LLMConfig, placement: Placement) -> dict[str, Any]:
    """Ray options of the actor itself, without its placement group."""
    options = {name: value for name, value in placement.actor.items() if value not in (None, {}, [])}
    environment, _ = without_secrets(runtime_env(config))
    return {**options, "runtime_env": environment} if environment else options


def single_actor_options(config: LLMConfig, nodes: Nodes | None) -> dict[str, Any]:
    """Ray options of an actor without a placement group, for an engine on one node.

    An engine on CPU reserves no CPUs, unless the config says how many.
    """
    placement = place(config, nodes)
    options = actor_options(config, placement)
    given: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    if placement.bundles:
        whole = dict(placement.bundles[0])
        options |= {"num_gpus": whole.pop("GPU", 0), "num_cpus": whole.pop("CPU", 0)}
        if memory := whole.pop("memory", None):
            options["memory"] = memory
        if whole:
            options["resources"] = whole
    elif accelerator_kind(config, nodes) == "cpu" and given.get("num_cpus") is None:
        options["num_cpus"] = 0
    return {"num_gpus": 0, "num_cpus": 0, **options}
