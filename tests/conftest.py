"""What tests of every tier need: the tiers themselves, and the one Ray cluster."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, Phase, settings
from tests.ports import unused

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

get_temp_dir()  # of multiprocessing, for this process: a test's own folder is too long for its sockets

logging.getLogger("penstock").setLevel(logging.WARNING)  # vLLM changes the root's where it is imported

_ALWAYS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fuzz", max_examples=10_000, **_ALWAYS)
settings.register_profile("suite", max_examples=30, derandomize=True, phases=[Phase.generate], **_ALWAYS)
settings.load_profile("suite")

if "PENSTOCK_USAGE" not in os.environ:  # a worker has its controller's: services of other runs have the cache
    os.environ["PENSTOCK_USAGE"] = mkdtemp(prefix="penstock-usage-")
    atexit.register(rmtree, os.environ["PENSTOCK_USAGE"], ignore_errors=True)

pytest_plugins = ["tests.tiers", "tests.costs", "tests.limits"]


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses now."""
    return unused()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """As `monkeypatch.setattr`, for functions: the test fails where this process never called the new one."""
    uncalled: list[object] = []

    def patch(*where: object) -> None:
        *place, function = where

        def noted(*args: object, **kwargs: object) -> object:
            with suppress(ValueError):
                uncalled.remove(where)
            return function(*args, **kwargs)

        uncalled.append(where)
        monkeypatch.setattr(*place, noted)

    yield patch
    assert not uncalled, f"replaced and never called: {uncalled}"


@pytest.fixture(scope="module")
def routers_pickled_once() -> Iterator[None]:
    """Ray pickles the class by which a deployment's handles route, 40 ms of CPU for each that is made."""
    from ray.serve.config import RequestRouterConfig

    pickle, pickled = RequestRouterConfig._serialize_request_router_cls, dict[object, bytes]()

    def pickle_once(config: RequestRouterConfig) -> None:
        name = config.request_router_class
        if name in pickled:
            config.set_serialized_request_router_cls(pickled[name])
        else:
            pickle(config)
            pickled[config.request_router_class] = config.get_serialized_request_router_cls()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestRouterConfig, "_serialize_request_router_cls", pickle_once)
        yield


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full tier runs: examples and founding documents on real engines."""
    return request.config.getoption("full")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The Ray cluster of all tests that need one, see `tests.cluster`; ended also when they fail."""
    from tests.cluster import running

    with running(unused(), tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(scope="session")
def serve_url(cluster) -> str:
    """URL of Serve's own HTTP on the shared cluster."""
    return cluster.url


@pytest.fixture
def simulated(cluster, full: bool) -> Iterator[bool]:
    """Whether vLLM configs run on a simulator here, as in the fast tier. It knows the demo model's words."""
    if full:
        yield False
    else:
        with cluster.simulated():
            yield True
