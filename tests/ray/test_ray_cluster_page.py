"""docs/ray-cluster.md, word for word but for ports: its files, its commands, in its order.

A cluster of its own, for the page starts one. GPUs are only claimed, engines are simulators.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.ports import unused
from tests.ray.command import serving

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-cluster"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NO_AGENT_YET = "No available agent to submit job"
LIMIT_S = 120

pytestmark = [pytest.mark.full, pytest.mark.parity("S1")]


class Site:
    """The cluster of the page. folder: with the page's files. port: in place of its 8000."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, unused()
        blocks = BLOCK.findall((ROOT / "docs" / "ray-cluster.md").read_text())
        for kind, text in blocks:
            if kind in ("yaml", "python"):
                file = folder / text.partition("\n")[0].removeprefix("# ")
                file.parent.mkdir(exist_ok=True)
                file.write_text(text.replace("8000", str(self.port)))
        self.commands = [line for kind, text in blocks if kind == "bash" for line in text.splitlines()]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.gcs, self.dashboard = unused(), unused()
        inherited = {
            name: text for name, text in os.environ.items() if not name.startswith(("RAY_", "PENSTOCK_"))
        }
        self.environment = {
            **inherited,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": path,
            "PENSTOCK_ENGINE_CLS": "tests.standin:simulator",
            "PENSTOCK_API_KEY": KEY,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # in place of the page's, which is the user's own
            **dict([self.command("export RAY_AUTH_MODE").split()[1].split("=")]),
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
        }

    def command(self, start: str) -> str:
        """The page's command that begins so, without its comment."""
        (found,) = [line for line in self.commands if line.startswith(start)]
        return found.partition("  #")[0].rstrip()

    def run(self, start: str, *more: str) -> str:
        words = " ".join([self.command(start), *more])
        environment = {
            name: text
            for name, text in self.environment.items()
            if "ray start" not in words or name != "RAY_ADDRESS"
        }
        given: Any = {"shell": True, "cwd": self.folder, "env": environment, "timeout": LIMIT_S}
        deadline = time.monotonic() + LIMIT_S
        done = subprocess.run(words, **given, capture_output=True, text=True)
        while (
            NO_AGENT_YET in done.stderr and time.monotonic() < deadline
        ):  # Ray starts it after the dashboard
            time.sleep(1)
            done = subprocess.run(words, **given, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def answer(self, prompt: str) -> str:
        """By the application on the page's port, once it is healthy."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health")
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, self.run("serve status")
                time.sleep(0.3)
        client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY)
        return client.completions.create(model="qwen-0.5b", prompt=prompt).choices[0].text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("page"))
    short = tempfile.mkdtemp(prefix="page-")  # Ray's sockets allow no long path
    gpus = """--num-cpus 8 --num-gpus 4 --resources='{"accelerator_type:L4": 1}'"""
    ports = f"--port {site.gcs} --dashboard-port {site.dashboard} --temp-dir {short} --block"
    start = site.command("RAY_worker_niceness=0 ray start").removeprefix("RAY_worker_niceness=0 ")
    words = f"exec {start} {gpus} {ports}"
    environment = {name: text for name, text in site.environment.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        words, shell=True, env={**environment, "RAY_worker_niceness": "0"}, stdout=subprocess.DEVNULL
    ) as ray:
        try:
            wait_for_dashboard(site, ray)
            yield site
        finally:
            ray.send_signal(signal.SIGTERM)
            ray.wait(60)
            shutil.rmtree(short, ignore_errors=True)


def wait_for_dashboard(site: Site, ray: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert ray.poll() is None, "`ray start` has ended; stderr says why"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{site.dashboard}/api/gcs_healthz")
            return
        except urllib.error.HTTPError:  # it asks for the token
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    raise AssertionError("no dashboard")


def test_a_guest_serves_and_leaves(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(site.folder)
    words = site.command("penstock serve").split()[2:]
    address = site.environment["RAY_ADDRESS"]
    words = [address if word == "auto" else word for word in words]
    ours = {
        name: text
        for name, text in site.environment.items()
        if name.startswith(("PENSTOCK", "PYTHONPATH", "RAY_AUTH"))
    }
    with serving(*words, "--port", str(site.port), **ours) as command:
        assert "over there" in site.answer("over there")
        command.signal_group(signal.SIGTERM)
        assert command.exit_code() == 0


def test_a_file_is_deployed_and_answers_a_batch(site: Site):
    site.run("serve deploy")
    assert "over there" in site.answer("over there")
    assert "RUNNING" in site.run("serve status")
    (site.folder / "questions.jsonl").write_text('{"prompt": "row 1"}\n{"prompt": "row 2"}\n')
    site.run("penstock batch questions.jsonl -o answers.jsonl")
    rows = [json.loads(line) for line in (site.folder / "answers.jsonl").read_text().splitlines()]
    assert [row["generated_text"] for row in rows] == ["row 1", "row 2"]


def test_a_job_brings_its_own_modules(site: Site):
    site.run("ray job submit")
    assert "Please: over there" in site.answer("over there")
