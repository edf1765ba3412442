"""The commands and programs of README and the manual, run as a reader runs them, on the shared cluster.

In place of a hub, a bucket and a second machine they find simulators, a local S3 server and this one.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cluster import Cluster, own_applications
from tests.http.certificates import write_pair
from tests.pages import ROOT, Page
from tests.ports import unused
from tests.ray.command import serving

import penstock

pytestmark = pytest.mark.full

QUESTION = "What is Penstock?"
MODEL = """model_loading_config: {{model_id: {0}}}
llm_engine: sim
deployment_config: {{num_replicas: {1}}}
"""
BROUGHT = {
    "questions.jsonl": f'{{"prompt": "{QUESTION}"}}\n',
    "articles.csv": f"text\n{QUESTION}\n",
    "rows.jsonl": f'{{"prompt": "{QUESTION}"}}\n',
    "config.yaml": MODEL.format("my-model", 2),
    "qwen.yaml": MODEL.format("qwen", 2),
    "llama.yaml": MODEL.format("llama", 1),
    "models/qwen.yaml": MODEL.format("qwen", 1),
    "models/llama.yaml": MODEL.format("llama", 1),
}
"""Files that readers of these pages have already."""

SMALL = {
    "--replicas 4": "--replicas 1",
    '"num_replicas": 2': '"num_replicas": 1',
    "concurrency=4": "concurrency=1",
}

OF_THE_DEMO = [
    Page("docs/start.md"),
    Page("docs/reference/endpoints.md"),
    Page("docs/serve/structured-output.md"),
    Page("docs/operate/bench.md"),
    Page("docs/operate/observability.md"),
]
OF_THEIR_OWN = [
    Page(
        "README.md",
        before="penstock serve",
        after={"blocking=True": "penstock serve"},  # of one model, as the box of its batch
        replaced={"gpu-box": "127.0.0.1", **SMALL},
    ),
    Page("docs/gpu.md"),
    Page("docs/inside/testing.md"),
    Page("docs/batch/jobs.md"),
    Page("docs/batch/processors.md", replaced=SMALL),
    Page("docs/batch/programs.md"),
    Page("docs/batch/tables.md"),
    Page("docs/operate/fleet-file.md"),
    Page("docs/operate/gateway.md"),
    Page("docs/operate/tenants.md"),
    Page("docs/operate/one-fleet.md", before="export PENSTOCK_ADMIN_KEY=secret"),
    Page(
        "docs/operate/operations.md",
        before="""export PENSTOCK_ADMIN_KEY=secret; penstock serve qwen.yaml
penstock ctl update-weights "$PWD/my-model" v2
penstock ctl pause --replica "$(penstock ctl status | awk 'END {print $1}')" """,
    ),
    Page("docs/operate/updates.md", replaced={"/models/qwen": "my-model"}),
    Page("docs/reference/rows.md"),
    Page("docs/serve/adapters.md", before="penstock serve qwen.yaml"),
    Page("docs/serve/preprocessing.md"),
    Page("docs/serve/routing.md"),
    Page("docs/serve/sources.md"),
]
TUTORIALS = [
    Page("docs/tutorials/own-model.md"),
    Page("docs/tutorials/table.md"),
    Page("docs/tutorials/team.md"),
]


def named(page: Page) -> str:
    return page.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BROUGHT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("my-model", "my-large-model"):
        (tmp_path / name).symlink_to(penstock.demo_model())
    (tmp_path / "vision_preprocessing.py").symlink_to(ROOT / "examples" / "vision_preprocessing.py")
    pair = write_pair(tmp_path)
    pair.cert.rename(tmp_path / "fullchain.pem")
    pair.key.rename(tmp_path / "privkey.pem")
    return tmp_path


@pytest.fixture(scope="module")
def demo(cluster: Cluster) -> Iterator[int]:
    """Port of the embedded model, served for the pages that ask it alone."""
    port = unused()
    with own_applications(), serving("--port", str(port), "--address", cluster.address, "--name", "demo"):
        yield port


@pytest.fixture
def buckets(cluster: Cluster) -> Iterator[None]:
    table = io.BytesIO()
    pq.write_table(pa.table({"text": [QUESTION], "question": [QUESTION]}), table)
    with cluster.bucket.buckets("bucket", "my-bucket", "models"):
        for key in ("in/a.parquet", "articles/a.parquet", "questions/a.parquet"):
            cluster.bucket.client.put_object(Bucket="bucket", Key=key, Body=table.getvalue())
        adapter = {"Bucket": "my-bucket", "Key": "adapters/support/adapter_config.json", "Body": b"{}"}
        cluster.bucket.client.put_object(**adapter)
        cluster.bucket.upload(Path(penstock.demo_model()), "models", "qwen")
        yield


@pytest.mark.parametrize("page", OF_THE_DEMO, ids=named)
def test_pages_that_ask_the_embedded_model(page: Page, demo: int, cluster: Cluster, folder: Path):
    page.run(folder, demo, RAY_ADDRESS=cluster.address)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("page", OF_THEIR_OWN, ids=named)
def test_pages_that_start_what_they_ask(page: Page, cluster: Cluster, folder: Path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    of_its_own = {
        "PENSTOCK_ENGINE_CLS": "tests.standin:simulator",
        "PYTHONPATH": path,
    }  # a Ray that it starts
    with own_applications(), cluster.simulated():
        page.run(folder, unused(), RAY_ADDRESS=cluster.address, **of_its_own, **cluster.bucket.environment)


@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_a_newcomer_follows_a_tutorial(page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """With the real engine, and a Ray that the page's commands start."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    page.run(folder, unused())


@pytest.mark.parity("X2")
def test_batches_by_python_curl_and_node(demo: int, folder: Path, node_modules: Path):
    (folder / "node_modules").symlink_to(node_modules)
    at_once = {"sleep(5)": "sleep(0.1)", "sleep 5": "sleep 0.1", "5000": "100"}
    *answered, _ = Page("docs/batch/batches-api.md", replaced=at_once).run(folder, demo)
    for output in answered:
        answers = [json.loads(line) for line in output.splitlines() if line]
        assert [answer["custom_id"] for answer in answers] == ["row-1", "row-2"]
        assert {answer["response"]["status_code"] for answer in answers} == {200}
