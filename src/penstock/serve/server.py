"""One replica: one engine, its own listener, and the methods that handles call.

In the flow it stands between Serve, which starts, checks and stops it, and the engine. Bytes of HTTP requests
do not pass through here: they go from the gateway to the listener to the engine's app. It names no engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from penstock import lifeline, progress
from penstock.config import LLMConfig
from penstock.engine import Delta, Engine, Prompt
from penstock.engines import engine_class
from penstock.errors import EngineStartFailed
from penstock.serve import cluster
from penstock.serve.call import batched, call, events
from penstock.serve.gateway import Gateway
from penstock.serve.listener import Listener
from penstock.serve.standalone import Through, alone

if TYPE_CHECKING:
    from penstock.serve.openai_api_models import RawRequestInfo

log = logging.getLogger(__name__)

Request = BaseModel | Mapping[str, Any]
Answers = AsyncGenerator[Any, None]

_LAST_WORDS_S = 0.5  # after the engine's death, for error events to reach their clients


class _Constructed(type):
    """Makes `await LLMServer(config)` work in plain Python, as it does under Serve."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        async def construct() -> Any:
            instance: Any = object.__new__(cls)
            await instance.__init__(*args, **options)
            return instance

        return construct()


class LLMServer(metaclass=_Constructed):
    """Serves one model. Three ways to make one:

    `LLMServer.as_deployment().bind(config)` for Serve; `await LLMServer(config)`, started;
    `LLMServer.sync_init(config)` and `await server.start()`.
    """

    async def __init__(self, llm_config: LLMConfig, *, engine_cls: type[Engine] | None = None) -> None:
        """Starts the engine and, inside Serve, the listener.

        Raises: EngineStartFailed with the engine's own reason, or that its time limit passed.
        """
        self._prepare(llm_config, engine_cls)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: LLMConfig, *, engine_cls: type[Engine] | None = None) -> LLMServer:
        """A server that is not started: call `await server.start()`."""
        server = cls.__new__(cls)
        server._prepare(llm_config, engine_cls)
        return server

    def _prepare(self, llm_config: LLMConfig, engine_cls: type[Engine] | None) -> None:
        self._llm_config = llm_config
        self._listener: Listener | None = None
        self._watch: asyncio.Task[None] | None = None
        self._front: Gateway | None = None
        self.engine: Engine = (engine_cls or engine_class(llm_config))(llm_config)

    async def start(self) -> None:
        """Starts the engine within the config's time limit; inside a Serve replica, the listener too."""
        in_replica = _in_replica()
        if in_replica:
            lifeline.tie_to(os.getppid())  # a killed raylet leaves its workers running
            # Else an engine whose workers are Ray actors would start a cluster of its own.
            os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        await self._start_engine()
        if in_replica:
            await self._open_listener()
            self._watch = asyncio.create_task(self._exit_with_engine())
        progress.report(self._llm_config.model_id, progress.READY)

    async def _start_engine(self) -> None:
        model_id, limit_s = self._llm_config.model_id, self._llm_config.engine_start_timeout_s
        phase = "starting"

        def reached(name: str) -> None:
            nonlocal phase
            phase = name
            log.info("%s: %s", model_id, name)
            progress.report(model_id, name)

        try:
            await asyncio.wait_for(self.engine.start(reached), limit_s)
        except (TimeoutError, EngineStartFailed) as error:
            failure = error if isinstance(error, EngineStartFailed) else _too_slow(model_id, limit_s, phase)
            progress.report(model_id, progress.FAILED, str(failure))
            await self.engine.stop()
            raise failure from error

    async def _open_listener(self) -> None:
        context = ray.get_runtime_context()
        self._listener = await Listener.open(
            self.engine.app(),
            load=self.engine.load,
            node_id=context.get_node_id(),
            node_host=ray.util.get_node_ip_address(),
            info={
                "model_id": self._llm_config.model_id,
                "max_model_len": self.engine.max_model_len(),
                "kv_tokens": self.engine.kv_tokens(),
            },
            wait_dead=self.engine.wait_dead,
        )

    async def _exit_with_engine(self) -> None:
        """A replica without its engine is of no use: Serve starts a new one as soon as this process ends."""
        reason = await self.engine.wait_dead()
        log.error("The engine of model '%s' died: %s. The replica ends.", self._llm_config.model_id, reason)
        await asyncio.sleep(_LAST_WORDS_S)
        os._exit(1)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: what the replica publishes about itself."""
        return self._listener.address.to_metadata() if self._listener else {}

    async def listen_on_network(self) -> None:
        """Opens the listener to gateways on other nodes; they ask for it when they need it."""
        if self._listener:
            await self._listener.listen_on_network()

    async def __call__(self, request: HTTPRequest) -> Response:
        """Serve's hook, for HTTP to a model that is an application by itself: a gateway of its own."""
        if self._front is None:
            assert self._listener is not None
            self._front = await alone(self._llm_config, self._listener.address)
        return Through(self._front)

    # -- what handles call: each is awaited and gives an async generator, as users of ray.serve.llm know it

    async def chat(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ChatCompletionResponse`; with `stream`, lists of ready `data: {...}` events, errors too."""
        return self._ask("/v1/chat/completions", request, raw_request_info)

    async def completions(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `CompletionResponse`; with `stream`, lists of ready `data: {...}` events, errors too."""
        return self._ask("/v1/completions", request, raw_request_info)

    async def embeddings(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `EmbeddingResponse` or `ErrorResponse`."""
        return self._ask("/v1/embeddings", request, raw_request_info)

    async def score(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ScoreResponse` or `ErrorResponse`."""
        return self._ask("/v1/score", request, raw_request_info)

    async def tokenize(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `TokenizeResponse` or `ErrorResponse`."""
        return self._ask("/tokenize", request, raw_request_info)

    async def detokenize(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `DetokenizeResponse` or `ErrorResponse`."""
        return self._ask("/detokenize", request, raw_request_info)

    async def generate(
        self, prompt: Prompt, params: Mapping[str, Any] | None = None, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """The engine's own `generate`: the prompt reaches it untouched. Gives one `Delta` per engine step."""
        return self.engine.generate(prompt, params or {}, request_id=request_id)

    async def check_health(self) -> None:
        """Serve's hook. Raises: EngineDead when the engine must be restarted."""
        await self.engine.check_health()

    async def llm_config(self) -> LLMConfig:
        """The config that this server was made from."""
        return self._llm_config

    async def _ask(self, path: str, request: Request, raw: RawRequestInfo | None) -> Answers:
        from penstock.serve.openai_api_models import ANSWERS, ErrorResponse  # half a second, for handles only

        body = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else dict(request)
        reply = await call(self.engine.app(), path, msgspec.json.encode(body), raw.headers if raw else None)
        try:
            if "text/event-stream" in reply.headers.get("content-type", ""):
                interval_ms = self._llm_config.stream_batching_interval_ms
                async for batch in batched(events(reply.body), interval_ms):
                    yield batch
            elif reply.status < 400:
                yield ANSWERS[path].model_validate_json(await reply.read())
            else:
                error = ErrorResponse.model_validate_json(await reply.read())
                yield [error] if body.get("stream") else error
        finally:
            await reply.body.aclose()

    async def stop(self) -> None:
        """Finishes open streams within Serve's limit, then ends the engine; waits for no dead engine."""
        if self._watch:
            self._watch.cancel()
        if self._front:
            await self._front.close()
        if self._listener:
            await self._listener.drain(_drain_limit_s(self._llm_config))
            await self._listener.close()
        await self.engine.stop()

    def __del__(self) -> Any:
        """Serve's shutdown hook: Serve awaits what it returns. Outside of Serve, call `stop`."""
        return self.stop() if self.__dict__.get("_listener") else None

    # -- deployment

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Serve's options for this config: placement, actor resources, runtime environment."""
        return llm_config.get_serve_options(nodes=cluster.nodes(), default_runtime_env=cluster.runtime_env())

    @classmethod
    def as_deployment(cls, deployment_options: Mapping[str, Any] | None = None) -> Any:
        """A deployment to `.bind(llm_config)`; its options come from the config unless given here."""
        from penstock.serve.deployments import ModelDeployment

        return ModelDeployment(cls, dict(deployment_options or {}))


def _in_replica() -> bool:
    try:
        serve.get_replica_context()
    except Exception:  # Serve raises its own error outside a replica
        return False
    return True


def _too_slow(model_id: str, limit_s: float, phase: str) -> EngineStartFailed:
    return EngineStartFailed(
        f"The engine of model '{model_id}' was not ready after {limit_s:g} s (last phase: {phase}). "
        "Raise engine_start_timeout_s if the model needs longer to load."
    )


def _drain_limit_s(config: LLMConfig) -> float:
    """A second less than Serve's own limit, after which Serve kills the process."""
    limit_s = config.get_serve_options().get("graceful_shutdown_timeout_s", 20.0)
    return max(0.0, limit_s - 1.0)
