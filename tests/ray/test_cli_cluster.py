"""`penstock serve --address`: a guest on a cluster that runs already."""

import signal
import urllib.request

import ray
from ray import serve
from tests.ray.command import Command, serving


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Neighbour:
    def __call__(self) -> str:
        return "still here"


def address() -> str:
    return ray.get_runtime_context().gcs_address


def test_guest_removes_its_own_application_only(serve_url: str, free_port: int):
    neighbour = serve.run(Neighbour.bind(), name="neighbour", route_prefix=None)
    words = ["guest", "--engine", "sim", "--address", address(), "--port", str(free_port), "--name", "guest"]
    with serving(*words) as command:
        told = "\n".join(command.out)
        assert "Ray: connecting" in told
        assert "guest: ready after" in told
        assert set(serve.status().applications) == {"neighbour", "guest"}
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/health") as answer:
            assert answer.status == 200
        command.signal_group(signal.SIGTERM)
        assert command.exit_code() == 0
        assert command.left() == []
    assert set(serve.status().applications) == {"neighbour"}
    assert neighbour.remote().result() == "still here"
    serve.delete("neighbour")


def test_guest_stopped_while_it_loads_leaves_no_application(serve_url: str, free_port: int):
    words = ["guest", "--engine", "sim", "--address", address(), "--port", str(free_port)]
    with serving(*words, "--start-delay-s", "600", until="guest: load") as command:
        command.signal_group(signal.SIGTERM)
        assert command.exit_code() == 128 + signal.SIGTERM
    assert "penstock" not in serve.status().applications


def test_name_that_is_taken_is_refused(serve_url: str, free_port: int):
    serve.run(Neighbour.bind(), name="penstock", route_prefix=None)
    command = Command("guest", "--engine", "sim", "--address", address(), "--port", str(free_port))
    assert command.exit_code() == 1
    assert "already runs an application named 'penstock'" in command.err[0]
    assert "penstock" in serve.status().applications
    serve.delete("penstock")


def test_address_without_a_cluster_is_told(free_port: int):
    words = ["--address", f"127.0.0.1:{free_port}", "--port", str(free_port)]  # nobody is there
    command = Command("guest", "--engine", "sim", *words)
    assert command.exit_code() == 1
    assert f"No Ray cluster answers at '127.0.0.1:{free_port}'" in command.err[0]
