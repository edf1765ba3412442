"""The gateway as a class to subclass: `OpenAiIngress`, `make_fastapi_ingress`, as `ray.serve.llm` names them.

For programs that bind everything themselves, and for endpoints of your own at the gateway. A path that
FastAPI has is answered by the class; all others by the gateway, as everywhere else. Endpoints of one model
belong to its server class instead, see `penstock.serve.endpoint`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from penstock.asgi import ASGIApp, Receive, Scope, Send, with_body
from penstock.config import GatewayConfig, LLMConfig
from penstock.errors import ConfigError
from penstock.openai.paths import METHODS, UPLOADS
from penstock.serve.gateway.catalogue import LiveState, ServedModel
from penstock.serve.replica.handles import multipart
from penstock.serve.replica.single_model import ASGIResponse
from penstock.serve.router.deployment import RouterDeployment, gateway_options
from penstock.serve.router.router import LLMRouter

Endpoints = Mapping[str, Callable[[FastAPI], Callable[..., Any]]]
"""By a method's name, what registers it: `{"chat": lambda app: app.post("/v1/chat/completions")}`."""

_PATHS = {
    name: (METHODS | UPLOADS)[name]
    for name in ("completions", "chat", "embeddings", "transcriptions", "score", "tokenize", "detokenize")
}

_OF_THE_BODY = (b"content-type", b"transfer-encoding")


DEFAULT_ENDPOINTS: Endpoints = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    **{name: partial(FastAPI.post, path=path) for name, path in _PATHS.items()},
}


def _forwarding(path: str) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def ask(self: Any, body: Any, request: Request) -> Response:
        return self._forwarded(path, body)

    return ask


class OpenAiIngress:
    """Give it to `make_fastapi_ingress`, and bind that.

    A subclass adds endpoints as methods, or overrides those named in `DEFAULT_ENDPOINTS`; `super().chat(body,
    request)` then has the gateway answer.
    """

    _bound: Mapping[str, Any] | None = None
    """What a builder knows: arguments of `LLMRouter`. Without it, all is asked of the models."""

    def __init__(
        self,
        llm_deployments: Mapping[str, DeploymentHandle[Any]] | Sequence[DeploymentHandle[Any]],
        model_cards: Mapping[str, Any] | None = None,
        *,
        lora_paths: Mapping[str, str | None] | None = None,
        gateway: GatewayConfig | None = None,
    ) -> None:
        """llm_deployments: the models, each bound with `LLMServer.get_deployment_options(config)`; a mapping
        is by model id. model_cards, lora_paths: as the models' own configs say, or left out: those decide.

        Raises: ConfigError for other ids, and when a model says otherwise; that when the replica starts.
        """
        given = llm_deployments
        self._ids = list(given) if isinstance(given, Mapping) else None
        self._servers = list(given.values()) if isinstance(given, Mapping) else list(given)
        self._lora_paths = dict(lora_paths or {})
        self._gateway_config = gateway
        self._router: LLMRouter | None = None
        if self._ids is not None and model_cards is not None and set(self._ids) != set(model_cards):
            raise ConfigError(
                f"llm_deployments are {sorted(self._ids)}, model_cards are {sorted(model_cards)}; "
                "give both the same model ids, or leave model_cards out."
            )

    @classmethod
    def get_deployment_options(cls, llm_configs: Sequence[LLMConfig] | None = None) -> dict[str, Any]:
        """Serve's options for the gateway to these models. It has no replicas to scale down: it is small."""
        options = gateway_options(llm_configs or ())
        del options["name"]  # Serve's own: the name of the class
        return options

    @classmethod
    def as_deployment(
        cls, deployment_options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> RouterDeployment:
        """As `LLMRouter.as_deployment`, to `.bind([...])`; arguments: more of the class's own."""
        made = make_fastapi_ingress(cls)
        return RouterDeployment(LLMRouter, dict(deployment_options or {}), made, arguments)

    # -- life in a replica

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook, called after the constructor."""
        bound = self._bound or await self._ask_models()
        self._router = object.__new__(LLMRouter)
        await self._router.__init__(**bound)
        gateway = await self._router.__serve_build_asgi_app__()
        own: FastAPI | None = getattr(self, "app", None)  # Serve's copy of what `make_fastapi_ingress` made
        if own is None:
            return gateway
        self._gateway_app = gateway
        if not getattr(self, "_only_named", False):
            own.mount("/", gateway)
        return own

    async def _ask_models(self) -> dict[str, Any]:
        """Arguments of `LLMRouter`; waits for one replica of each model. Raises: ConfigError."""
        configs = await asyncio.gather(*(server.llm_config.remote() for server in self._servers))
        cards: list[ServedModel] = await asyncio.gather(
            *(server.served_model.remote() for server in self._servers)
        )
        for i, config in enumerate(configs):
            self._check(config, self._ids[i] if self._ids is not None else config.model_id)
        return {
            "servers": self._servers,
            "live": LiveState(tuple(cards), self._gateway_config or GatewayConfig()),
            "control": None,
        }

    def _check(self, config: LLMConfig, model_id: str) -> None:
        if config.model_id != model_id:
            raise ConfigError(
                f"The deployment given as {model_id!r} serves {config.model_id!r}; name it by its model_id."
            )
        own = config.lora_config.dynamic_lora_loading_path if config.lora_config else None
        if self._lora_paths.get(model_id, own) != own:
            raise ConfigError(
                f"lora_paths[{model_id!r}] is {self._lora_paths[model_id]!r}, but the model's lora_config "
                f"says {own!r}; its replicas load from there. Set lora_config.dynamic_lora_loading_path."
            )
        if config.on_demand is not None:
            raise ConfigError(
                f"Model {model_id!r} has `on_demand`, which needs the control that builders add: use "
                "build_openai_app with `ingress_cls_config`, or LLMRouter.as_deployment()."
            )

    async def check_health(self) -> None:
        if self._router is not None:
            await self._router.check_health()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if self.__dict__.get("_router") is not None:
            await self.__dict__["_router"].stop()

    # -- endpoints, for overriding: each has the gateway answer

    async def models(self) -> Response:
        return self._forwarded("/v1/models")

    async def model_data(self, model: str) -> Response:
        return self._forwarded(f"/v1/models/{model}")

    async def model(self, model_id: str) -> Response:
        return await self.model_data(model_id)

    completions = _forwarding(_PATHS["completions"])
    chat = _forwarding(_PATHS["chat"])
    embeddings = _forwarding(_PATHS["embeddings"])
    score = _forwarding(_PATHS["score"])
    tokenize = _forwarding(_PATHS["tokenize"])
    detokenize = _forwarding(_PATHS["detokenize"])

    async def transcriptions(self, body: Any, request: Request) -> Response:
        form = await multipart.encode(_fields(body))
        return _answer(self._gateway_app, _PATHS["transcriptions"], *form)

    def _forwarded(self, path: str, body: Any = None) -> Response:
        content = None if body is None else msgspec.json.encode(_fields(body))
        return _answer(self._gateway_app, path, "application/json", content)


def _answer(app: ASGIApp, path: str, content_type: str = "", content: bytes | None = None) -> Response:
    """What `app` answers to the request as it came, at `path`; with `content`, that in place of its body."""

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "path": scope.get("root_path", "") + path}
        scope.pop("raw_path", None)
        if content is not None:
            scope, receive = with_body(scope, receive, content)
            fields = [field for field in scope["headers"] if field[0] not in _OF_THE_BODY]
            scope["headers"] = [*fields, (b"content-type", content_type.encode())]
        await app(scope, receive, send)

    return ASGIResponse(ask)


def make_fastapi_ingress(
    cls: type[Any], *, endpoint_map: Endpoints | None = None, app: FastAPI | None = None
) -> type[Any]:
    """A class for `serve.deployment`: `cls` behind Serve's HTTP, its methods as endpoints.

    endpoint_map: methods and what registers them; other paths are then 404. Without it, the methods of
    `DEFAULT_ENDPOINTS` that `cls` overrides, and the gateway for all other paths. app: one of your own, with
    its middleware and routes.
    """
    named = DEFAULT_ENDPOINTS if endpoint_map is None else endpoint_map
    own = {name for name in named if getattr(cls, name) is not getattr(OpenAiIngress, name, None)}
    if endpoint_map is None and app is None and not own:
        return serve.ingress()(_started(cls, only_named=False))
    app = app or FastAPI(openapi_url=None)  # the gateway's own page describes its paths
    for name, register in named.items():
        if name in own:
            register(app)(getattr(cls, name))
        elif endpoint_map is not None:
            register(app)(_passing(name))
    return serve.ingress(app)(_started(cls, only_named=endpoint_map is not None))


def _started(cls: type[Any], *, only_named: bool) -> type[Any]:
    """`cls` with a constructor that also takes what a builder knows."""

    class Ingress(cls):
        _only_named = only_named

        async def __init__(
            self, *arguments: Any, bound: Mapping[str, Any] | None = None, **more: Any
        ) -> None:
            made = super().__init__(*arguments, **more)
            if inspect.isawaitable(made):
                await made
            self._bound = bound

    Ingress.__name__, Ingress.__qualname__ = cls.__name__, cls.__qualname__
    return Ingress


def _passing(name: str) -> Callable[..., Any]:
    """A method in place of one that is not overridden: the request goes to the gateway unread."""

    async def passing(self: Any, request: Request) -> Response:
        path = _PATHS.get(name, "/v1/models")
        if "model" in request.path_params:
            path = f"{path}/{request.path_params['model']}"
        return _answer(self._gateway_app, path)

    passing.__qualname__ = f"{OpenAiIngress.__qualname__}.{name}"  # by which Serve finds methods
    return passing


def _fields(body: Any) -> dict[str, Any]:
    """What the client sent, and what was changed."""
    if isinstance(body, Mapping):
        return dict(body)
    return {name: value for name, value in body if name in body.model_fields_set}
