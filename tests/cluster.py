"""The Ray cluster that tests share: Serve's HTTP, a dashboard, a bucket, two GPUs that are only claimed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private import client
from tests.bucket import S3, s3_server
from tests.standin import SIMULATED

ROOT = Path(__file__).parents[1]
ADAPTERS = "my_dynamic_lora_path"
"""The bucket of the founding documents, which name it."""


@dataclass(frozen=True)
class Cluster:
    """url: Serve's own HTTP; address: the GCS; dashboard: a URL; bucket: an empty one, named ADAPTERS.

    The environment of its processes says where the bucket is, and that all runs on CPU; see `environment`.
    """

    url: str
    address: str
    dashboard: str
    bucket: S3
    switch: Path

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """Replicas and actors that start now run a simulator in place of vLLM, see `tests.standin`."""
        self.switch.touch()
        try:
            yield
        finally:
            self.switch.unlink()


@contextmanager
def running(port: int, folder: Path) -> Iterator[Cluster]:
    """One node of eight logical CPUs and two logical GPUs. port: of Serve's HTTP. folder: for what stays."""
    look_often()
    switch = folder / "simulated"
    with s3_server(ADAPTERS) as bucket:
        inherited = {
            **bucket.environment,
            "PENSTOCK_ACCELERATOR": "cpu",
            "PENSTOCK_ENGINE_CLS": "tests.standin:engine",
            SIMULATED: str(switch),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        with environment(inherited):
            context: Any = ray.init(
                "local",
                num_cpus=8,
                num_gpus=2,
                resources={"accelerator_type:L4": 1},
                log_to_driver=False,
                object_store_memory=100 << 20,
            )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            address, dashboard = context.address_info["gcs_address"], f"http://{context.dashboard_url}"
            yield Cluster(f"http://127.0.0.1:{port}", address, dashboard, bucket, switch)
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Theirs within, ours again afterwards: tests without Ray run in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextmanager
def own_applications() -> Iterator[None]:
    """Applications that start within are gone at its end; those of others stay."""
    before = set(serve.status().applications)
    try:
        yield
    finally:
        for name in serve.status().applications.keys() - before:
            serve.delete(name)


def session_folder() -> Path:
    """Where the cluster keeps its logs and sockets; other clusters on the machine have others."""
    worker: Any = ray._private.worker  # pyright: ignore[reportAttributeAccessIssue]
    return Path(worker.global_worker.node.get_session_dir_path())


def look_often() -> None:
    """Serve's client looks once a second whether an application runs, or is gone: minutes in all tests."""
    client.CLIENT_POLLING_INTERVAL_S = min(0.2, client.CLIENT_POLLING_INTERVAL_S)  # an error where it is gone
