"""Ray and Serve as this command uses them: a cluster of its own, or one that runs already and stays.

Blocking calls only. They must all come from one thread that lives as long as the process: the kernel ends
what Ray started as soon as the thread that started it ends (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.config import LLMConfig
from penstock.config.derive.prefill import halves
from penstock.config.derive.serve_options import replica_range, reserved
from penstock.config.schema.processing import own_deployment
from penstock.data.backends.ray_cluster import connection_options, init_ray
from penstock.errors import Unavailable
from penstock.serve import controller_pace

_ENVIRONMENT = {
    # Serve's control loop: slow while nothing happens.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": controller_pace.CALLBACK,
    # What fails its health checks hangs, or has lost what it needs: no grace, so that clients ask again soon.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Each replica and each handle passes its counters to Ray ten times a second; Ray reports every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}
_LOOK_S = 0.1


class Cluster:
    """A connection to Ray. Without an `address` Ray is started here, and ends with `leave`."""

    def __init__(
        self,
        address: str | None,
        *,
        cpus: int,
        passes_objects: bool,
        verbose: bool,
        on_message: Callable[[str], None],
    ) -> None:
        """cpus: what the application needs; Ray counts them, it does not measure them.
        passes_objects: whether the application needs more of Ray's object store than its least.

        on_message: called with what users should know while Ray starts.
        Raises: Unavailable when no cluster answers at `address`, or one of another version does.
        """
        self.own = address is None
        self._started_serve = False
        options = connection_options(address, cpus=cpus, verbose=verbose)
        if passes_objects:
            options.pop("object_store_memory", None)
        if self.own:
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        context = init_ray(on_message, **options)
        self.log_dir = os.path.join(context.address_info["session_dir"], "logs")

    def start_serve(self, log_encoding: str) -> None:
        """Starts Serve without its own HTTP: the gateway opens the public port itself.

        log_encoding: of Serve's own logs, TEXT or JSON.
        """
        import ray
        from ray import serve

        actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        if not any(actor["namespace"] == "serve" for actor in actors):
            serve.start(proxy_location="Disabled", logging_config={"encoding": log_encoding})
            self._started_serve = True

    def refuse_taken(self, name: str) -> None:
        """Raises: Unavailable when the cluster runs an application of this name already."""
        from ray import serve

        if name in serve.status().applications:
            raise Unavailable(
                f"The cluster already runs an application named {name!r}. Choose another --name."
            )

    def here(self) -> str:
        """Ray's resource that only the node of this process has."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        (node,) = [node for node in ray.nodes() if node["NodeID"] == own]
        names = [name for name in node["Resources"] if name.startswith("node:")]
        return next(name for name in names if name != "node:__internal_head__")

    def niceness(self) -> int:
        """At which niceness this cluster runs its workers."""
        import ray

        asked: Any = ray.remote(num_cpus=0)(lambda: os.nice(0))
        return ray.get(asked.remote(), timeout=30)

    def remove(self, name: str) -> None:
        """Ends the application: its replicas finish what they stream, within their own time limits."""
        from ray import serve

        serve.delete(name, _blocking=False)
        while name in serve.status().applications:
            time.sleep(_LOOK_S)

    def leave(self) -> None:
        """Disconnects. Ends Ray if it was started here, and Serve if it was and nobody else uses it."""
        import ray
        from ray import serve

        if not self.own and self._started_serve and not serve.status().applications:
            serve.shutdown()
        ray.shutdown()


def cpus_needed(configs: Iterable[LLMConfig]) -> int:
    """CPUs that all replicas of `configs`, and of their preprocessors, reserve at their most."""
    configs = list(configs)
    deployed = [half for config in configs for half in halves(config)]
    options = [half.get_serve_options() for half in deployed] + preprocessors(deployed)
    cpus = (replica_range(one)[1] * sum(bundle.get("CPU", 0) for bundle in reserved(one)) for one in options)
    return math.ceil(sum(cpus))


def preprocessors(configs: Iterable[LLMConfig]) -> list[dict[str, Any]]:
    """Serve's options of those that are deployments of their own."""
    options = [own_deployment(config.preprocessor_options) for config in configs]
    return [each for each in options if each is not None]
