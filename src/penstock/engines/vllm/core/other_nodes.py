"""The other nodes of an engine whose workers are Ray actors: their files are fetched there, too.

Light: Ray is not imported where nothing else has connected to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import DownloadFailed
from penstock.sources import every_node

_CALLS = 8  # at a time, of adapters that are fetched side by side


class OtherNodes:
    """A process on each other node of this actor's placement group, if there are any, until `close`."""

    def __init__(self) -> None:
        """Blocks for a question to Ray."""
        self._processes = _processes() if "ray" in sys.modules else []
        if self._processes:
            every_node.use(self.begin)

    def begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], list[Any]]:
        """Starts a call in each of the processes. Returns what waits for the results."""
        calls = [process.run.remote(function, args, kwargs) for process in self._processes]
        return lambda: _results(calls)

    def close(self) -> None:
        """Ends the processes, and calls that wait for them. Idempotent."""
        processes, self._processes = self._processes, []
        if processes:
            import ray

            every_node.leave(self.begin)
            for process in processes:
                ray.kill(process)


class _Process:
    """environment: of the engine's own process, with its secrets; what the node itself sets stays."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return function(*args, **kwargs)


def _processes() -> list[Any]:
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    if group is None:
        return []
    nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
    make: Any = ray.remote(_Process)
    nodes.discard(ray.get_runtime_context().get_node_id())
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CALLS}
    return [make.options(**options, scheduling_strategy=place).remote(dict(os.environ)) for place in places]


def _results(calls: list[Any]) -> list[Any]:
    """Raises: what a call raised; DownloadFailed when a node has gone."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(calls)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise DownloadFailed(f"Another node of the engine cannot fetch its files: {error}") from error
