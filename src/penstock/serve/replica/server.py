"""One replica: one engine, its own listener, and the methods that handles call.

In the flow it stands between Serve, which starts, checks and stops it, and the engine. Bytes of HTTP requests
do not pass through here: they go from the gateway to the listener to the engine's app. It names no engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from penstock import autoscaling, lifeline, progress
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.asgi_client import batched, call, events
from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.placement import gang_size
from penstock.engine import HOST, Delta, Engine, Prompt
from penstock.engines import engine_class
from penstock.errors import BadRequest, ConfigError, EngineStartFailed, Error
from penstock.hooks import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.layers.adapters import Source, Store, asking_for
from penstock.layers.adapters.source import Downloader
from penstock.layers.hooks import Asked
from penstock.layers.stack import stacked
from penstock.openai.errors import form
from penstock.request_context import current_replica, gang
from penstock.serve.control import deployment
from penstock.serve.control.state import Group, News, Outcome, Told
from penstock.serve.fleet.membership import ADAPTERS
from penstock.serve.replica import environment, multipart, ray_cluster
from penstock.serve.replica.custom_endpoints import OwnEndpoints, paths
from penstock.serve.replica.gang import Line, join
from penstock.serve.replica.guard import Facts
from penstock.serve.replica.handle_control import Operated
from penstock.serve.replica.listener import Listener
from penstock.serve.replica.prefill_client import Prefillers
from penstock.serve.replica.preprocessor import Remote
from penstock.serve.replica.reconciler import Steward
from penstock.serve.replica.single_model import Front, Through
from penstock.transport import headers, link

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


class LLMServer(Operated, metaclass=_Constructed):
    """Serves one model. Three ways to make one:

    `LLMServer.as_deployment().bind(config)` for Serve; `await LLMServer(config)`, started;
    `LLMServer.sync_init(config)` and `await server.start()`.
    """

    async def __init__(
        self,
        llm_config: LLMConfig,
        *,
        engine_cls: type[Engine] | None = None,
        model_downloader: type[Downloader] | None = None,
        preprocessor: DeploymentHandle[Any] | None = None,
        prefill: DeploymentHandle[Any] | None = None,
        role: str = "",
        gateway: GatewayConfig | None = None,
    ) -> None:
        """Starts the engine and, inside Serve, the listener.

        model_downloader: fetches adapters, instead of by the sources of `lora_config`. preprocessor: the
        config's, where it is a deployment of its own. prefill: the replicas that compute long prompts for
        this one. role: what this one is there for, as its status shows. gateway: of HTTP to this model where
        it is an application by itself.
        Raises: EngineStartFailed with the engine's own reason, or that its time limit passed.
        """
        self._prepare(llm_config, engine_cls, model_downloader)
        if preprocessor is not None:
            self._preprocessor = Remote(preprocessor, llm_config)
        self._prefill_handle = prefill
        self._gateway_config = gateway
        self.steward.role = role
        await self.start()

    @classmethod
    def sync_init(
        cls,
        llm_config: LLMConfig,
        *,
        engine_cls: type[Engine] | None = None,
        model_downloader: type[Downloader] | None = None,
    ) -> LLMServer:
        """A server that is not started: call `await server.start()`."""
        server = cls.__new__(cls)
        server._prepare(llm_config, engine_cls, model_downloader)
        return server

    def _prepare(
        self, llm_config: LLMConfig, engine_cls: type[Engine] | None, downloader: type[Downloader] | None
    ) -> None:
        self._llm_config = llm_config
        self._listener: Listener | None = None
        self._watch: asyncio.Task[None] | None = None
        self._bound: asyncio.Task[None] | None = None
        self._line: Line | None = None
        self._gateway_config: GatewayConfig | None = None
        self._front: asyncio.Task[Front] | None = None
        self._layers: ASGIApp | None = None
        self._preprocessor: Asked | None = None
        self._postprocessor: Hook | None = None
        self._prefill_handle: DeploymentHandle[Any] | None = None
        self._prefillers: Prefillers | None = None
        self._id = secrets.token_hex(8)
        self._control: Any = None
        self._following: asyncio.Task[None] | None = None
        self.engine: Engine = (engine_cls or engine_class(llm_config))(llm_config)
        turns = llm_config.on_demand
        group = Group(turns.group, turns.awake, turns.min_awake_s) if turns is not None else None
        self.steward = Steward(self.engine, self._start_engine, self._tell_links, self._id, group)
        self._adapters: Store | None = None
        if llm_config.lora_config is not None:
            source = Source(llm_config, downloader)
            self._adapters = Store(self.engine, source, llm_config.lora_config, self._tell_links)

    async def start(self) -> None:
        """Starts the engine within the config's time limit; inside a Serve replica, the listener too."""
        in_replica = _in_replica()
        if in_replica:
            lifeline.tie_to(os.getppid())  # a killed raylet leaves its workers running
            # Else an engine whose workers are Ray actors would start a cluster of its own.
            os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
            os.environ[HOST] = ray.util.get_node_ip_address()
            environment.enter(self._llm_config)
            self._control = await asyncio.to_thread(deployment.find)
        self._make_hooks()
        if in_replica and gang_size(self._llm_config) > 1:
            self._line = join(self._llm_config.model_id)
            self._bound = asyncio.create_task(self._exit_with_gang(self._line))
        await self.steward.start(self._follow if self._control else None)
        if self._prefill_handle is not None:
            node_id = ray.get_runtime_context().get_node_id()
            self._prefillers = Prefillers(
                self._llm_config,
                self._prefill_handle,
                self._engine_app,
                self.steward.weights_version,
                node_id,
            )
            await self._prefillers.start()
        if in_replica:
            await self._open_listener()
            self._watch = asyncio.create_task(self._exit_with_engine())
        if self._control:
            self._following = asyncio.create_task(self.steward.follow(self._follow, self._done))
        progress.report(self._llm_config.model_id, progress.READY)

    async def _follow(self, told: Told, wait_s: float) -> News:
        return await self._control.follow.remote(self._llm_config.model_id, told, wait_s)

    async def _done(self, order: int, outcome: Outcome) -> None:
        await self._control.done.remote(order, self._id, outcome)

    def _make_hooks(self) -> None:
        """The user's own code, before the engine: what cannot be made is known at once."""
        config = self._llm_config
        try:
            if config.preprocessor is not None and self._preprocessor is None:
                self._preprocessor = Hook(config, PREPROCESSOR)
            if config.postprocessor is not None:
                self._postprocessor = Hook(config, POSTPROCESSOR)
        except ConfigError as error:
            progress.report(config.model_id, progress.FAILED, str(error))
            raise

    async def _start_engine(self) -> None:
        model_id, limit_s = self._llm_config.model_id, self._llm_config.engine_start_timeout_s
        phase = "starting"

        def reached(name: str) -> None:
            nonlocal phase
            phase = name
            log.info("%s: %s", model_id, name)
            progress.report(model_id, name)

        gang.set(self._line.gang if self._line else None)
        try:
            async with asyncio.timeout(limit_s):
                await self.engine.start(reached)
                if self._adapters:
                    await self._start_adapters(self._adapters)
        except (TimeoutError, EngineStartFailed) as error:
            failure = error if isinstance(error, EngineStartFailed) else _too_slow(model_id, limit_s, phase)
            progress.report(model_id, progress.FAILED, str(failure))
            await self.engine.stop()
            raise failure from error

    async def _start_adapters(self, adapters: Store) -> None:
        try:
            await adapters.start()
        except Error as error:
            sentence = f"Model '{self._llm_config.model_id}' cannot start with its pinned adapters: {error}"
            raise EngineStartFailed(sentence) from error

    async def _open_listener(self) -> None:
        context = ray.get_runtime_context()
        self._listener = await Listener.open(
            self._answer,
            Facts(
                load=self.engine.load,
                hello=self._hello,
                state=self._state,
                weights=self.steward.weights_version,
                adapters=self._adapters,
            ),
            node_id=context.get_node_id(),
            node_host=ray.util.get_node_ip_address(),
            replica_id=self._id,
            wait_dead=self.engine.wait_dead,
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For the listener: a replica may be there before its engine is."""
        await self.steward.begun.wait()
        self.steward.asked()
        await self._app()(scope, receive, send)

    async def _engine_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's own app, without what stands before it."""
        await self.steward.begun.wait()
        await self.engine.app()(scope, receive, send)

    def _hello(self) -> link.Hello:
        return link.hello(self._llm_config.model_id, self.engine.max_model_len(), self.engine.kv_tokens())

    def _state(self) -> link.State:
        actual = self.steward.actual
        return "asleep" if actual == "starting" else actual

    def _tell_links(self) -> None:
        if self._listener:
            self._listener.tell()

    def _app(self) -> ASGIApp:
        """What the listener and the methods below ask: the engine's app, and what stands before it."""
        if self._layers is None:
            app = stacked(
                self.engine,
                self._llm_config,
                adapters=self._adapters,
                preprocessor=self._preprocessor,
                postprocessor=self._postprocessor,
                prefill=self._prefillers.ask if self._prefillers else None,
            )
            self._layers = OwnEndpoints(app, self, self._llm_config) if paths(type(self)) else app
        return self._layers

    async def _exit_with_engine(self) -> None:
        """A replica without its engine is of no use: Serve starts a new one as soon as this process ends."""
        reason = await self.engine.wait_dead()
        log.error("The engine of model '%s' died: %s. The replica ends.", self._llm_config.model_id, reason)
        if self._line:
            self._line.close()
        await asyncio.sleep(_LAST_WORDS_S)
        os._exit(1)

    async def _exit_with_gang(self, line: Line) -> None:
        """Its engine would wait for the others for ever; Serve starts them all anew."""
        await line.broken()
        log.error("Another replica of this gang of '%s' is gone. This one ends.", self._llm_config.model_id)
        os._exit(1)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: what the replica publishes about itself."""
        return self._listener.address.to_metadata() if self._listener else {}

    def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook: where calls by handle that name an adapter should go."""
        return {ADAPTERS: list(self._adapters.loaded())} if self._adapters else {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what our autoscaling policy decides by."""
        load = self.engine.load()
        return {
            autoscaling.RUNNING: float(load.running),
            autoscaling.WAITING: float(load.waiting),
            autoscaling.WAITING_TOKENS: float(load.waiting_tokens),
            autoscaling.KV_USAGE: load.kv_usage,
        }

    async def listen_on_network(self) -> None:
        """Opens the listener to gateways on other nodes; they ask for it when they need it."""
        if self._listener:
            await self._listener.listen_on_network()

    async def door(self, node_id: str) -> dict[str, Any]:
        """The listener's address, for those on node `node_id` who ask there instead of by handle: batch.

        `handle.broadcast("door", node_id)` gives those of all replicas. Empty outside of Serve.
        """
        if self._listener and not self._listener.address.is_local(node_id):
            await self._listener.listen_on_network()
        return self.record_replica_metadata()

    async def __call__(self, request: HTTPRequest) -> Response:
        """Serve's hook, for HTTP to a model that is an application by itself: a gateway of its own."""
        if self._front is None or (self._front.done() and self._front.exception() is not None):
            assert self._listener is not None
            gateway, own = self._gateway_config or GatewayConfig(), tuple(paths(type(self)))
            opening = Front.open(self._llm_config, gateway, self._listener.address, own)
            self._front = asyncio.create_task(opening)
        return Through(await asyncio.shield(self._front))

    # -- what handles call: each is awaited and gives an async generator, as users of ray.serve.llm know it

    async def chat(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ChatCompletionResponse`; with `stream`, lists of ready `data: {...}` events, errors too."""
        return self._ask("/v1/chat/completions", request, raw_request_info)

    async def completions(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `CompletionResponse`; with `stream`, lists of ready `data: {...}` events, errors too."""
        return self._ask("/v1/completions", request, raw_request_info)

    async def responses(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ResponsesResponse`; with `stream`, lists of ready events, each with its name."""
        return self._ask("/v1/responses", request, raw_request_info)

    async def messages(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `MessagesResponse`; with `stream`, lists of ready events, each with its name."""
        return self._ask("/v1/messages", request, raw_request_info)

    async def embeddings(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `EmbeddingResponse` or `ErrorResponse`; bytes, where `encoding_format` asks for them."""
        return self._ask("/v1/embeddings", request, raw_request_info)

    async def score(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ScoreResponse` or `ErrorResponse`."""
        return self._ask("/v1/score", request, raw_request_info)

    async def rerank(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `RerankResponse` or `ErrorResponse`."""
        return self._ask("/v1/rerank", request, raw_request_info)

    async def classify(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `ClassificationResponse` or `ErrorResponse`."""
        return self._ask("/classify", request, raw_request_info)

    async def pooling(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """One `PoolingResponse` or `ErrorResponse`; bytes, where `encoding_format` asks for them."""
        return self._ask("/pooling", request, raw_request_info)

    async def transcriptions(
        self, request: Request, raw_request_info: RawRequestInfo | None = None
    ) -> Answers:
        """One `TranscriptionResponse`, or a text; with `stream`, lists of ready events."""
        return self._ask("/v1/audio/transcriptions", request, raw_request_info)

    async def translations(self, request: Request, raw_request_info: RawRequestInfo | None = None) -> Answers:
        """As `transcriptions`, in English."""
        return self._ask("/v1/audio/translations", request, raw_request_info)

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
        await self.steward.begun.wait()
        self.steward.asked()
        adapter = self._adapter(None)
        if not adapter:
            return self.engine.generate(prompt, params or {}, request_id=request_id)
        return self._generate(prompt, params or {}, request_id, adapter)

    async def _generate(
        self, prompt: Prompt, params: Mapping[str, Any], request_id: str | None, adapter: str
    ) -> AsyncGenerator[Delta, None]:
        async with self._store().use(adapter) as key:
            stream = self.engine.generate(prompt, params, request_id=request_id, adapter=key)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield delta

    async def load_adapter(self, name: str, pin: bool = False) -> None:
        """Loads an adapter into this replica; with `pin` it is never evicted.

        `handle.broadcast("load_adapter", name, pin=True)` reaches every replica that lives now.
        """
        await self._store().load_adapter(name, pin)

    async def unload_adapter(self, name: str) -> None:
        """Unpins and unloads it, once the requests that use it have ended."""
        await self._store().unload_adapter(name)

    async def adapters(self) -> list[str]:
        """Names of the adapters that this replica has loaded."""
        return list(self._adapters.loaded()) if self._adapters else []

    def _store(self) -> Store:
        if self._adapters is None:
            raise BadRequest(
                f"Model '{self._llm_config.model_id}' takes no adapters: its config has no lora_config.",
                param="model",
            )
        return self._adapters

    def _adapter(self, model: object) -> str:
        """The adapter that a call by handle means, by `multiplexed_model_id`, else by `model`; "" for none.

        Raises: BadRequest when this model takes none.
        """
        own = self._llm_config.model_id
        chosen, named = serve.get_multiplexed_model_id(), model if isinstance(model, str) else ""
        if not chosen and named.startswith(f"{own}:"):
            chosen = named
        if chosen in ("", own):
            return ""  # the base model, or none that we know: the engine says so
        self._store()
        return chosen.removeprefix(f"{own}:")

    async def check_health(self) -> None:
        """Serve's hook. Raises: EngineDead when the engine must be restarted."""
        if self.steward.begun.is_set():
            await self.engine.check_health()

    async def llm_config(self) -> LLMConfig:
        """The config that this server was made from."""
        return self._llm_config

    async def _ask(self, path: str, request: Request, raw: RawRequestInfo | None) -> Answers:
        from penstock.serve.openai_api_models import ANSWERS, ErrorResponse  # half a second, for handles only

        body = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else dict(request)
        if body.get("model") is None:
            body["model"] = self._llm_config.model_id  # Anthropic's endpoints want one
        fields = headers.of_handle(raw.headers or {}) if raw else {}
        try:
            if adapter := self._adapter(body.get("model")):
                fields |= asking_for(adapter)
            content_type, content = multipart.encode(body) if path in multipart.PATHS else _json(body)
        except BadRequest as error:
            refusal = ErrorResponse.model_validate_json(form(path).envelope(error))
            yield [refusal] if body.get("stream") else refusal
            return
        await self.steward.begun.wait()
        self.steward.asked()
        if self._listener:
            current_replica.set(self._listener.address.replica_id)  # a response's id says where it is kept
        reply = await call(self._app(), path, content, fields, content_type)
        try:
            if reply.status >= 400:
                error = ErrorResponse.model_validate_json(await reply.read())
                yield [error] if body.get("stream") else error
            elif "text/event-stream" in reply.headers.get("content-type", ""):
                interval_ms = self._llm_config.stream_batching_interval_ms
                async for batch in batched(events(reply.body), interval_ms):
                    yield batch
            elif "octet-stream" in reply.headers.get("content-type", ""):
                yield await reply.read()
            elif "text/plain" in reply.headers.get("content-type", ""):
                yield (await reply.read()).decode()
            else:
                yield ANSWERS[path].model_validate_json(await reply.read())
        finally:
            await reply.body.aclose()

    async def stop(self) -> None:
        """Finishes open streams within Serve's limit, then ends the engine; waits for no dead engine."""
        for task in (self._watch, self._following, self._bound):
            if task:
                task.cancel()
        if self._front is not None:
            await (await self._front).gateway.close()
        deadline = time.monotonic() + _drain_limit_s(self._llm_config)
        if self._listener:
            await self._listener.drain(deadline - time.monotonic())
            await self._listener.close()
        if self._prefillers:
            await self._prefillers.close()
        if self._line:
            await self._line.leave(deadline)
        if self._adapters:
            await self._adapters.stop()
        await self.engine.stop()

    def __del__(self) -> Any:
        """Serve's shutdown hook: Serve awaits what it returns. Outside of Serve, call `stop`."""
        return self.stop() if self.__dict__.get("_listener") else None

    # -- deployment

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Serve's options for this config: placement, actor resources, runtime environment."""
        return llm_config.get_serve_options(
            nodes=ray_cluster.nodes(), default_runtime_env=ray_cluster.runtime_env()
        )

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


def _json(body: Mapping[str, Any]) -> tuple[str, bytes]:
    return "application/json", msgspec.json.encode(body)


def _too_slow(model_id: str, limit_s: float, phase: str) -> EngineStartFailed:
    return EngineStartFailed(
        f"The engine of model '{model_id}' was not ready after {limit_s:g} s (last phase: {phase}). "
        "Raise engine_start_timeout_s if the model needs longer to load."
    )


def _drain_limit_s(config: LLMConfig) -> float:
    """A second less than Serve's own limit, after which Serve kills the process."""
    limit_s = config.get_serve_options().get("graceful_shutdown_timeout_s", 20.0)
    return max(0.0, limit_s - 1.0)
