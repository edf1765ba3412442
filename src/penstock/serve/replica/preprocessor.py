"""A preprocessor as a deployment, which Serve scales apart from the model, and its client in replicas.

Its results travel as one Ray object, large ones in shared memory (`tensor_serialization`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from penstock.config import LLMConfig
from penstock.config.derive.adapters import without_live_adapters
from penstock.config.derive.serve_options import (
    deployment_name,
    for_replicas,
    runtime_env,
    with_uris,
    without_secrets,
)
from penstock.config.schema.processing import own_deployment, timeout_s
from penstock.errors import Error, Overloaded, OwnCodeFailed, Unavailable
from penstock.hooks.hook import PREPROCESSOR, Context, Hook
from penstock.serve.replica import environment, tensor_serialization, version

log = logging.getLogger(__name__)

_NAME_PREFIX = "Preprocessor:"
_MOST_DEATHS = 3
"""Replicas that may die at one request before it fails: two of them may have died together."""
_TOGETHER_S = 1.5
_RETRY_AFTER_S = 1.0


class Preprocessor:
    """One replica of the deployment: the user's code, without an engine."""

    def __init__(self, config: LLMConfig) -> None:
        """Raises: ConfigError when the user's class cannot be constructed."""
        environment.enter(config)
        self._config = config
        self._hook = Hook(config, PREPROCESSOR)

    async def prepare(
        self, request: Mapping[str, Any], path: str, request_id: str, headers: Mapping[str, str]
    ) -> tuple[Any, dict[str, Any]]:
        """What the user's code returns, and its notes for the postprocessor."""
        context = Context(self._config, path, request_id, headers)
        returned = await self._hook(request, context)
        tensor_serialization.register()
        return returned, context.notes


def application(config: LLMConfig) -> Application | None:
    """The deployment that `preprocessor_options` describe; None when it runs in the model's replicas."""
    options = own_deployment(config.preprocessor_options)
    if options is None:
        return None
    actor = dict(options.pop("ray_actor_options", None) or {})
    base = runtime_env(config, environment.runtime_env())
    own = actor.get("runtime_env") or {}
    variables = {**base.get("env_vars", {}), **own.get("env_vars", {})}
    shown, secrets = without_secrets(with_uris({**base, **own, "env_vars": variables}))
    if shown:
        actor["runtime_env"] = shown
    named = {"name": deployment_name(config.model_id, _NAME_PREFIX), "ray_actor_options": actor, **options}
    bound = for_replicas(config).with_secrets(secrets).model_copy(update={"aliases": []})
    made_of = [without_live_adapters(bound), version.named_code(bound)]
    return version.deployment(Preprocessor, named, made_of).bind(bound)


class RemotePreprocessor:
    """Calls the deployment as one calls a hook; asks another replica if one dies."""

    def __init__(self, handle: DeploymentHandle[Any], config: LLMConfig) -> None:
        self._prepare = handle.prepare
        self._model_id = config.model_id
        self._timeout_s = timeout_s(config.preprocessor_options)

    async def __call__(self, request: Mapping[str, Any], context: Context) -> Any:
        """Raises: what the user's code raised, as an answer; Unavailable when no replica answers in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                returned, notes = await self._ask(request, context)
        except TimeoutError:
            raise Unavailable(
                f"The preprocessor of model '{self._model_id}' did not answer within {self._timeout_s:g} s, "
                "its limit (preprocessor_options.timeout_s). Send the request again later.",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        context.notes.update(notes)
        return returned

    async def _ask(self, request: Mapping[str, Any], context: Context) -> tuple[Any, dict[str, Any]]:
        for deaths in range(_MOST_DEATHS):
            if deaths == _MOST_DEATHS - 1:  # those of a lost node are known by then
                await asyncio.sleep(_TOGETHER_S)
            try:
                return await self._call(request, context)
            except (RayActorError, ReplicaUnavailableError) as error:
                log.warning(
                    "Replica %d of the preprocessor died at request %s: %s",
                    deaths + 1,
                    context.request_id,
                    error,
                )
        raise OwnCodeFailed(
            f"{_MOST_DEATHS} replicas of this model's preprocessor died while processing this request; "
            "it is not retried."
        )

    async def _call(self, request: Mapping[str, Any], context: Context) -> tuple[Any, dict[str, Any]]:
        response = self._prepare.remote(request, context.path, context.request_id, dict(context.headers))
        try:
            return await response
        except (asyncio.CancelledError, RequestCancelledError):  # the latter where Serve runs in one process
            response.cancel()
            raise asyncio.CancelledError from None
        except RayActorError:  # died while processing
            raise
        except RayError as error:
            raise _translated(error, context) from error
        except BackPressureError as error:
            raise Overloaded(
                "The queue of this model's preprocessor is full.", retry_after_s=_RETRY_AFTER_S
            ) from error
        except DeploymentUnavailableError as error:
            raise Unavailable("This model's preprocessor cannot start; see its log.") from error


def _translated(error: RayError, context: Context) -> Error:
    cause: Any = getattr(error, "cause", None)  # of a RayTaskError
    if isinstance(cause, Error):
        return cause
    log.error("The preprocessor's result for request %s cannot be sent", context.request_id, exc_info=error)
    return OwnCodeFailed("The result of this model's preprocessor cannot be sent to a replica; see the log.")
