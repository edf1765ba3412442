"""Ray for jobs: a cluster of one's own, one that runs already, or the one that this process is part of."""

from __future__ import annotations

import os
from typing import Any

from penstock.errors import Unavailable

_OBJECT_STORE_BYTES = 80 << 20  # Ray takes no less than 75 MiB; rows of one call are all that passes
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 costs an engine 15 to 20 % of its tokens
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Cluster:
    """A connection, which `leave` ends where it was made here; with it the cluster, if that was, too."""

    def __init__(self, address: str | None, *, cpus: int, verbose: bool = False) -> None:
        """cpus: what workers need; Ray counts them, it does not measure them.

        Raises: Unavailable when no cluster answers at `address`.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        wishes: dict[str, Any] = {
            "address": address or "local",
            "configure_logging": verbose,
            "log_to_driver": verbose,
        }
        if address is None:
            wishes["num_cpus"] = max(cpus, os.cpu_count() or 1)
            wishes["object_store_memory"] = _OBJECT_STORE_BYTES
            wishes["include_dashboard"] = False
        try:
            ray.init(**wishes)
        except Exception as error:  # Ray raises plain ones when a node does not come up
            what = (
                "Ray cannot be started here" if address is None else f"No Ray cluster answers at {address!r}"
            )
            raise Unavailable(f"{what}: {error}") from error

    def leave(self) -> None:
        import ray

        if self._ours:
            ray.shutdown()
