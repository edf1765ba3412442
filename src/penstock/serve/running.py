"""`penstock.serve.run`: a service from a script or a notebook, while the program or a block lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from penstock.config import GatewayConfig, LLMConfig
from penstock.errors import ConfigError, EngineStartFailed, reasons
from penstock.processes.quiet import quiet

_LOOK_S = 1.0
_BLOCKS: dict[str, RunningService] = {}
"""Services by name whose `with` block goes on."""


class RunningService:
    """A running service, until `stop`, the end of a `with` block or of the program. url: for clients.

    Of blocks of one name inside each other, the outermost one ends it.
    """

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

        if not ray.is_initialized():
            return
        with quiet():
            serve.delete(self._name)
            if self._own_ray:
                serve.shutdown()
                ray.shutdown()

    def wait(self) -> None:
        """Returns, and ends the service, at Ctrl-C. Raises: EngineStartFailed when it has gone by itself."""
        from ray import serve
        from ray.exceptions import ActorUnavailableError

        try:
            while True:
                with suppress(ActorUnavailableError):  # Serve's controller restarts, and its replicas stay
                    if self._name not in serve.status().applications:
                        break
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            return
        finally:
            self.stop()
        raise EngineStartFailed(f"The application '{self._name}' was deleted.")

    def __enter__(self) -> Self:
        _BLOCKS.setdefault(self._name, self)
        return self

    def __exit__(self, *exc: object) -> None:
        if _BLOCKS.get(self._name) is self:
            del _BLOCKS[self._name]
            self.stop()


def run(
    *configs: LLMConfig | Mapping[str, Any],
    port: int = 8000,
    host: str = "127.0.0.1",
    name: str = "penstock",
    blocking: bool = False,
    gateway: GatewayConfig | Mapping[str, Any] | None = None,
) -> RunningService:
    """Serves these models at one OpenAI-compatible address, on a port of the gateway's own.

    On the Ray cluster that this program is connected to, or that `ray.init()` finds, else on one that it
    starts. Called again under the same `name`, it changes the running service; where that fails, the old one
    goes on. gateway: as in a file; its `port` and `host` win. blocking: whether to return only at Ctrl-C.
    Raises: ConfigError, also for a second service under the name of one whose `with` block goes on;
    EngineStartFailed with the engine's reason.
    """
    if not configs:
        raise ConfigError("Name a model: run(LLMConfig(model_loading_config=...)).")
    import ray
    from ray import serve

    from penstock.serve.builders import build_openai_app

    given = GatewayConfig.from_argument({} if gateway is None else gateway, "gateway")
    own = {field: getattr(given, field) for field in given.model_fields_set}
    settings = GatewayConfig.from_argument({"port": port, "host": host, **own}, "gateway")
    if (block := _BLOCKS.get(name)) is not None and block.url != settings.local_url:
        raise ConfigError(
            f"A `with` block of this program serves {name!r} at {block.url}. Give the second service another "
            "`name`; to change the first one, give the same port."
        )
    service = RunningService(settings.local_url, name, own_ray=False)
    running: Mapping[str, Any] = {}
    try:
        with quiet(own=True):
            if not ray.is_initialized():
                service = RunningService(settings.local_url, name, own_ray=_start_ray())
            before = serve.status()
            running = before.applications
            if not (before.proxies or running):
                serve.start(proxy_location="Disabled")  # the gateway has a port of its own
            app = build_openai_app({"llm_configs": list(configs), "gateway": settings})
            serve.run(app, name=name, route_prefix=None)
    except BaseException as error:
        why = _why(name, error)
        if name not in running:
            service.stop()
        if why:
            raise EngineStartFailed(why) from error
        raise
    if blocking:
        print(f"Serving at {service.url}. Ctrl-C stops.", flush=True)
        service.wait()
    return service


def _start_ray() -> bool:
    """Whether a Ray was started, and not one joined that others use."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 costs tokens where CPUs are full
    try:
        ray.init(resources={}, include_dashboard=False, log_to_driver=False)
    except ValueError:  # a cluster that is there has its resources
        ray.init(log_to_driver=False)
        return False
    return True


def _why(name: str, error: BaseException) -> str:
    """Why its deployments have failed, where Serve says so by this error; "" for any other."""
    import ray
    from ray import serve

    if not isinstance(error, RuntimeError) or not ray.is_initialized():
        return ""
    found = serve.status().applications.get(name)
    return reasons(one.message for one in found.deployments.values()) if found else ""
