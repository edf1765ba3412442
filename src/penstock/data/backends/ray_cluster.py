"""Ray for jobs: a cluster of one's own, one that runs already, or the one that this process is part of."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil

from penstock.errors import Unavailable

_OBJECT_STORE_BYTES = 80 << 20  # Ray takes no less than 75 MiB; rows of one call are all that passes
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 costs an engine 15 to 20 % of its tokens
    "RAY_USAGE_STATS_ENABLED": "0",
}

_TIMED_OUT = "timed out during startup"
_END_S = 5.0


def init_ray(**wishes: Any) -> Any:
    """`ray.init`. Where Ray is started here and its own limit of 30 s was too short, once more.

    Raises: Unavailable when it was too short again; what `ray.init` raises.
    """
    import ray

    here = psutil.Process()
    before = here.children()
    for is_last in (False, True):
        try:
            return ray.init(**wishes)
        except Exception as error:  # Ray raises plain ones
            if wishes.get("address") != "local" or _TIMED_OUT not in str(error):
                raise
            ray.shutdown()
            _end([child for child in here.children() if child not in before])
            if is_last:
                raise Unavailable(
                    "Ray did not start within 30 s, twice: this machine is too busy. Try again, or start a "
                    "cluster with `ray start --head` and name it by --address."
                ) from error
    raise AssertionError


def _end(processes: list[psutil.Process]) -> None:
    """What a start that was given up has left."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, _END_S)


class RayCluster:
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
            init_ray(**wishes)
        except Unavailable:
            raise
        except Exception as error:  # Ray raises plain ones when a node does not come up
            what = (
                "Ray cannot be started here" if address is None else f"No Ray cluster answers at {address!r}"
            )
            raise Unavailable(f"{what}: {error}") from error

    def disconnect(self) -> None:
        import ray

        if self._ours:
            ray.shutdown()
