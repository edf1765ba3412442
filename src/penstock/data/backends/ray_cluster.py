"""Ray for jobs: starts a cluster, or connects to one, unless this process is connected already."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil

from penstock import ray_version
from penstock.errors import Unavailable
from penstock.processes import cpu_turns
from penstock.processes.lean_ray import lean_start
from penstock.processes.tree import end
from penstock.temporary_folder import short_place

_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum is 75 MiB; little passes through it
_SOCKET_NAME_BYTES = 67  # of Ray's sockets below the temporary folder
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 costs an engine tokens where CPUs are full
    "RAY_USAGE_STATS_ENABLED": "0",
}

_NOT_CONNECTED = (
    "Ray at {!r} does not take this command: {}. If a cluster answers there, it may ask for a token: set "
    "RAY_AUTH_MODE=token, and put the cluster's into ~/.ray/auth_token. See docs/ray-cluster.md."
)
"""Ray does not tell a wrong token from silence."""
_TIMED_OUT = "timed out during startup"
_KILL_S = 5.0
_AGAIN = "Ray did not start within its limit of 30 s on this busy machine; trying once more."


def init_ray(on_message: Callable[[str], None] | None = None, **options: Any) -> Any:
    """`ray.init`, repeated once where it starts Ray and exceeds its own limit of 30 s.

    on_message: called with a sentence that says so.
    Raises: Unavailable when it exceeds it again, for a cluster that refuses or does not answer, and for a
    version of Ray that is too old; what `ray.init` raises where it starts Ray.
    """
    ray_version.check()
    import ray

    this = psutil.Process()
    before = this.children()
    own = options.get("address") == "local"
    for is_last in (False, True):
        try:
            if not own:
                return ray.init(**options)
            require_token()
            with cpu_turns.children_wait(), lean_start(shows_output=options.get("log_to_driver", True)):
                return ray.init(**options)
        except Exception as error:  # Ray raises plain ones
            if text := ray_version.explain_mismatch(str(error)):
                raise Unavailable(text) from error
            if not own:
                raise Unavailable(_NOT_CONNECTED.format(options.get("address"), error)) from error
            if _TIMED_OUT not in str(error):
                raise
            ray.shutdown()
            end([child for child in this.children() if child not in before], 0.0, _KILL_S)
            if is_last:
                raise Unavailable(
                    "Ray did not start within 30 s, twice: this machine is too busy. Try again, or start a "
                    "cluster with `ray start --head` and name it with --address."
                ) from error
            if on_message is not None:
                on_message(_AGAIN)
    raise AssertionError


def require_token() -> None:
    """Makes the next Ray that this process starts refuse who has no token, unless RAY_AUTH_MODE is set.

    Ray does the same from 2.59 on. An older one has read the variable when it was imported.
    """
    minor = ray_version.minor_version()
    if "RAY_AUTH_MODE" not in os.environ and minor is not None and minor < ray_version.ASKS_FOR_TOKEN:
        from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")


def connection_options(address: str | None, *, cpus: int, verbose: bool) -> dict[str, Any]:
    """Options of `init_ray`; sets variables that Ray reads when it is imported or started.

    cpus: for the workers of a cluster started here; Ray counts them, it does not measure them.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {
        "address": address or "local",
        "configure_logging": verbose,
        "log_to_driver": verbose,
    }
    if address is None:
        options["num_cpus"] = max(cpus, os.cpu_count() or 1)
        options["object_store_memory"] = _OBJECT_STORE_BYTES
        options["include_dashboard"] = False
        if (place := short_place(_SOCKET_NAME_BYTES)) is not None:
            os.environ.setdefault("RAY_TMPDIR", place)
    return options


def connect(
    address: str | None, *, cpus: int, verbose: bool, on_message: Callable[[str], None] | None = None
) -> Callable[[], None]:
    """Returns what closes the connection if it was made here, and stops a cluster that was started here.

    Raises: Unavailable when no cluster answers at `address`.
    """
    options = connection_options(address, cpus=cpus, verbose=verbose)
    import ray

    if ray.is_initialized():
        return lambda: None
    try:
        init_ray(on_message, **options)
    except Unavailable:
        raise
    except Exception as error:  # Ray raises plain ones when a node does not come up
        raise Unavailable(f"Ray cannot be started here: {error}") from error
    return ray.shutdown
