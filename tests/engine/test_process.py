"""An engine that is somebody else's program: how it lives, dies and sleeps, and what reaches it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from child import Flood
from enginetest import MODEL_ID, Served, child_config, serve
from tests.models import model
from tests.ports import unused
from tests.waiting import until

from penstock.asgi_client import call
from penstock.engine import Delta
from penstock.engines.process import engine as process_engine
from penstock.engines.process.engine import ProcessEngine
from penstock.errors import (
    AdapterBroken,
    BadRequest,
    EngineDead,
    EngineStartFailed,
    ModelNotFound,
    Unsupported,
)
from penstock.request_context import PreparedPrompt, prepared_prompt, using_adapter
from recipes.adapters.answers import ANSWERS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S27")]

LIMIT_S = 30
FOLDER = Path(__file__).parent
SERVER = ("{python}", str(FOLDER / "child.py"), "{port}")
FAST = ("step_base_ms=0.5", "prefill_tokens_per_s=1000000.0", "kv_tokens=65536", "max_model_len=65536")
SLOW = ("step_base_ms=20.0", "prefill_tokens_per_s=1000000.0")
FILES = ("{python}", "-m", "http.server", "{port}", "--bind", "{host}")
LONG = {"max_tokens": 1900, "ignore_eos": True}
BODY = {"model": MODEL_ID, "prompt": "water", "stream": True} | LONG
SHORT = {"model": MODEL_ID, "prompt": "water", "max_tokens": 2}


def engine(*command: str, **engine_kwargs: Any) -> ProcessEngine:
    return ProcessEngine(child_config(command, **engine_kwargs))


def running_children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[Served]:
    """A child for all who leave it as it was."""
    async with serve(child_config([*SERVER, *FAST])) as served:
        yield served


@pytest.fixture
def nothing_left():
    before = running_children()
    yield
    assert running_children() - before == set()


# -- the start


async def test_a_command_that_is_not_there_is_named(nothing_left: None):
    with pytest.raises(EngineStartFailed, match="no-such-program: No such file or directory"):
        await engine("no-such-program", "{port}").start()


async def test_a_keeper_that_ends_before_it_has_read_its_order_is_a_failed_start(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(EngineStartFailed, match="status 0"):
        await engine("program", "more than a pipe holds" * 10_000).start()


async def test_a_port_that_another_program_took_first_is_no_failed_start(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = iter([other.getsockname()[1], unused()])
        monkeypatch.setattr(process_engine, "_free_port", lambda: next(ports))
        async with serve(child_config(FILES, ready_path="/", warm_up=False)) as files:
            assert (await files.http.get("/")).status_code == 200
    assert list(ports) == []


async def test_a_child_that_ends_while_it_starts_has_the_last_word(nothing_left: None):
    says = "import sys; print('x' * 10**6); print('out of luck', file=sys.stderr); sys.exit(3)"
    with pytest.raises(EngineStartFailed, match=r"(?s)status 3\..*out of luck") as failed:
        await engine("{python}", "-c", says).start()
    assert len(str(failed.value)) < 2000


async def test_the_key_of_the_gateway_is_not_the_childs(nothing_left: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "gateway's")
    with pytest.raises(EngineStartFailed, match="None"):
        await engine("{python}", "-c", "import os; print(os.environ.get('VLLM_API_KEY'))").start()


async def test_a_start_that_is_given_up_leaves_no_process(nothing_left: None):
    doomed = engine(*SERVER, "silent", "deaf", "grandchild", stop_grace_s=0.2)
    before = running_children()
    start = asyncio.create_task(doomed.start())
    await until(lambda: len(running_children() - before) == 3)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


async def test_a_child_that_calls_the_model_otherwise_is_told_to_say_so(nothing_left: None):
    with pytest.raises(EngineStartFailed, match=r"does not know a model.*served_model_name"):
        await engine(*SERVER, "name=other").start()


async def test_a_child_that_makes_no_tokens_is_taken_only_when_it_is_meant_to(nothing_left: None):
    with pytest.raises(EngineStartFailed, match="warm_up: false"):
        await engine(*FILES, ready_path="/").start()
    async with serve(child_config(FILES, ready_path="/", warm_up=False)) as files:
        assert (await files.http.get("/")).status_code == 200
        refused = await files.http.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "unsupported")


# -- the end


async def test_nothing_is_left_when_the_owner_is_killed():
    command = [word.replace("{python}", sys.executable) for word in SERVER]
    words = [str(FOLDER / "owner.py"), "demo", *command, "grandchild"]
    owner = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout
    while await owner.stdout.readline() != b"ready\n":
        assert owner.returncode is None
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 3  # the keeper, the child and the grandchild
    owner.kill()
    await owner.wait()
    _, left = psutil.wait_procs(below, timeout=LIMIT_S)
    assert left == []


@pytest.mark.parametrize(
    ("whom", "how", "said"),
    [
        ("child", signal.SIGKILL, "SIGKILL"),
        ("keeper", signal.SIGKILL, "SIGKILL"),
        ("child", signal.SIGSTOP, "stopped"),
    ],
)
async def test_a_killed_process_ends_streams_and_refuses_requests(
    whom: str, how: signal.Signals, said: str, nothing_left: None
):
    others = set(psutil.Process().children())
    async with serve(child_config([*SERVER, *SLOW])) as doomed:
        (keeper,) = set(psutil.Process().children()) - others
        (child,) = keeper.children()
        await lose(child if whom == "child" else keeper, how, said, doomed)
        with pytest.raises(EngineDead):
            await doomed.engine.check_health()
        with pytest.raises(EngineDead):
            await anext(doomed.engine.generate("water", {}))
        refused = await doomed.http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert (await doomed.http.get("/health")).status_code == 503
        psutil.wait_procs([keeper, child], timeout=LIMIT_S)


async def lose(process: psutil.Process, how: signal.Signals, said: str, doomed: Served) -> None:
    """Hits it under a stream of each kind; both end with the reason."""
    async with (
        aclosing(doomed.engine.generate("water", LONG)) as deltas,
        doomed.http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        await anext(deltas)
        lines = answer.aiter_lines()
        await anext(lines)
        process.send_signal(how)
        assert said in await doomed.engine.wait_dead()
        with pytest.raises(EngineDead):
            _ = [delta async for delta in deltas]
        events = [line async for line in lines if line]
    assert '"engine_dead"' in events[-1]


async def test_stopping_what_was_not_started_does_nothing():
    stopped = engine(*SERVER)
    await stopped.stop()
    await stopped.stop()
    assert stopped.max_model_len() is None
    assert stopped.kv_tokens() is None
    assert stopped.load().running == 0


# -- what reaches it


async def test_a_slow_client_holds_the_child_back_and_nobody_else():
    async with (
        serve(child_config([*SERVER, "flood"], warm_up=False)) as served,
        served.http.stream("POST", "/v1/completions", json=BODY) as slow,
    ):
        pieces = slow.aiter_raw()
        got = len(await anext(pieces))
        sent = [int((await served.http.get("/sent")).text) for _ in range(20)]
        got += sum([len(piece) async for piece in pieces])
        assert served.engine.load().running <= 1
    assert sent[-1] < got / 2
    assert got == len(Flood.PIECE) * Flood.PIECES


async def test_a_server_without_token_ids_still_counts_the_prompt(shared: Served):
    whole = (await shared.http.post("/v1/completions", json=SHORT)).json()
    deltas = [delta async for delta in shared.engine.generate("water", {"max_tokens": 2})]
    assert "".join(delta.text for delta in deltas) == whole["choices"][0]["text"]
    assert deltas[-1].prompt_tokens == whole["usage"]["prompt_tokens"] > 0
    assert deltas[-1].finish_reason == whole["choices"][0]["finish_reason"]


async def test_a_prompt_with_pictures_is_refused(shared: Served):
    picture = {"prompt": "x", "multi_modal_data": {"image": [object()]}}
    with pytest.raises(Unsupported, match="multi_modal_data"):
        await anext(shared.engine.generate(picture, {}))


async def test_adapters_are_refused_by_a_server_that_has_none():
    async with serve(child_config(FILES, ready_path="/", warm_up=False)) as files:
        with pytest.raises(Unsupported, match="no /v1/load_lora_adapter"):
            await files.engine.load_adapter("pirate", model("adapters") / "pirate")
        with pytest.raises(ModelNotFound):
            await anext(files.engine.generate("x", {}, adapter="pirate"))


@pytest.mark.parametrize("operation", ["pause", "reset_prefix_cache", "start_profile"])
async def test_what_no_foreign_server_has_is_unsupported(shared: Served, operation: str):
    with pytest.raises(Unsupported, match=operation):
        await getattr(shared.engine, operation)()


async def test_a_name_of_the_childs_own_is_never_seen():
    renamed = child_config([*SERVER, *FAST, "name=inner/name"], served_model_name="inner/name")
    async with serve(renamed) as served:
        whole = await served.http.post("/v1/completions", json=SHORT)
        streamed = await served.http.post("/v1/completions", json=SHORT | {"stream": True})
        listed = await served.http.get("/v1/models")
    for answer in (whole, streamed, listed):
        assert answer.status_code == 200
        assert MODEL_ID in answer.text
        assert "inner/name" not in answer.text


async def test_no_secret_reaches_the_child_or_comes_from_it():
    mine = {"Authorization": "Bearer mine", "X-Penstock-Secret": "s", "Cookie": "c=1", "X-Request-Id": "7"}
    async with serve(child_config([*SERVER, "echo"])) as served:
        answer = await served.http.post("/v1/completions", json=SHORT, headers=mine)
    heard = dict(answer.json())
    assert heard["x-request-id"] == "7"
    assert heard["authorization"].startswith("Bearer ")
    assert heard["authorization"] != mine["Authorization"]
    assert heard.keys().isdisjoint({"x-penstock-secret", "cookie"})
    assert "x-penstock-secret" not in answer.headers


async def test_a_prepared_prompt_is_taken_for_completions_only(shared: Served):
    ours = PreparedPrompt({"prompt": "a prompt of our own"})
    before = prepared_prompt.set(ours)
    completion = await post(shared, "/v1/completions", SHORT | {"prompt": ours.placeholder, "max_tokens": 20})
    chat = {"model": MODEL_ID, "messages": [{"role": "user", "content": ours.placeholder}]}
    refused = await post(shared, "/v1/chat/completions", chat)
    prepared_prompt.reset(before)
    assert completion["choices"][0]["text"] == "a prompt of our own"
    assert refused["error"]["code"] == "unsupported"


async def post(served: Served, path: str, body: Any) -> Any:
    """The answer to a request under what this context holds."""
    answer = await call(served.engine.app(), path, json.dumps(body).encode())
    return json.loads(await answer.read())


# -- sleep


async def test_adapters_are_there_again_when_it_wakes(nothing_left: None):
    async with serve(child_config([*SERVER, *FAST])) as served:
        await served.engine.load_adapter("pirate@2", model("adapters") / "pirate")
        await served.engine.control.sleep()
        await served.engine.control.wakeup()
        deltas = [delta async for delta in served.engine.generate("ho", {}, adapter="pirate@2")]
        assert "".join(delta.text for delta in deltas) == "[pirate@2] ho"


async def test_requests_that_come_while_it_sleeps_are_answered_when_it_wakes(nothing_left: None):
    async with serve(child_config([*SERVER, *SLOW])) as served:
        before = await served.http.post("/v1/completions", json=SHORT)
        running = asyncio.create_task(served.http.post("/v1/completions", json=SHORT | {"max_tokens": 30}))
        await until(lambda: served.engine.load().running == 1)
        children = set(psutil.Process().children())
        await served.engine.control.sleep(mode="wait")
        assert len(children - set(psutil.Process().children())) == 1
        assert running.done()
        assert served.engine.control.is_sleeping()
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/metrics")).status_code == 503
        waiting = asyncio.create_task(served.http.post("/v1/completions", json=SHORT))
        await until(lambda: served.engine.load().waiting == 1)
        await wake_in_health(served)
        after = await waiting
        assert after.json()["choices"] == before.json()["choices"]
        assert not served.engine.control.is_sleeping()


async def wake_in_health(served: Served) -> None:
    """A child that loads does not listen yet; whoever asks then must not take it for dead."""
    waking = asyncio.create_task(served.engine.control.wakeup())
    while not waking.done():
        await served.engine.check_health()
        await asyncio.sleep(0.01)
    await waking


async def test_sleep_ends_what_runs_when_it_is_told_to(nothing_left: None):
    async with serve(child_config([*SERVER, *SLOW])) as served:
        with pytest.raises(BadRequest, match="'wait' or 'abort'"):
            await served.engine.control.sleep(mode="keep")
        async with (
            aclosing(served.engine.generate("water", LONG)) as deltas,
            served.http.stream("POST", "/v1/completions", json=BODY) as answer,
        ):
            first = await anext(deltas)
            lines = answer.aiter_lines()
            await anext(lines)
            await served.engine.control.sleep(mode="abort")
            last = [delta async for delta in deltas][-1]
            events = [line async for line in lines if line]
        assert isinstance(first, Delta)
        assert last.finish_reason == "abort"
        assert '"unavailable"' in events[-1]
        await served.engine.stop()


# -- what a real vLLM server has besides

of_vllm = pytest.mark.parametrize("under_test", ["process"], indirect=True)


@of_vllm
async def test_adapters_of_any_version_answer_under_their_plain_names(under_test: Served):
    folder = model("adapters") / "pirate"
    await under_test.engine.load_adapter("pirate@2", folder)
    assert under_test.engine.adapters() == {"pirate@2"}
    name = f"{MODEL_ID}:pirate"
    question, right = next(iter(ANSWERS["pirate"].items()))
    chat = {"model": name, "messages": [{"role": "user", "content": question}], "temperature": 0}
    before = using_adapter.set("pirate@2")
    whole = await post(under_test, "/v1/chat/completions", chat)
    using_adapter.reset(before)
    await under_test.engine.unload_adapter("pirate@2")
    assert whole["choices"][0]["message"]["content"] == right
    assert whole["model"] == name
    with pytest.raises(ModelNotFound):
        await anext(under_test.engine.generate(question, {}, adapter="pirate@2"))


@of_vllm
async def test_a_broken_adapter_is_named(under_test: Served, tmp_path: Path):
    with pytest.raises(AdapterBroken, match=r"'gone' cannot be loaded: it has no readable adapter_config"):
        await under_test.engine.load_adapter("gone", tmp_path)


@of_vllm
async def test_logprobs_come_with_token_ids(under_test: Served):
    params = {"max_tokens": 3, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    deltas = [delta async for delta in under_test.engine.generate("What", params)]
    rows = [row for delta in deltas for row in delta.logprobs or ()]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert [row[0].token_id for row in rows] == token_ids
    assert all(row[0].logprob >= row[1].logprob for row in rows)
