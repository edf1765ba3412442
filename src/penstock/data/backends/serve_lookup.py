"""Deployments of Ray Serve: found by application and name, with a handle and their state.

The only file of the backends that queries Serve's controller. Its calls block, so they run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from penstock.config.derive.serve_options import NAME_PREFIX
from penstock.errors import ConfigError, EngineStartFailed, Unavailable, reason

_START_FAILED = "REPLICA_STARTUP_FAILED"


@dataclass(frozen=True, slots=True)
class FoundDeployment:
    """One deployment of a running application."""

    app: str
    name: str
    handle: DeploymentHandle[Any]

    def __str__(self) -> str:
        return f"Deployment '{self.name}' of application '{self.app}'"

    async def check(self) -> None:
        """Raises: EngineStartFailed when it cannot start; Unavailable when it or its application is gone."""
        found = (await asyncio.to_thread(_applications)).get(self.app)
        if found is None:
            raise Unavailable(f"The application '{self.app}' has been removed.")
        if (status := found.deployments.get(self.name)) is None:
            raise Unavailable(f"{self} has been removed.")
        if status.status == "DEPLOY_FAILED" or status.status_trigger == _START_FAILED:
            raise EngineStartFailed(f"{self} cannot start: {reason(status.message)}")


def find_deployment(app: str, name: str | None = None) -> FoundDeployment:
    """The deployment `name` of `app`; without a name, the only one that serves a model.

    Blocks. Raises: Unavailable when no Ray cluster runs; ConfigError with the names that exist.
    """
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise Unavailable("No Ray cluster runs on this machine; start it, or set RAY_ADDRESS.") from error
    applications = _applications()
    if app not in applications:
        raise ConfigError(f"No application '{app}' runs on Ray Serve; {_listed('there are', applications)}.")
    names = applications[app].deployments
    if name is None:
        name = _only_model(app, list(names))
    if name not in names:
        raise ConfigError(f"Application '{app}' has no deployment '{name}'; {_listed('it has', names)}.")
    return FoundDeployment(app, name, cast("DeploymentHandle[Any]", serve.get_deployment_handle(name, app)))


def is_no_method(cause: BaseException) -> bool:
    """Whether Serve reports that the deployment has no method of this name."""
    return isinstance(cause, RayServeException) and "does not exist" in str(cause)


def node_id() -> str:
    """Of this process."""
    return ray.get_runtime_context().get_node_id()


def _only_model(app: str, names: list[str]) -> str:
    models = [one for one in names if one.startswith(NAME_PREFIX)]
    if len(models) == 1:
        return models[0]
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        f"Application '{app}' serves {len(models) or 'no'} models; say with deployment_name which deployment "
        f"is meant: {_listed('it has', models or names)}."
    )


def _applications() -> Mapping[str, ApplicationStatusOverview]:
    """Raises: Unavailable while Serve's controller is away; it is restarted."""
    try:
        return serve.status().applications
    except (RayError, RayServeException) as error:
        raise Unavailable("Ray Serve does not answer now: its controller has ended, or its node.") from error


def _listed(intro: str, names: Mapping[str, object] | list[str]) -> str:
    return f"{intro} {', '.join(map(repr, sorted(names))) or 'none'}"
