"""`penstock serve --address` where no Ray cluster is: told at once, before Ray tries for long."""

from tests.ray.command import Command


def test_address_without_a_cluster_is_told(free_port: int):
    words = ["--address", f"127.0.0.1:{free_port}", "--port", str(free_port)]  # nobody is there
    command = Command("guest", "--engine", "sim", *words)
    assert command.exit_code() == 1
    assert f"No Ray cluster answers at '127.0.0.1:{free_port}'" in command.err[0]
