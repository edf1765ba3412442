"""The crew that an order asks for: engines of one's own, a URL, or a running application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.data.backends.protocol import Backend
from penstock.data.backends.ray_cluster import RayCluster
from penstock.data.job.spec import Engines
from penstock.data.job.worker_pool import Alone, Crew
from penstock.data.rows.request import Kind
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import LLMConfig


def hire(
    engines: Engines,
    config: LLMConfig | None,
    *,
    kind: Kind = "generate",
    api_key: str | None = None,
    verbose: bool = False,
) -> Crew:
    """config: of engines of one's own. kind: what they are asked for. Raises: ConfigError."""
    if engines.url is not None:
        return Alone(lambda: _url(engines, api_key))
    if engines.app is not None:
        return _Application(engines, verbose=verbose)
    if config is None:
        raise ConfigError("Say who shall answer: a model or a config, a URL, or an application.")
    from penstock.data.backends.engine_config import with_runner
    from penstock.data.job.ray_workers import Actors

    size = engines.replicas or replicas(config)
    return Actors(with_runner(config, kind), size, address=engines.address, verbose=verbose)


_TIMEOUT_S = 3600.0
"""Of one request to a URL: a service that takes it and never answers must not keep the last row for ever."""


class _Application(Alone):
    """Replicas that Ray Serve keeps on a cluster that runs already."""

    def __init__(self, engines: Engines, *, verbose: bool) -> None:
        from penstock.data.backends.replica_set import ReplicaSet

        super().__init__(lambda: ReplicaSet(engines.app or "", engines.deployment))
        self._address, self._verbose = engines.address or "auto", verbose
        self._cluster: RayCluster | None = None

    async def open(self) -> None:
        self._cluster = self._cluster or RayCluster(self._address, cpus=0, verbose=self._verbose)

    async def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.disconnect()


def replicas(config: LLMConfig) -> int:
    """How many engines a config asks for; the most, where it gives a range."""
    scaling = config.deployment_config.get("autoscaling_config") or {}
    most = scaling.get("max_replicas") or config.deployment_config.get("num_replicas") or 1
    return most if isinstance(most, int) else 1


def _url(engines: Engines, api_key: str | None) -> Backend:
    from penstock.data.backends.openai_service import OpenAIService

    assert engines.url is not None
    return OpenAIService(
        engines.url,
        api_key=api_key,
        model=engines.model,
        max_concurrency=engines.concurrency,
        timeout_s=_TIMEOUT_S,
    )
