"""How `penstock serve` ends that owns its cluster, as it does in every test here: nothing may be left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from tests.ports import unused
from tests.ray.command import OF_NO_USE, Command, ask, serving

from penstock.serve.controller_pace import CALLBACK

pytestmark = pytest.mark.full

REPLIES = {"short": "word " * 29 + "end", "long": "word " * 999}
SLOW = ["--replies", json.dumps(REPLIES), "--step-base-ms", "100"]


def test_failing_engine_leaves_nothing(free_port: int):
    command = Command("echo", "--engine", "sim", "--port", str(free_port), "--start-error", "no luck today")
    assert command.exit_code() == 1
    assert "no luck today" in command.err[0]
    assert command.left() == []


def test_bad_engine_argument_leaves_nothing(free_port: int):
    command = Command("echo", "--engine", "sim", "--port", str(free_port), "--max-modl-len", "7")
    assert command.exit_code() == 2
    assert "did you mean 'max_model_len'" in command.err[0]
    assert command.left() == []


@pytest.mark.parametrize("phase", ["Ray: starting", "Serve: starting", "echo: load"])
def test_signal_before_serving_leaves_nothing(phase: str, free_port: int):
    words = ["echo", "--engine", "sim", "--port", str(free_port), "--start-delay-s", "600"]
    with serving(*words, until=phase) as command:
        command.signal_group(signal.SIGINT)
        assert command.exit_code() == 128 + signal.SIGINT
        assert command.left() == []


def test_open_streams_may_finish_until_a_second_signal_cuts_them(free_port: int):
    with serving("slow", "--engine", "sim", "--port", str(free_port), *SLOW) as command:
        short, long = (ask(free_port, length, "slow") for length in REPLIES)
        assert next(piece for piece in long if piece)
        begun = next(piece for piece in short if piece)
        command.signal_group(signal.SIGTERM)
        assert f"{begun}{''.join(short)}" == REPLIES["short"]
        command.signal_group(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(long)
        assert command.exit_code() == 0
        assert command.left() == []


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_without_ray_streams_break_off_and_the_command_ends_at_once(name: str, free_port: int):
    with serving("slow", "--engine", "sim", "--port", str(free_port), *SLOW) as command:
        long = ask(free_port, "long", "slow")
        assert next(piece for piece in long if piece)
        (process,) = [process for process in command.living() if process.name() == name]
        process.kill()
        with pytest.raises(openai.APIError):  # they wait for another replica until their gateway is ended
            list(long)
        assert command.exit_code() == 1
        assert f"its process '{name}' is gone" in command.err[0]
        assert command.left() == []


def test_killed_work_leaves_nothing_and_its_neighbour_untouched(free_port: int):
    words = ["first", "--engine", "sim", "--port", str(free_port)]
    with serving(*words) as first:
        port = unused()
        with serving("second", "--engine", "sim", "--port", str(port)) as second:
            assert "".join(ask(port, "both at once", "second")) == "both at once"
            second.work().kill()
            assert second.exit_code() == 128 + signal.SIGKILL
            assert second.left() == []
        assert "".join(ask(free_port, "still here", "first")) == "still here"
        first.kill()
        assert first.left() == []


def test_own_cluster_runs_nothing_that_nothing_uses(free_port: int):
    with serving("lean", "--engine", "sim", "--port", str(free_port)) as command:
        assert "".join(ask(free_port, "served all the same", "lean")) == "served all the same"
        assert command.scripts().isdisjoint(OF_NO_USE)
        (controller,) = [one for one in command.living() if "ray::ServeController" in one.cmdline()[0]]
        assert controller.environ()["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"] == CALLBACK
        assert controller.environ()["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] == "1"


def test_own_cluster_lets_in_who_reads_its_token_and_nobody_else(free_port: int, tmp_path: Path):
    with serving("mine", "--engine", "sim", "--port", str(free_port), HOME=str(tmp_path)) as command:
        (port,) = {one.laddr.port for one in command.gcs().net_connections("tcp") if one.status == "LISTEN"}
        assert not _connects(port, RAY_AUTH_MODE="disabled", HOME=str(tmp_path / "stranger"))
        assert _connects(port, RAY_AUTH_MODE="token", HOME=str(tmp_path))


def _connects(port: int, **environment: str) -> bool:
    program = f"import ray; ray.init('127.0.0.1:{port}', log_to_driver=False)"
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}).returncode == 0


def test_own_cluster_waits_for_a_cpu(free_port: int):
    with serving("turns", "--engine", "sim", "--port", str(free_port)) as command:
        assert "".join(ask(free_port, "in turns", "turns")) == "in turns"
        titles = {" ".join(process.cmdline()): process for process in command.living()}
        for name in ("gcs_server", "raylet/raylet", "ray::ServeReplica"):
            found = [process for title, process in titles.items() if name in title]
            assert found
            assert {os.sched_getscheduler(process.pid) for process in found} == {os.SCHED_BATCH}
