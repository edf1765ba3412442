"""`penstock.serve.run`: a service from a script or a notebook, while the program or a block lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Self

from penstock.config import GatewayConfig, LLMConfig
from penstock.errors import ConfigError, EngineStartFailed
from penstock.processes.quiet import quiet

_LOOK_S = 1.0
_SHOWN_CHARS = 2_000


class RunningService:
    """A running service, until `stop`, the end of a `with` block or of the program. url: for clients."""

    def __init__(self, url: str, name: str, *, own_ray: bool) -> None:
        self.url, self._name, self._own_ray = url, name, own_ray
        self._stopped = False

    def stop(self) -> None:
        """Ends it, and the Ray that was started for it. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        import ray
        from ray import serve

        with quiet():
            serve.delete(self._name)
            if self._own_ray:
                serve.shutdown()
                ray.shutdown()

    def wait(self) -> None:
        """Returns, and ends the service, at Ctrl-C. Raises: EngineStartFailed when it has gone by itself."""
        from ray import serve

        try:
            while self._name in serve.status().applications:
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            return
        finally:
            self.stop()
        raise EngineStartFailed(f"The application '{self._name}' was deleted.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def run(
    *configs: LLMConfig | Mapping[str, Any],
    port: int = 8000,
    host: str = "127.0.0.1",
    name: str = "penstock",
    blocking: bool = False,
    **gateway: Any,
) -> RunningService:
    """Serves these models at one OpenAI-compatible address, on a port of the gateway's own.

    On the Ray cluster that this program is connected to, else on one that it starts; called again under the
    same `name`, it changes the running service. gateway: more fields of `GatewayConfig`. blocking: whether to
    return only at Ctrl-C.
    Raises: ConfigError; EngineStartFailed with the engine's reason.
    """
    if not configs:
        raise ConfigError("Name a model: run(LLMConfig(model_loading_config=...)).")
    import ray
    from ray import serve

    from penstock.serve.builders import build_openai_app

    settings = GatewayConfig.model_validate({"port": port, "host": host, **gateway})
    own_ray = not ray.is_initialized()
    with quiet(own=True):
        if own_ray:
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 costs tokens where CPUs are full
            ray.init(include_dashboard=False, log_to_driver=False)
        before = serve.status()
        if not (before.proxies or before.applications):
            serve.start(proxy_location="Disabled")  # the gateway has a port of its own
        app = build_openai_app({"llm_configs": list(configs), "gateway": settings})
        service = RunningService(_url(settings), name, own_ray=own_ray)
        try:
            serve.run(app, name=name, route_prefix=None)
        except RuntimeError as error:  # Serve raises it for a failed deployment
            why = _why(name) or str(error)
            service.stop()
            raise EngineStartFailed(why) from error
        except BaseException:
            service.stop()
            raise
    if blocking:
        print(f"Serving at {service.url}. Ctrl-C stops.", flush=True)
        service.wait()
    return service


def _url(gateway: GatewayConfig) -> str:
    scheme = "http" if gateway.tls is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def _why(name: str) -> str:
    """Serve's messages about each deployment; their ends have the engine's reason."""
    from ray import serve

    found = serve.status().applications.get(name)
    messages = [status.message for status in found.deployments.values()] if found else []
    return " ".join(message[-_SHOWN_CHARS:] for message in messages if message)
