"""A batch whose processes are killed, one after another and all at once: each of its lines has one result.

A service of its own with simulated engines: what is killed here must not be shared.
"""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from tests.ports import unused
from tests.ray.command import Command, client, serving

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]

CHAT = "/v1/chat/completions"
ROWS = 400
ENDED = ("completed", "failed", "expired", "cancelled")
AWAY = (openai.APIConnectionError, openai.InternalServerError)
"""What a client may meet while a process is being replaced."""

CONFIG = """
llm_configs:
- model_loading_config: {{model_id: m}}
  llm_engine: sim
  deployment_config: {{num_replicas: 2}}
  engine_kwargs: {{step_base_ms: 40, max_num_seqs: 8}}
jobs: {{storage: {storage}}}
"""
TEXT = " ".join(f"word{number}" for number in range(40))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    file = folder / "service.yaml"
    file.write_text(CONFIG.format(storage=folder / "storage"))
    return file


@pytest.fixture(scope="module")
def service(config: Path, port: int) -> Iterator[Command]:
    with serving(str(config), "--port", str(port)) as command:
        yield command


def create(port: int) -> str:
    """A batch of some seconds of work."""
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 20}
    rows = [
        {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body} for number in range(ROWS)
    ]
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    ours = client(port)
    file = ours.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    return ours.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def seen(port: int, batch_id: str):
    """The batch, as soon as somebody answers."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return client(port).batches.retrieve(batch_id)
        except AWAY:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def begun(port: int, batch_id: str) -> None:
    while seen(port, batch_id).request_counts.completed < ROWS / 10:
        time.sleep(0.05)


def check_each_line_once(port: int, batch_id: str) -> None:
    while (batch := seen(port, batch_id)).status not in ENDED:
        time.sleep(0.2)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (ROWS, 0)
    assert batch.error_file_id is None
    answers = client(port).files.content(batch.output_file_id).text.splitlines()
    assert [json.loads(one)["custom_id"] for one in answers] == [f"row-{number}" for number in range(ROWS)]


def kill(service: Command, title: str) -> None:
    """The first process of the service with this title."""
    named = [one for one in service.living() if " ".join(one.cmdline()).startswith(title)]
    named[0].kill()


@pytest.mark.parametrize(
    "title",
    [
        "ray::ServeReplica:penstock:LLMJobs",
        "ray::ServeReplica:penstock:LLMServer:m",
        "ray::ServeReplica:penstock:LLMRouter",
        "ray::ServeReplica:penstock:LLMControl",
        "ray::ServeController",
    ],
)
def test_each_line_has_one_result_when_one_process_is_killed(service: Command, port: int, title: str):
    batch_id = create(port)
    begun(port, batch_id)
    kill(service, title)
    check_each_line_once(port, batch_id)


def test_a_batch_goes_on_in_the_next_service_when_all_of_it_was_killed(tmp_path: Path):
    config, first, second = tmp_path / "service.yaml", unused(), unused()
    config.write_text(CONFIG.format(storage=tmp_path / "storage"))
    with serving(str(config), "--port", str(first)) as command:
        batch_id = create(first)
        begun(first, batch_id)
        for process in command.living():
            process.kill()
        psutil.wait_procs(command.living(), timeout=30)
    with serving(str(config), "--port", str(second)):
        check_each_line_once(second, batch_id)
