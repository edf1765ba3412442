"""`penstock serve` over HTTPS: a private authority's chain, the official client, two gateways on one port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from tests.cluster import Cluster, own_applications
from tests.http.certificates import write_chain
from tests.ports import unused
from tests.ray.command import Command, serving

pytestmark = [pytest.mark.full, pytest.mark.parity("X21")]

CONFIG = """
llm_configs:
  - model_loading_config: {model_id: echo}
    llm_engine: sim
gateway:
  processes: 2
  tls: {cert: certs/chain.crt, key: certs/chain.key}
"""
LIMIT_S = 60
GATEWAY = "ray::ServeReplica:tls:LLMRouter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the config, and the files that it names by relative paths."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "certs").mkdir()
    write_chain(folder / "certs")
    (folder / "models.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def service(cluster: Cluster, folder: Path) -> Iterator[Command]:
    """An application of its own, since no other has certificates."""
    words = [str(folder / "models.yaml"), "--port", str(unused()), "--api-key", "secret"]
    with own_applications(), serving(*words, "--address", cluster.address, "--name", "tls") as command:
        yield command


@pytest.fixture(scope="module")
def url(service: Command) -> str:
    """As the command prints it."""
    (line,) = [line for line in service.out if line.startswith("Serving ")]
    return next(word.rstrip(",;.") for word in line.split() if word.startswith("https://127.0.0.1:"))


def answers(url: str, folder: Path) -> list[str]:
    """Of the official client, which trusts the authority alone: whole and streamed, on a new connection."""
    with httpx.Client(verify=str(folder / "certs" / "ca.pem")) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", http_client=http)
        asked = {"model": "echo", "messages": [{"role": "user", "content": "water flows"}]}
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [event.choices[0].delta.content or "" for event in stream if event.choices]
    return [whole.choices[0].message.content, "".join(pieces)]


def gateways(number: int) -> list[psutil.Process]:
    """So many, once they are there; the oldest first."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        processes = psutil.process_iter(["cmdline", "create_time"])
        found = [one for one in processes if " ".join(one.info["cmdline"] or ()).startswith(GATEWAY)]
        if len(found) == number:
            return sorted(found, key=lambda one: one.info["create_time"])
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_the_official_client_trusts_the_authority_and_no_other_client_gets_in(url: str, folder: Path):
    assert answers(url, folder) == ["water flows"] * 2
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{url.replace('https', 'http')}/health")


def test_our_own_commands_take_the_authority_from_the_environment(url: str, folder: Path):
    words = [sys.executable, "-m", "penstock.cli", "models", "--url", url, "--api-key", "secret"]
    trusting = {**os.environ, "SSL_CERT_FILE": str(folder / "certs" / "ca.pem")}
    done = subprocess.run(words, env=trusting, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "echo  16,384 tokens\n"), done.stderr
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "certificate" in refused.stderr


def test_either_of_two_gateways_answers_when_the_other_is_killed(url: str, folder: Path):
    for _ in range(2):
        victim, _ = gateways(2)
        victim.send_signal(signal.SIGKILL)
        victim.wait(LIMIT_S)
        assert answers(url, folder) == ["water flows"] * 2
