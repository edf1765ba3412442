"""One replica: one engine, its own listener, and the methods that handles call.

It stands between Serve, which starts, checks and stops it, and the engine. Of the way of HTTP requests,
from the gateway to the listener to the engine's app, only `_serve` is here: it waits for the engine and
counts them. It names no engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from penstock import autoscaling, progress, request_context
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.placement import gang_size
from penstock.engine import Delta, Engine, Prompt
from penstock.engines import engine_class
from penstock.engines.check import with_independent_engines
from penstock.errors import ConfigError, EngineStartFailed
from penstock.hooks.hook import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.layers.adapters import Source, Store
from penstock.layers.adapters.source import Downloader
from penstock.layers.preprocessing import HookCall
from penstock.layers.stack import make_hook, stacked, start_engine
from penstock.openai.paths import METHODS, UPLOADS
from penstock.serve.control.state import SharingGroup
from penstock.serve.fleet.membership import ADAPTERS
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica import environment, gang, version
from penstock.serve.replica.deployment import ModelDeployment, membership_router
from penstock.serve.replica.gang import GangLink
from penstock.serve.replica.handles.api import HandleAPI, Request, Responses
from penstock.serve.replica.inbound.custom_endpoints import CustomEndpoints, paths
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.serve.replica.prefill_client import PrefillClient
from penstock.serve.replica.preprocessor import RemotePreprocessor
from penstock.serve.replica.reconciler import Reconciler, find_control
from penstock.serve.replica.single_model import ASGIResponse, open_gateway
from penstock.serve.replica.tiers.controller import targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.transport import link

if TYPE_CHECKING:
    from penstock.serve.replica.handles.models import RawRequestInfo

log = logging.getLogger(__name__)

_ROUTED_S = 3600.0  # of a call by a gateway's router: longer than almost any request
_LAST_EVENTS_S = 0.5  # after the engine's death, for error events to reach their clients


def _asking(name: str) -> Callable[..., Coroutine[Any, Any, Responses]]:
    path = (METHODS | UPLOADS)[name]

    async def ask(self: Any, request: Request, raw_request_info: RawRequestInfo | None = None) -> Responses:
        return self._handle_api.ask(path, request, raw_request_info)

    ask.__doc__ = f"Asks {path}."
    return ask


def _operating(operation: str, arguments: str = "No arguments.") -> Callable[..., Coroutine[Any, Any, Any]]:
    async def operate(self: Any, **options: Any) -> Any:
        return await self.reconciler.perform(operation, options)

    operate.__doc__ = arguments
    return operate


class LLMServer:
    """Serves one model. Three ways to make one:

    `LLMServer.as_deployment().bind(config)` for Serve; `await LLMServer(config)`, started;
    `LLMServer.sync_init(config)` and `await server.start()`.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """For Serve, which passes nothing, an instance; else what to await for a started one."""
        server = super().__new__(cls)
        return server._started(*arguments, **options) if arguments or options else server

    async def _started(self, *arguments: Any, **options: Any) -> LLMServer:
        await self.__init__(*arguments, **options)
        return self

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

        model_downloader: fetches adapters, instead of the sources of `lora_config`. preprocessor: the
        config's, if it is a deployment. prefill: the replicas that compute long prompts for this one. role:
        as in `ReplicaStatus`. gateway: for HTTP to this model without a router.
        Raises: EngineStartFailed with the engine's own reason, or that its time limit passed.
        """
        self._prepare(llm_config, engine_cls, model_downloader)
        if preprocessor is not None:
            self._preprocessor = RemotePreprocessor(preprocessor, llm_config)
        self._prefill_handle = prefill
        self._gateway_config = gateway
        self.reconciler.role = role
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
        server = object.__new__(cls)
        server._prepare(llm_config, engine_cls, model_downloader)
        return server

    def _prepare(
        self, llm_config: LLMConfig, engine_cls: type[Engine] | None, downloader: type[Downloader] | None
    ) -> None:
        if environment.in_replica() and serve.get_replica_context().gang_context is None:
            llm_config = with_independent_engines(llm_config)
        self._llm_config = llm_config
        self._id = secrets.token_hex(8)
        self._listener: Listener | None = None
        self._gang_link: GangLink | None = None
        self._gateway_config: GatewayConfig | None = None
        self._gateway: asyncio.Task[tuple[Gateway, ASGIApp]] | None = None
        self._layers: ASGIApp | None = None
        self._preprocessor: HookCall | None = None
        self._postprocessor: Hook | None = None
        self._prefill_handle: DeploymentHandle[Any] | None = None
        self._prefill_client: PrefillClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.engine: Engine = (engine_cls or engine_class(llm_config))(llm_config)
        self._adapters: Store | None = None
        if llm_config.lora_config is not None:
            self._adapters = Store(self.engine, Source(llm_config, downloader), self._notify_links)
        sharing = llm_config.on_demand
        group = SharingGroup(sharing.group, sharing.awake, sharing.min_awake_s) if sharing else None
        self.reconciler = Reconciler(
            *(self.engine, self._start_engine, self._notify_links, self._id, group, llm_config.model_id),
            self._adapters,
        )
        self._turns = Turns(BatchShare(self.engine.load, targets(llm_config), time.monotonic))
        self._handle_api = HandleAPI(
            llm_config, self.engine, self._adapters, self._turns, self._admit, lambda: self._app()
        )

    # -- lifecycle

    async def start(self) -> None:
        """Starts the engine within the config's time limit; inside a Serve replica, the listener too."""
        config, in_replica, control = self._llm_config, environment.in_replica(), None
        if in_replica:
            environment.prepare(config)
            control = await asyncio.to_thread(find_control)
        try:
            self._preprocessor = self._preprocessor or make_hook(config, PREPROCESSOR)
            self._postprocessor = make_hook(config, POSTPROCESSOR)
        except ConfigError:
            progress.report(config.model_id, progress.FAILED)
            raise
        if in_replica and gang_size(config) > 1:
            self._gang_link = gang.join(config.model_id)
            self._tasks.append(asyncio.create_task(self._exit_with_gang(self._gang_link)))
        await self.reconciler.start(control)
        if self._prefill_handle is not None:
            node_id, weights = ray.get_runtime_context().get_node_id(), self.reconciler.weights_version
            self._prefill_client = PrefillClient(
                config, self._prefill_handle, self._engine_app, weights, node_id
            )
        if in_replica:
            await self._open_listener()
            self._tasks.append(asyncio.create_task(self._exit_with_engine()))
        progress.report(config.model_id, progress.READY)

    async def _start_engine(self) -> None:
        """Reports each phase to the command that starts the service."""
        config = self._llm_config

        def reached(phase: str) -> None:
            log.info("%s: %s", config.model_id, phase)
            progress.report(config.model_id, phase)

        request_context.gang.set(self._gang_link.gang if self._gang_link else None)
        try:
            await start_engine(self.engine, config, self._adapters, reached)
        except EngineStartFailed:
            progress.report(config.model_id, progress.FAILED)
            raise

    async def _open_listener(self) -> None:
        self._listener = await Listener.open(
            self._serve,
            StatusSource(
                load=self.engine.load,
                hello=lambda: link.Hello(
                    self._llm_config.model_id, self.engine.max_model_len(), self.engine.kv_tokens()
                ),
                state=lambda: self.reconciler.actual,
                weights=self.reconciler.weights_version,
                adapters=self._adapters,
                batch=self._turns.share,
                add_aliases=self._llm_config.add_aliases,
                version=version.of_answers(self._llm_config),
            ),
            node_id=ray.get_runtime_context().get_node_id(),
            node_host=ray.util.get_node_ip_address(),
            replica_id=self._id,
            wait_dead=self.engine.wait_dead,
        )

    async def _exit_with_engine(self) -> None:
        """Serve starts a new replica as soon as this process ends."""
        reason = await self.engine.wait_dead()
        log.error("The engine of model '%s' died: %s. The replica ends.", self._llm_config.model_id, reason)
        if self._gang_link:
            self._gang_link.close()
        await asyncio.sleep(_LAST_EVENTS_S)
        os._exit(1)

    async def _exit_with_gang(self, gang_link: GangLink) -> None:
        """Its engine would wait for the others for ever; Serve restarts the whole gang."""
        await gang_link.broken.wait()
        log.error("Another replica of this gang of '%s' is gone. This one ends.", self._llm_config.model_id)
        os._exit(1)

    async def stop(self) -> None:
        """Finishes open streams within Serve's limit, then ends the engine; does not wait for a dead one."""
        self.reconciler.close()
        for task in self._tasks:
            task.cancel()
        if self._gateway is not None:
            (opened,) = await asyncio.gather(self._gateway, return_exceptions=True)
            if not isinstance(opened, BaseException):
                await opened[0].close()
        limit_s = self._llm_config.get_serve_options().get("graceful_shutdown_timeout_s", 20.0)
        deadline = time.monotonic() + limit_s - 1.0  # then Serve kills the process
        if self._listener:
            await self._listener.drain(deadline - time.monotonic())
            await self._listener.close()
            self._listener = None
        if self._prefill_client:
            await self._prefill_client.close()
        if self._gang_link:
            await self._gang_link.leave(deadline)
        if self._adapters:
            await self._adapters.stop()
        await self.engine.stop()

    def __del__(self) -> Any:
        """Serve's shutdown hook: Serve awaits what it returns. Python calls it, too, after `stop`."""
        return self.stop() if self.__dict__.get("_listener") else None

    # -- what the listener asks

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.reconciler.started.wait()
        if scope["method"] == "POST":  # a scrape of metrics is no use of the model
            self.reconciler.request_arrived()
        await self._app()(scope, receive, send)

    async def _admit(self) -> None:
        """Waits for the engine, which a replica that starts asleep does not have yet; counts a request."""
        await self.reconciler.started.wait()
        self.reconciler.request_arrived()
        if self._listener:
            request_context.current_replica.set(self._id)

    async def _engine_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's own app, without the layers before it."""
        await self.reconciler.started.wait()
        await self.engine.app()(scope, receive, send)

    def _app(self) -> ASGIApp:
        """The engine's app and the layers before it."""
        if self._layers is None:
            app = stacked(
                self.engine,
                self._llm_config,
                adapters=self._adapters,
                preprocessor=self._preprocessor,
                postprocessor=self._postprocessor,
                prefill=self._prefill_client.ask if self._prefill_client else None,
                role=self.reconciler.role,
            )
            if paths(type(self)):
                app = CustomEndpoints(app, self, self._llm_config)
            self._layers = ByClass(app, self._turns, self.reconciler.weights_version)
        return self._layers

    def _notify_links(self) -> None:
        if self._listener:
            self._listener.links.notify()

    # -- Serve's hooks

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the replica publishes about itself."""
        return self._listener.address.to_metadata() if self._listener else {}

    def record_routing_stats(self) -> dict[str, Any]:
        """What routes a call by handle that names an adapter."""
        return {ADAPTERS: list(self._adapters.loaded())} if self._adapters else {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.policy` decides by."""
        load = self.engine.load()
        return {
            autoscaling.RUNNING: float(load.running),
            autoscaling.WAITING: float(load.waiting),
            autoscaling.WAITING_TOKENS: float(load.waiting_tokens),
            autoscaling.KV_USAGE: load.kv_usage,
        }

    async def check_health(self) -> None:
        """Raises: EngineDead when the engine must be restarted."""
        if self.reconciler.started.is_set():
            await self.engine.check_health()

    async def __call__(self, request: HTTPRequest) -> Response:
        """HTTP to a model that is an application without a router: through a gateway in this process."""
        if self._gateway is None or (self._gateway.done() and self._gateway.exception() is not None):
            assert self._listener is not None
            config, own = self._gateway_config or GatewayConfig(), tuple(paths(type(self)))
            opening = open_gateway(self._llm_config, config, self._listener.address, own)
            self._gateway = asyncio.create_task(opening)
        _, app = await asyncio.shield(self._gateway)
        return ASGIResponse(app)

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Serve's options for this config: placement, actor resources, runtime environment, and the router by
        which gateways learn of its replicas.
        """
        options = with_independent_engines(llm_config).get_serve_options(
            nodes=environment.nodes(), default_runtime_env=environment.runtime_env()
        )
        router = membership_router(llm_config.model_id, options.get("request_router_config"))
        return {**options, "request_router_config": router}

    @classmethod
    def as_deployment(cls, deployment_options: Mapping[str, Any] | None = None) -> ModelDeployment:
        """A deployment to `.bind(llm_config)`; its options come from the config unless given here."""
        return ModelDeployment(cls, dict(deployment_options or {}))

    # -- how others reach this replica

    async def listen_on_network(self) -> None:
        """Opens the listener to other nodes; called by the gateways there."""
        if self._listener:
            await self._listener.sockets.listen_on_network()

    async def listener_address(self, node_id: str) -> dict[str, Any]:
        """The listener's address, for batch clients on node `node_id`; empty outside of Serve.

        `handle.broadcast("listener_address", node_id)` returns those of all replicas.
        """
        return await self._listener.sockets.address(node_id) if self._listener else {}

    async def llm_config(self) -> LLMConfig:
        """The config that this server was made from."""
        return self._llm_config

    async def served_model(self) -> ServedModel:
        """What a gateway knows of this model before it hears of a replica."""
        return ServedModel.of(self._llm_config, paths=tuple(paths(type(self))))

    async def routed(self, request: object) -> AsyncGenerator[str, None]:
        """This replica's id, once; then the call stays open as long as the request that it stands for.

        A gateway calls it where a router of Ray Serve's kind picks replicas: the router sees each request,
        and counts it while it lasts. request: its `messages` or `prompt`. It ends by itself in the end: a
        gateway that dies does not cancel it.
        """
        yield self._id
        await asyncio.sleep(_ROUTED_S)

    # -- requests by handle: each is awaited and returns an async generator, as in ray.serve.llm.
    # It yields one response, of OpenAI's type for the endpoint or an `ErrorResponse`, or bytes where
    # `encoding_format` asks for them; with `stream`, lists of ready events, errors too.

    chat = _asking("chat")
    completions = _asking("completions")
    responses = _asking("responses")
    messages = _asking("messages")
    embeddings = _asking("embeddings")
    score = _asking("score")
    rerank = _asking("rerank")
    classify = _asking("classify")
    pooling = _asking("pooling")
    transcriptions = _asking("transcriptions")
    translations = _asking("translations")
    tokenize = _asking("tokenize")
    detokenize = _asking("detokenize")

    async def generate(
        self, prompt: Prompt, params: Mapping[str, Any] | None = None, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """The engine's own `generate`, with the prompt as it is. Yields one `Delta` per engine step."""
        return await self._handle_api.generate(prompt, params or {}, request_id)

    # -- adapters of this replica

    async def load_adapter(self, name: str, pin: bool = False) -> None:
        """Loads an adapter into this replica; with `pin` it is never evicted.

        `handle.broadcast("load_adapter", name, pin=True)` reaches every replica that lives now.
        """
        await self._handle_api.adapters().load_adapter(name, pin)

    async def unload_adapter(self, name: str) -> None:
        """Unpins and unloads it, once the requests that use it have ended."""
        await self._handle_api.adapters().unload_adapter(name)

    async def adapters(self) -> list[str]:
        """Names of the adapters that this replica has loaded."""
        return list(self._adapters.loaded()) if self._adapters else []

    # -- operations on this replica, with the arguments and errors of `Engine`. `LLMControl` performs them on
    # all replicas of a model; a later change of the model's desired state replaces what was done here.

    sleep = _operating("sleep", "level: 1 or 2. mode: 'wait' or 'abort'.")
    wakeup = _operating(
        "wakeup",
        "tags: parts to wake, 'weights' or 'kv_cache'; it takes requests when both are. All by default.",
    )
    is_sleeping = _operating("is_sleeping")
    pause = _operating("pause", "mode: 'keep', 'wait' or 'abort'. clear_cache: empties the prefix cache.")
    resume = _operating("resume")
    is_paused = _operating("is_paused")
    reset_prefix_cache = _operating("reset_prefix_cache")
    start_profile = _operating("start_profile")
    stop_profile = _operating("stop_profile")
    update_weights = _operating(
        "update_weights", "source: an absolute path that every node sees. version: its name. mode."
    )

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Results of all workers of this replica. timeout: seconds."""
        arguments = {"method": method, "timeout": timeout, "args": list(args), "kwargs": dict(kwargs or {})}
        return await self.reconciler.perform("collective_rpc", arguments)

    async def weights_version(self) -> str:
        return self.reconciler.weights_version()
