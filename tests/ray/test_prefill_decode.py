"""Prefill and decode by replicas of their own: real vLLM engines, whose KV cache goes over NIXL."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from ray import serve
from tests.models import model
from tests.waiting import wait_until

from penstock.serve import LLMConfig, LLMServer, build_openai_app

pytest.importorskip("vllm")
pytest.importorskip("nixl")
pytestmark = [pytest.mark.full, pytest.mark.parity("S24", "S3")]

MODEL, KEY, APP = "parted", "admin's own", "parted"
LONG = "Tell me what the weather of the north is like in winter. " * 12
SHORT = "What is Penstock?"
LIMIT_S = 60
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
HERE: dict[str, Any] = {"extra_body": {"prompt_logprobs": 0}}
"""Has the decode replica compute the whole prompt, not even from its own cache: as one engine does it."""


class Tattler(LLMServer):
    """A server that tells its process, and how many requests it works on."""

    async def pid(self) -> int:
        return os.getpid()

    async def busy(self) -> int:
        load = self.engine.load()
        return load.running + load.waiting


class Halves:
    """A model in two halves."""

    def __init__(self, url: str) -> None:
        self.client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=LIMIT_S)

    def fetched(self) -> float:
        """Tokens of prompts that came from elsewhere."""
        line = re.compile(
            r'^vllm:prompt_tokens_by_source_total\{.*"external_kv_transfer".*\} (\S+)$', re.MULTILINE
        )
        return sum(map(float, line.findall(self.http.get("/metrics").text)))

    def completion(self, prompt: Any, **options: Any) -> str:
        return self.client.completions.create(prompt=prompt, **{**OPTIONS, **options}).choices[0].text

    def first_logprob(self, prompt: str, **options: Any) -> float:
        answer = self.client.completions.create(prompt=prompt, logprobs=1, **{**OPTIONS, **options})
        return answer.choices[0].logprobs.token_logprobs[0]

    def chat(self, **options: Any) -> Any:
        said: Any = [{"role": "user", "content": LONG}]
        return self.client.chat.completions.create(messages=said, **{**OPTIONS, **options})


def config(**parts: Any) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": "demo"},
        engine_kwargs={"max_num_seqs": 8},
        lora_config={"adapters": {"pirate": str(model("adapters") / "pirate")}},
        server_cls=Tattler,
        deployment_config={"ray_actor_options": {"num_cpus": 1}},
        **parts,
    )


@pytest.fixture(scope="module")
def halves(serve_url: str) -> Iterator[Halves]:
    """Two engines of its own: they must be started as the two halves of one."""
    decode = config(prefill={"min_prompt_tokens": 100})
    serve.run(build_openai_app({"llm_configs": [decode], "gateway": {"admin_key": KEY}}), name=APP)
    found = Halves(serve_url)
    wait_until(lambda: found.fetched() > 0)  # the warm-up
    yield found
    serve.delete(APP)


def test_long_prompts_are_computed_elsewhere_and_answered_the_same(halves: Halves):
    before = halves.fetched()
    elsewhere = halves.completion(LONG), halves.chat().choices[0].message.content
    after = halves.fetched()
    assert after > before + 200
    assert elsewhere == (halves.completion(LONG, **HERE), halves.chat(**HERE).choices[0].message.content)
    assert halves.fetched() == after


def test_adapters_reach_both_halves(halves: Halves):
    before, pirate = halves.fetched(), f"{MODEL}:pirate"
    elsewhere = halves.first_logprob(f"Ahoy! {LONG}", model=pirate)
    assert halves.fetched() > before + 100
    assert elsewhere == pytest.approx(halves.first_logprob(f"Ahoy! {LONG}", model=pirate, **HERE), abs=1e-4)
    assert elsewhere != pytest.approx(halves.first_logprob(f"Ahoy! {LONG}", **HERE), abs=1e-2)


def test_streams_too(halves: Halves):
    before = halves.fetched()
    fresh = f"Once more, please: {LONG}"
    pieces = halves.client.completions.create(prompt=fresh, stream=True, **OPTIONS)
    assert "".join(piece.choices[0].text for piece in pieces) == halves.completion(fresh, n=1)
    assert halves.fetched() > before


def test_short_prompts_and_shared_ones_are_computed_where_they_are_decoded(halves: Halves):
    before = halves.fetched()
    halves.completion(SHORT)
    halves.completion(f"Twice: {LONG}", n=2, temperature=1.0)
    assert halves.fetched() == before


def test_control_reaches_both_halves(halves: Halves):
    state = halves.http.get("/admin/status").json()[MODEL]
    assert sorted(one.get("role", "") for one in state["replicas"].values()) == ["", "prefill"]
    for operation, resting in (("sleep", "asleep"), ("wakeup", "ready")):
        done = halves.http.post(f"/admin/{operation}", json={"model": MODEL}).json()
        assert [one["result"] for one in done["replicas"].values()] == [resting, resting]
    before = halves.fetched()
    halves.completion(f"After a sleep: {LONG}")
    assert halves.fetched() > before, "the engines are new to each other, and find each other"


def test_with_the_prefill_side_killed_prompts_are_computed_here(halves: Halves):
    prefill = serve.get_deployment_handle(f"Prefill:{MODEL}", APP)
    pid = prefill.pid.remote().result(timeout_s=LIMIT_S)
    core = next(child for child in psutil.Process(pid).children() if "vllm.core" in " ".join(child.cmdline()))
    core.send_signal(signal.SIGSTOP)  # what it is asked now it never answers
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(halves.completion, f"{i}, alas: {LONG}") for i in range(4)]
        wait_until(lambda: prefill.busy.remote().result(timeout_s=LIMIT_S) > 0)
        os.kill(pid, signal.SIGKILL)
        assert [len(one.result(timeout=LIMIT_S)) > 0 for one in asked] == [True] * 4
    before = halves.fetched()
    halves.completion(f"And now: {LONG}")
    assert halves.fetched() == before
    with suppress(psutil.NoSuchProcess):
        core.kill()
    wait_until(lambda: halves.completion(f"{time.monotonic()}: {LONG}") and halves.fetched() > before)
