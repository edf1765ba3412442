"""The Ray cluster that a test's process has started."""

from pathlib import Path

import ray


def session_folder() -> Path:
    """Where it keeps its logs and sockets; other clusters on the machine have others."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())
