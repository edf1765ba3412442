"""The standalone config of the founding documents: a file that names files of models, by relative paths.

A `penstock serve` of its own, which is what is tested; engines are simulators. Under `serve deploy` the
builder runs in a worker, whose folder is another one: test_founding_documents gives it whole paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tests.cluster import Cluster, own_applications
from tests.mission.edits import MISSION, block
from tests.ports import unused
from tests.ray.command import serving

from recipes.adapters.answers import BASE_ANSWERS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not MISSION.is_dir(), reason="the founding documents are not beside the project"),
    pytest.mark.parity("S1"),
]


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder with the three files as the page has them."""
    (tmp_path / "models").mkdir()
    for name in ("models/qwen-0.5b.yaml", "models/qwen-1.5b.yaml"):
        (tmp_path / name).write_text(block("yaml", f"# {name}"))
    (tmp_path / "config.yaml").write_text(block("yaml", "models/qwen-1.5b.yaml", "applications:"))
    with cluster.simulated(), own_applications():
        yield tmp_path


def answers(url: str) -> list[str | None]:
    """Of both models, to the page's greeting."""
    client = OpenAI(base_url=f"{url}/v1", api_key="fake-key")
    hello = [{"role": "user", "content": "Hello!"}]
    return [
        client.chat.completions.create(model=name, messages=hello).choices[0].message.content
        for name in ("qwen-0.5b", "qwen-1.5b")
    ]


def test_penstock_serve_reads_it_from_any_folder(cluster: Cluster, site: Path):
    port = unused()
    words = [str(site / "config.yaml"), "--port", str(port), "--name", "standalone"]
    with serving(*words, "--address", cluster.address):
        assert answers(f"http://127.0.0.1:{port}") == [BASE_ANSWERS["Hello!"]] * 2
