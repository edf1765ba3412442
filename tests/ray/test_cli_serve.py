"""`penstock serve`, `chat` and their ends, with the simulator in place of a model."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.ray.command import Command, serving

FAST = ["--step-base-ms", "0"]
TWO_LENGTHS = ["--replies", json.dumps({"short": "word " * 29 + "end", "long": "word " * 999})]
SLOW = [*TWO_LENGTHS, "--step-base-ms", "100"]
NEVER_READY = ["--start-delay-s", "600"]


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def service(port: int) -> Iterator[Command]:
    with serving("echo", "--engine", "sim", "--port", str(port), "--api-key", "secret", *FAST) as command:
        yield command


def client(port: int, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def ask(port: int, text: str, model: str = "echo") -> Iterator[str]:
    stream = client(port).chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True
    )
    return (piece.choices[0].delta.content or "" for piece in stream)


def test_official_client_is_answered(service: Command, port: int):
    assert [model.id for model in client(port).models.list()] == ["echo"]
    assert "".join(ask(port, "water flows")) == "water flows"


def test_wrong_key_is_refused(service: Command, port: int):
    with pytest.raises(openai.AuthenticationError):
        client(port, key="guess").models.list()


def test_printed_curl_line_works(service: Command, port: int):
    (line,) = [line for line in service.out if line.startswith("curl ")]
    answer = subprocess.run(
        ["bash", "-c", f"export PENSTOCK_API_KEY=secret; {line}"], capture_output=True, text=True, timeout=60
    )
    assert '"content":"What is Penstock?"' in answer.stdout.replace(": ", ":")


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


def test_failing_engine_is_told_in_its_own_words(free_port: int):
    command = Command("echo", "--engine", "sim", "--port", str(free_port), "--start-error", "no luck today")
    assert command.exit_code() == 1
    assert "no luck today" in command.err[0]
    assert "Traceback" not in "\n".join([*command.out, *command.err])
    log = next(word for word in command.err[1].split() if word.endswith("serve.log."))
    assert "Traceback" in Path(log.removesuffix(".")).read_text()
    assert command.left() == []


def test_bad_engine_argument_is_exit_code_2(free_port: int):
    command = Command("echo", "--engine", "sim", "--port", str(free_port), "--max-modl-len", "7")
    assert command.exit_code() == 2
    assert "did you mean 'max_model_len'" in command.err[0]
    assert command.left() == []


@pytest.mark.parametrize("phase", ["Ray: starting", "Serve: starting", "echo: load"])
def test_signal_before_serving_leaves_nothing(phase: str, free_port: int):
    words = ["echo", "--engine", "sim", "--port", str(free_port), *NEVER_READY]
    with serving(*words, until=phase) as command:
        command.signal_group(signal.SIGINT)
        assert command.exit_code() == 128 + signal.SIGINT
        assert command.left() == []


def test_open_streams_may_finish_until_a_second_signal_cuts_them(free_port: int):
    with serving("slow", "--engine", "sim", "--port", str(free_port), *SLOW) as command:
        short, long = (ask(free_port, length, model="slow") for length in ("short", "long"))
        assert next(piece for piece in long if piece)
        begun = next(piece for piece in short if piece)
        command.signal_group(signal.SIGTERM)
        assert f"{begun}{''.join(short)}".split() == ["word"] * 29 + ["end"]
        command.signal_group(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(long)
        assert command.exit_code() == 0
        assert command.left() == []


def test_killed_work_leaves_nothing_and_its_neighbour_untouched(service: Command, port: int, free_port: int):
    with serving("other", "--engine", "sim", "--port", str(free_port)) as second:
        assert "".join(ask(free_port, "both at once", model="other")) == "both at once"
        second.work().kill()
        assert second.exit_code() == 128 + signal.SIGKILL
        assert second.left() == []
    assert "".join(ask(port, "still here")) == "still here"


def test_killed_command_leaves_nothing(service: Command):
    """The last test of the service that the others share."""
    service.kill()
    assert service.left() == []
