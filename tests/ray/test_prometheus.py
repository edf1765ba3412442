"""Prometheus itself scrapes a service as deploy/prometheus says, and runs every query of the dashboard.

Where it is not installed (`apt-get install prometheus`), tests/ray/test_served_demo.py still holds each query
against the series of a service. A service of its own: the scrape configuration has the key of one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from tests.dashboard import DEPLOY, queries
from tests.ports import unused
from tests.ray.command import serving

KEY = "key-of-the-service"
LIMIT_S = 60

pytestmark = [
    pytest.mark.full,
    pytest.mark.parity("S28"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    port = unused()
    with serving("m", "--engine", "sim", "--port", str(port), PENSTOCK_API_KEY=KEY):
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)


@pytest.fixture(scope="module")
def prometheus(client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL. The file as it is, but for the target and the pace."""
    folder, port = tmp_path_factory.mktemp("prometheus"), unused()
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{client.base_url.port}").replace(": 15s", ": 1s")
    (folder / "prometheus.yml").write_text(config)
    (folder / "penstock.key").write_text(KEY)
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    ) as running:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()


def use(client: OpenAI) -> None:
    """An answer, a stream and a refusal."""
    client.completions.create(model="m", prompt="one two three")
    for _ in client.completions.create(model="m", prompt="one two three", stream=True):
        pass
    with pytest.raises(BadRequestError):
        client.completions.create(model="m", prompt="one", temperature=-1)


def result(url: str, query: str) -> list[object]:
    """Of a query, now. Raises: AssertionError with what Prometheus says of it."""
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(asked) as answer:
            return json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except (urllib.error.URLError, ConnectionError):
        return []  # it is starting


def test_prometheus_understands_the_file(tmp_path: Path):
    shutil.copyfile(DEPLOY / "prometheus" / "prometheus.yml", tmp_path / "prometheus.yml")
    (tmp_path / "penstock.key").write_text(KEY)
    words = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_gives_something(client: OpenAI, prometheus: str):
    silent = [query for query in queries() if "penstock_adapter" not in query]  # the model has none
    deadline = time.monotonic() + LIMIT_S
    while silent and time.monotonic() < deadline:
        use(client)
        time.sleep(1)  # a scrape
        silent = [query for query in silent if not result(prometheus, query)]
    assert silent == []
