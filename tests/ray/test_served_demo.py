"""What one command serves is what the model says: plain transformers and our service give the same text.

A cluster and an engine of its own: that one command without a word starts them is what README promises.
"""

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_questions import QUESTIONS, said_by_transformers
from openai import BadRequestError, OpenAI
from tests.dashboard import without_series
from tests.kubernetes import SERVICE_VARIABLES
from tests.ray.command import Command, serving

pytestmark = pytest.mark.parity("S18", "S28", "S29", "S31")

TIMES = {"gateway", "pick", "connect", "replica", "front", "engine-queue", "prefill", "total"}


@pytest.fixture(scope="module")
def service(port: int) -> Iterator[Command]:
    """In a pod of a namespace with a Service named `penstock`, as far as its environment goes."""
    with serving("--port", str(port), PENSTOCK_ACCELERATOR="auto", **SERVICE_VARIABLES) as command:
        yield command


@pytest.fixture
def client(service: Command, port: int) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any")


def served(client: OpenAI, question: str) -> tuple[str, str]:
    """The answer, and why it ended."""
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.with_raw_response.create(
        model="penstock-demo", messages=messages, temperature=0, stream=True
    )
    assert set(re.findall(r"([\w-]+);dur=", answer.headers["server-timing"])) >= TIMES
    stream = answer.parse()
    choices = [choice for part in stream for choice in part.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def test_served_answers_are_those_of_plain_transformers(client: OpenAI):
    (card,) = client.models.list()
    assert card.id == "penstock-demo"
    questions = list(QUESTIONS)
    with ThreadPoolExecutor(8) as many:
        answers = list(many.map(lambda question: served(client, question), questions))
    assert len(answers) >= 20
    assert [text for text, _ in answers] == list(QUESTIONS.values())
    assert answers == said_by_transformers(questions)
    assert {reason for _, reason in answers} == {"stop"}


def test_every_query_of_the_dashboard_reads_a_series(client: OpenAI, port: int):
    served(client, next(iter(QUESTIONS)))
    with pytest.raises(BadRequestError):
        client.completions.create(model="penstock-demo", prompt="Hi", temperature=-1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        missing = without_series(answer.read().decode())
    assert [one for one in missing if not one.startswith("penstock_adapter")] == []  # it has no adapters


def test_no_process_reports_its_use(service: Command):
    """Ray's in all processes that the command starts, vLLM's and the hub's in those of the engine."""
    found = [process.environ() for process in service.work().children(recursive=True)]
    environments = [
        each for each in found if "PATH" in each
    ]  # a process that names itself overwrites its own
    assert len(environments) > 3
    assert {each.get("RAY_USAGE_STATS_ENABLED") for each in environments} == {"0"}
    cores = [each for each in environments if "VLLM_NO_USAGE_STATS" in each]
    assert cores
    assert {(each["VLLM_NO_USAGE_STATS"], each["HF_HUB_DISABLE_TELEMETRY"]) for each in cores} == {("1", "1")}


def test_a_replica_keeps_serves_log_file(service: Command):
    """vLLM's own logging closes all handlers of its process. A new controller of Serve stops a replica whose
    logger has no file.
    """
    replicas = [one for one in service.living() if "ray::ServeReplica" in one.cmdline()[0]]
    files = [{Path(file.path).name for file in one.open_files()} for one in replicas]
    assert len(files) > 2
    assert [names for names in files if not any(name.startswith("replica_") for name in names)] == []


def test_killed_command_leaves_nothing(service: Command):
    """The last test of the service: its engine, its Serve and its Ray end by themselves."""
    service.kill()
    assert service.left() == []
