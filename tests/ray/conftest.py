"""One Ray cluster with Serve for all tests of this folder, ended also when they fail."""

import os
import socket

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def serve_url():
    """URL of Serve's own HTTP, on a cluster of eight logical CPUs."""
    import ray
    from ray import serve
    from tests.cluster import look_often

    look_often()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
