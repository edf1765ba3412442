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
import yaml
from openai import BadRequestError, OpenAI
from tests.dashboard import DEPLOY, RULES, alerts, queries
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
    shutil.copyfile(RULES, folder / "rules.yml")
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
        client.completions.create(model="m", prompt="one", max_tokens=-1)


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


def test_prometheus_understands_the_files(tmp_path: Path):
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copyfile(DEPLOY / "prometheus" / name, tmp_path / name)
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


ALERTS = [
    # alert, series over the minutes from 0 on, when it fires, when not yet
    ("PenstockDown", {'up{job="penstock", instance="a"}': "1 0x9"}, "3m", "1m"),
    ("PenstockModelWithoutReplica", {'penstock_ready_replicas{model="m"}': "2 0x9"}, "4m", "2m"),
    (
        "PenstockReplicasMissing",
        {
            'penstock_ready_replicas{model="m"}': "3 2x30",
            'penstock_wanted_replicas{model="m"}': "3x30",
        },
        "13m",
        "9m",
    ),
    ("PenstockReplicasDie", {'penstock_failovers_total{model="m"}': "0x9 9x20"}, "12m", "5m"),
    (
        "PenstockErrors",
        {
            'penstock_requests_total{model="m", status="200"}': "0+980x20",
            'penstock_requests_total{model="m", status="502"}': "0+10x20",
            'penstock_requests_total{model="m", status="cut"}': "0+10x20",
        },
        "12m",
        "3m",
    ),
    (
        "PenstockSlowFirstToken",
        {
            'penstock_time_to_first_token_seconds_bucket{model="m", le="2"}': "0+80x30",
            'penstock_time_to_first_token_seconds_bucket{model="m", le="3"}': "0+100x30",
            'penstock_time_to_first_token_seconds_bucket{model="m", le="+Inf"}': "0+100x30",
        },
        "20m",
        "5m",
    ),
    ("PenstockRequestsQueue", {'penstock_queued_requests{model="m"}': "0 3x9"}, "5m", "1m"),
    (
        "PenstockBatchStalls",
        {
            'penstock_batch_queued_requests{model="m"}': "5x30",
            'penstock_batch_requests{model="m"}': "4 0x30",
        },
        "20m",
        "10m",
    ),
]


def test_there_is_a_case_for_each_alert():
    assert [name for name, *_ in ALERTS] == list(alerts())


@pytest.mark.parametrize(("name", "series", "fires", "quiet"), ALERTS, ids=[name for name, *_ in ALERTS])
def test_an_alert_fires_when_it_should(
    name: str, series: dict[str, str], fires: str, quiet: str, tmp_path: Path
):
    group = yaml.safe_load(RULES.read_text())["groups"][0]
    (rule,) = [one for one in group["rules"] if one["alert"] == name]
    del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    labels = {"instance": "a", "job": "penstock"} if name == "PenstockDown" else {"model": "m"}
    fired = {"exp_labels": {**labels, **rule["labels"]}}
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [
            {"eval_time": quiet, "alertname": name, "exp_alerts": []},
            {"eval_time": fires, "alertname": name, "exp_alerts": [fired]},
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
