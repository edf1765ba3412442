"""`penstock serve --address`: a guest on a cluster that runs already."""

import signal
import urllib.request
from collections.abc import Iterator

import pytest
from ray import serve
from tests.cluster import Cluster
from tests.ray.command import Command, serving

pytestmark = pytest.mark.full


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Neighbour:
    def __call__(self) -> str:
        return "still here"


@pytest.fixture(scope="module")
def words(cluster: Cluster) -> Iterator[list[str]]:
    """Of a guest, beside an application that has the name that a guest has by default."""
    serve.run(Neighbour.bind(), name="penstock", route_prefix=None)
    yield ["guest", "--engine", "sim", "--address", cluster.address]
    assert serve.get_app_handle("penstock").remote().result() == "still here"
    serve.delete("penstock")


def applications() -> set[str]:
    return set(serve.status().applications)


def test_guest_removes_its_own_application_only(words: list[str], free_port: int):
    before = applications()
    with serving(*words, "--port", str(free_port), "--name", "guest") as command:
        told = "\n".join(command.out)
        assert "Ray: connecting" in told
        assert "guest: ready after" in told
        assert applications() == before | {"guest"}
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/health") as answer:
            assert answer.status == 200
        command.signal_group(signal.SIGTERM)
        assert command.exit_code() == 0
        assert command.left() == []
    assert applications() == before


def test_guest_stopped_while_it_loads_leaves_no_application(words: list[str], free_port: int):
    slow = ["--port", str(free_port), "--name", "slow", "--start-delay-s", "600"]
    with serving(*words, *slow, until="guest: load") as command:
        command.signal_group(signal.SIGTERM)
        assert command.exit_code() == 128 + signal.SIGTERM
    assert "slow" not in applications()


def test_name_that_is_taken_is_refused(words: list[str], free_port: int):
    command = Command(*words, "--port", str(free_port))
    assert command.exit_code() == 1
    assert "already runs an application named 'penstock'" in command.err[0]
    assert "penstock" in applications()
