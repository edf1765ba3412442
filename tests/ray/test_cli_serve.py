"""`penstock serve` and `chat`, with the simulator in place of a model, on the shared cluster.

test_cli_serve_ends has the ends of commands that own their cluster.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml
from ray import serve
from tests.cluster import Cluster, own_applications
from tests.ray.command import Command, ask, client, serving

REPLIES = {"short": "word " * 29 + "end", "long": "word " * 999}
SLOW = ["--replies", json.dumps(REPLIES), "--step-base-ms", "100"]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the service notes itself, and nothing else that runs on this machine does."""
    return str(tmp_path_factory.mktemp("noted"))


@pytest.fixture(scope="module")
def service(cluster: Cluster, port: int, noted: str) -> Iterator[Command]:
    words = ["echo", "--engine", "sim", "--port", str(port), "--api-key", "secret", *SLOW]
    guest = ["--address", cluster.address, "--name", "cli"]
    with own_applications(), serving(*words, *guest, TMPDIR=noted, PENSTOCK_ADMIN_KEY="admin") as command:
        yield command


def test_official_client_is_answered(service: Command, port: int):
    assert [model.id for model in client(port).models.list()] == ["echo"]
    assert "".join(ask(port, "water flows", "echo")) == "water flows"


def test_wrong_key_is_refused(service: Command, port: int):
    with pytest.raises(openai.AuthenticationError):
        client(port, key="guess").models.list()


def test_printed_curl_line_works(service: Command, port: int):
    (line,) = [line for line in service.out if line.startswith("curl ")]
    answer = subprocess.run(
        ["bash", "-c", f"export PENSTOCK_API_KEY=secret; {line}"], capture_output=True, text=True, timeout=60
    )
    assert '"content":"What is Penstock?"' in answer.stdout.replace(": ", ":")


def test_a_service_without_a_file_is_changed_until_it_ends(service: Command, port: int, noted: str):
    def run(*words: str) -> str:
        line = [
            sys.executable,
            "-m",
            "penstock.cli",
            *words,
            "--url",
            f"localhost:{port}",
            "--admin-key",
            "admin",
        ]
        environment = {**os.environ, "TMPDIR": noted}
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run("add", "other", "--engine", "sim", "--alias", "more")
    assert "No file says so" in said
    _, _, shown = said.partition("The fleet as a file:\n\n")
    assert [one["model_loading_config"]["model_id"] for one in yaml.safe_load(shown)["llm_configs"]] == [
        "echo",
        "other",
    ]
    assert "".join(ask(port, "water flows", "more")) == "water flows"
    run("remove", "other")
    assert [model.id for model in client(port).models.list()] == ["echo"]


def test_every_phase_is_shown_with_its_seconds(service: Command):
    told = "\n".join(service.out)
    for part in ("Ray: ready after", "Serve: ready after", "echo: ready after", "Service: ready after"):
        assert part in told


def test_chat_answers_each_line(service: Command, port: int):
    talk = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "chat", "--url", f"127.0.0.1:{port}", "--api-key", "secret"],
        input="one fish\ntwo fish\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (talk.returncode, talk.stdout, talk.stderr) == (0, "one fish\ntwo fish\n", "")


def test_taken_port_is_told_before_ray_starts(service: Command, port: int):
    second = Command("other", "--engine", "sim", "--port", str(port))
    assert second.exit_code() == 1
    assert f"Port {port} on 127.0.0.1 is taken by process" in second.err[0]
    assert second.out == []


def test_failing_engine_is_told_in_its_own_words(cluster: Cluster, free_port: int):
    words = ["echo", "--engine", "sim", "--port", str(free_port), "--address", cluster.address]
    command = Command(*words, "--name", "failing", "--start-error", "no luck today")
    assert command.exit_code() == 1
    assert "no luck today" in command.err[0]
    assert "Traceback" not in "\n".join([*command.out, *command.err])
    log = next(word for word in command.err[1].split() if word.endswith("serve.log."))
    assert "Traceback" in Path(log.removesuffix(".")).read_text()
    assert command.left() == []
    assert "failing" not in serve.status().applications


def test_bad_engine_argument_is_exit_code_2(cluster: Cluster, free_port: int):
    words = ["echo", "--engine", "sim", "--port", str(free_port), "--address", cluster.address]
    command = Command(*words, "--max-modl-len", "7")
    assert command.exit_code() == 2
    assert "did you mean 'max_model_len'" in command.err[0]
    assert command.left() == []


def penstock(*words: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def test_models_and_status_say_what_is_served(service: Command, port: int):
    there = ["--url", f"127.0.0.1:{port}", "--api-key", "secret"]
    assert penstock("models", *there) == (0, "echo  16,384 tokens\n", "")
    code, out, _ = penstock("status", *there)
    assert (code, "echo  1 of 1 replicas ready" in out) == (0, True)
    code, out, _ = penstock("status", *there, "--json")
    assert (code, json.loads(out)["models"]["echo"]["ready"]) == (0, 1)
    code, out, err = penstock("models", *there[:2], "--api-key", "guess")
    assert (code, out, "Give the key with --api-key" in err) == (1, "", True)


def test_stop_needs_a_service_of_ones_own(service: Command, noted: str, tmp_path: Path):
    code, out, err = penstock("stop", TMPDIR=str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    code, out, err = penstock("stop", "1", TMPDIR=noted)
    assert (code, out, f"(process {service.pid})" in err) == (2, "", True)
    code, out, err = penstock("logs", "nobody", TMPDIR=noted)
    assert (code, out, "There is no nobody; there are control, echo, gateway" in err) == (2, "", True)


def test_stop_lets_open_streams_finish_and_a_second_signal_waits_for_none(
    service: Command, port: int, noted: str
):
    """The last test of the service that the others share."""
    short, long = (ask(port, length, "echo") for length in REPLIES)
    assert next(piece for piece in long if piece)
    begun = next(piece for piece in short if piece)
    stop = Command(verb="stop", TMPDIR=noted)
    assert f"{begun}{''.join(short)}" == REPLIES["short"]
    service.signal_group(signal.SIGTERM)
    assert service.exit_code() == 0
    assert stop.exit_code() == 0
    assert stop.out[0].startswith(f"Stopping echo at http://127.0.0.1:{port} (process {service.pid});")
    assert stop.out[1].startswith("Stopped after ")
    assert "The application may still be on the cluster: see `serve status`." in service.out
    assert service.left() == []
    long.close()
