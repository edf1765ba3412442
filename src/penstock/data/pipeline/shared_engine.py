"""An engine that several stages share: deployed on Ray Serve for as long as a batch lasts, then taken down.

It stands beside the processors: what it names, `ServeDeploymentProcessorConfig` finds. Which application it
is, the user says: `penstock.serve.build_llm_deployment(config)` makes one of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from penstock.data.backends import serve_lookup
from penstock.errors import ConfigError, EngineStartFailed

_SHOWN_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Names:
    """Where a shared engine is found: `ServeDeploymentProcessorConfig(**names.arguments)`."""

    app_name: str
    deployment_name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return {"app_name": self.app_name, "deployment_name": self.deployment_name}


class SharedEngine:
    """Deployed and ready inside its `with`, or between `start` and `stop`.

    app_name: one that no application has. What runs on Ray Serve already stays as it is; where nothing did,
    Serve is started without its HTTP, and ended. Whoever is killed with -9 leaves the application behind in a
    cluster that goes on; `serve.delete(app_name)` takes it down.
    """

    def __init__(self, application: Application, app_name: str = "penstock-batch") -> None:
        self._application = application
        self.app_name = app_name
        self._began_serve = False
        self._deployed = False

    def start(self) -> Names:
        """Raises: ConfigError when the name is taken; EngineStartFailed with Serve's reason."""
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
        except RuntimeError as error:  # Serve's own
            why = self._why() or str(error)
            self.stop()
            raise EngineStartFailed(f"Application '{self.app_name}' cannot start: {why}") from error
        except BaseException:
            self.stop()
            raise
        return Names(self.app_name, found.name)

    def stop(self) -> None:
        """Frees what `start` took. Safe to call twice."""
        if not self._deployed:
            return
        self._deployed = False
        serve.delete(self.app_name)
        if self._began_serve and not serve.status().applications:
            serve.shutdown()

    def _why(self) -> str:
        """What Serve knows of each deployment; the end of it has the engine's own reason."""
        found = serve.status().applications.get(self.app_name)
        messages = [status.message for status in found.deployments.values()] if found else []
        return " ".join(message[-_SHOWN_CHARS:] for message in messages if message)

    def __enter__(self) -> Names:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def shared_engine(application: Application, app_name: str = "penstock-batch") -> SharedEngine:
    """`with shared_engine(application) as names:` deploys it, waits for it, and deletes it at the end."""
    return SharedEngine(application, app_name)
