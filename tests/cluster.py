"""The Ray cluster that a test's process has started."""

from pathlib import Path

import ray
from ray.serve._private import client


def session_folder() -> Path:
    """Where it keeps its logs and sockets; other clusters on the machine have others."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def look_often() -> None:
    """Serve's client looks once a second whether an application runs, or is gone: minutes in all tests."""
    client.CLIENT_POLLING_INTERVAL_S = min(0.2, client.CLIENT_POLLING_INTERVAL_S)  # an error where it is gone
