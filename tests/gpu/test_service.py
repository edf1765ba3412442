"""`penstock serve` with two engines on one GPU, of which one is killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import psutil
import pytest
import yaml
from tests.device import DEVICE, SHARE, memory_used
from tests.ports import unused
from tests.ray.command import Command, client, serving

from recipes.adapters.answers import BASE_ANSWERS

pytestmark = [pytest.mark.full, pytest.mark.timeout(200 if DEVICE == "gpu" else 600)]

LIMIT_S = 120 if DEVICE == "gpu" else 240
STREAMS = 16
CORE = "penstock.engines.vllm.core.process"
HALF = {"placement_group_config": {"bundles": [{"CPU": 1, "GPU": 0.5}]}} if DEVICE == "gpu" else {}
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def port() -> int:
    return unused()


@pytest.fixture(scope="module")
def service(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    config = tmp_path_factory.mktemp("service") / "model.yaml"
    model = {
        "model_loading_config": {"model_id": "m", "model_source": "demo"},
        "accelerator_config": {"kind": DEVICE},
        "deployment_config": {"num_replicas": 2},
        "engine_kwargs": {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28} | SHARE,
        **HALF,
    }
    config.write_text(yaml.safe_dump(model))
    with serving(str(config), "--port", str(port)) as command:
        yield command


def cores(service: Command) -> list[psutil.Process]:
    found = []
    for process in service.living():
        with suppress(psutil.Error):  # it has just ended
            if CORE in process.cmdline():
                found.append(process)
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def whole(port: int) -> int:
    """Tokens of a long answer that is sent when it is complete."""
    answer = client(port).completions.create(model="m", prompt="water", **LONG)
    return answer.usage.completion_tokens


def streamed(port: int, begun: list[str]) -> str:
    """How a long stream ends: finished, or with the error of a dead engine."""
    events = client(port).completions.create(model="m", prompt="water", stream=True, **LONG)
    begun.append(next(events).id)
    try:
        return [event.choices[0].finish_reason for event in events if event.choices][-1] or "cut off"
    except openai.APIError as error:
        return str(error.code)


def chat(port: int, question: str) -> str | None:
    messages = [{"role": "user", "content": question}]
    answer = client(port).chat.completions.create(model="m", messages=messages, temperature=0)
    return answer.choices[0].message.content


def ready(port: int) -> int:
    return httpx.get(f"http://127.0.0.1:{port}/health").json()["models"]["m"]["ready"]


def test_both_engines_answer_as_the_model_was_taught(service: Command, port: int, record_property):
    assert len(cores(service)) == 2
    with ThreadPoolExecutor(STREAMS) as many:
        said = list(many.map(lambda question: chat(port, question), [*BASE_ANSWERS] * 4))
    assert said == [*BASE_ANSWERS.values()] * 4
    record_property("memory_gib", round(memory_used() / 2**30, 2))


def test_a_killed_core_costs_no_request_without_a_first_byte_and_is_replaced(
    service: Command, port: int, record_property
):
    before, killed = memory_used(), cores(service)[0]
    with ThreadPoolExecutor(2 * STREAMS) as many:
        wholes = [many.submit(whole, port) for _ in range(STREAMS)]
        begun: list[str] = []
        streams = [many.submit(streamed, port, begun) for _ in range(STREAMS)]
        until(lambda: len(begun) == STREAMS, "a stream never began")
        killed.kill()
        began = time.monotonic()
        assert [one.result(LIMIT_S) for one in wholes] == [LONG["max_tokens"]] * STREAMS
        ends = {one.result(LIMIT_S) for one in streams}
    assert ends <= {"length", "engine_dead"}
    until(
        lambda: killed.pid not in {core.pid for core in cores(service)} and ready(port) == 2, "no successor"
    )
    record_property("successor_s", round(time.monotonic() - began, 1))
    record_property("ends", sorted(ends))
    assert len(cores(service)) == 2
    assert [chat(port, question) for question in BASE_ANSWERS] == list(BASE_ANSWERS.values())
    if DEVICE == "gpu":  # pages that processes share are counted for each on the CPU
        until(lambda: memory_used() < before + (1 << 30), "the dead core's memory is still taken")
