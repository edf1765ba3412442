"""An engine shared by several stages: deployed on Ray Serve for the duration of a batch.

`ServeDeploymentProcessorConfig` finds it by name. The user builds the application, for example by
`penstock.serve.build_llm_deployment(config)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from penstock.data.backends import serve_lookup
from penstock.errors import ConfigError, EngineStartFailed, reasons


@dataclass(frozen=True, slots=True)
class DeploymentNames:
    """Where a shared engine is found: `ServeDeploymentProcessorConfig(**names.arguments)`."""

    app_name: str
    deployment_name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return {"app_name": self.app_name, "deployment_name": self.deployment_name}


class SharedEngine:
    """Deployed and ready inside its `with`, or between `start` and `stop`.

    app_name: not that of a running application. Other applications are untouched; if there are none, Serve
    is started without its HTTP proxy, and shut down at the end. A process killed with -9 leaves the
    application in a cluster that keeps running; `serve.delete(app_name)` removes it.
    """

    def __init__(self, application: Application, app_name: str = "penstock-batch") -> None:
        self._application = application
        self.app_name = app_name
        self._began_serve = False
        self._deployed = False

    def start(self) -> DeploymentNames:
        """Raises: ConfigError when the name is taken; EngineStartFailed with the engine's reason."""
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        before = serve.status()
        if self.app_name in before.applications:
            raise ConfigError(
                f"An application '{self.app_name}' runs already. Use it by its name, with "
                "ServeDeploymentProcessorConfig, or give this one another app_name."
            )
        self._began_serve = not before.proxies and not before.applications
        if self._began_serve:
            serve.start(proxy_location="Disabled")
        self._deployed = True
        try:
            serve.run(self._application, name=self.app_name, route_prefix=None)
            found = serve_lookup.find_deployment(self.app_name)
        except RuntimeError as error:  # Serve raises it for a failed deployment
            started = serve.status().applications[self.app_name].deployments.values()
            why = reasons(one.message for one in started) or str(error)
            self.stop()
            raise EngineStartFailed(f"Application '{self.app_name}' cannot start: {why}") from error
        except BaseException:
            self.stop()
            raise
        return DeploymentNames(self.app_name, found.name)

    def stop(self) -> None:
        """Deletes what `start` deployed. Safe to call twice."""
        if not self._deployed:
            return
        self._deployed = False
        serve.delete(self.app_name)
        if self._began_serve and not serve.status().applications:
            serve.shutdown()

    def __enter__(self) -> DeploymentNames:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


shared_engine = SharedEngine
"""`with shared_engine(application) as names:` deploys it, waits for it, and deletes it at the end."""
