"""What vLLM's own sleep mode needs, which is there on GPUs only: in which order its calls are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.engines import peft
from penstock.engines.vllm import adapters, control
from penstock.engines.vllm.adapters import LoadedAdapters
from penstock.engines.vllm.control import VLLMControl
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import Conflict, EngineDead, ModelNotFound


class LLM:
    """With sleep mode; remembers what was asked of it."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=True, model="first")
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            lora_config=SimpleNamespace(max_lora_rank=8),
        )
        self.gate = asyncio.Event()
        self.sleep_lock = asyncio.Lock()
        self.entering = 0
        self.weights = DEFAULT_WEIGHTS
        self.output_processor = SimpleNamespace(request_states={})
        self.asked: list[str] = []
        self.loaded: set[str] = set()
        self.fails: set[str] = set()

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def _ask(self, what: str) -> None:
        await asyncio.sleep(0)
        self.asked.append(what)
        if what in self.fails:
            raise RuntimeError(what)

    async def sleep(self, level: int, mode: str) -> None:
        await self._ask(f"sleep {level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._ask(f"wake {tags}")

    async def pause_generation(self, **kwargs: Any) -> None:
        await self._ask(f"pause {kwargs['mode']}")

    async def resume_generation(self) -> None:
        await self._ask("resume")

    async def collective_rpc(self, method: str, **kwargs: Any) -> None:
        await self._ask(method)
        self.loaded.clear()  # as vLLM does when it takes weights anew

    async def reset_prefix_cache(self) -> None:
        await self._ask("reset")

    async def update_weight_version(self, version: str) -> None:
        await self._ask(f"version {version}")

    async def add_lora(self, request: Any) -> None:
        await self._ask(f"add {request.lora_int_id}")
        self.loaded.add(request.lora_name)

    async def remove_lora(self, number: int) -> None:
        await self._ask(f"remove {number}")


def controlled(llm: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[VLLMControl, LoadedAdapters]:
    """Adapters that know when the engine sleeps, as `VLLMEngine` makes them."""
    loaded = with_adapters(llm, monkeypatch, lambda: operations.is_sleeping())
    operations = VLLMControl(llm, loaded, alive, nothing, nothing)
    return operations, loaded


def with_adapters(
    llm: Any, monkeypatch: pytest.MonkeyPatch, asleep: Callable[[], bool] = lambda: False
) -> LoadedAdapters:
    ids = iter(range(1, 9))
    models: Any = SimpleNamespace(
        lora_requests={},
        lora_id_counter=SimpleNamespace(inc=lambda _: next(ids)),
    )
    monkeypatch.setattr(peft, "check", lambda *args: None)
    monkeypatch.setattr(adapters.weights, "shapes", lambda file: {})
    llm.model_config.quantization = None
    return LoadedAdapters(llm, asleep, "m", [], models)


async def nothing() -> None: ...


def alive() -> None: ...


def dead() -> None:
    raise EngineDead("It is gone.")


async def test_adapters_are_there_again_after_the_second_level_of_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    loaded = with_adapters(llm, monkeypatch)
    await loaded.load("pirate", tmp_path)
    operations = VLLMControl(llm, loaded, alive, nothing, nothing)
    await operations.sleep(2, "wait")
    await operations.wakeup()
    assert llm.loaded == {"m:pirate"}
    assert llm.asked[-4:] == ["wake ['weights']", "reload_weights", "wake ['kv_cache']", "add 1"]
    assert (operations.is_sleeping(), llm.gate.is_set()) == (False, True)


@pytest.mark.parametrize(("paused", "last"), [(False, "resume"), (True, "pause keep")])
async def test_a_sleep_that_fails_in_vllm_leaves_its_scheduler_as_it_was(
    paused: bool, last: str, monkeypatch: pytest.MonkeyPatch
):
    llm: Any = LLM()
    operations = VLLMControl(llm, with_adapters(llm, monkeypatch), alive, nothing, nothing)
    if paused:
        await operations.pause("keep", clear_cache=False)
    llm.fails = {"sleep 1"}
    with pytest.raises(RuntimeError, match="sleep 1"):
        await operations.sleep(1, "wait")
    assert (llm.asked[-1], operations.is_sleeping(), operations.is_paused()) == (last, False, paused)
    assert llm.gate.is_set()


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        *(("sleep", ()), ("wakeup", ()), ("pause", ()), ("resume", ()), ("reset_prefix_cache", ())),
        *(("start_profile", ()), ("stop_profile", ()), ("collective_rpc", ("check_health",))),
        ("update_weights", (Path("/"), "v1")),
    ],
)
async def test_a_dead_engine_refuses_every_operation(
    operation: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    llm: Any = LLM()
    operations = VLLMControl(llm, with_adapters(llm, monkeypatch), dead, nothing, nothing)
    with pytest.raises(EngineDead, match="It is gone"):
        await getattr(operations, operation)(*arguments)
    assert llm.asked == []


async def test_an_adapter_that_is_asked_for_twice_at_once_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    loaded = with_adapters(llm, monkeypatch)
    await asyncio.gather(loaded.load("pirate", tmp_path), loaded.load("pirate", tmp_path))
    assert llm.asked == ["add 1"]


@pytest.mark.parametrize("level", [1, 2])
async def test_an_adapter_that_comes_while_the_engine_sleeps_is_in_the_core_when_it_wakes(
    level: int, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, loaded = controlled(llm, monkeypatch)
    await loaded.load("leaving", tmp_path)
    await operations.sleep(level, "wait")
    asked = list(llm.asked)
    await loaded.load("coming", tmp_path)
    await loaded.unload("leaving")
    assert llm.asked == asked  # the core may be gone
    assert loaded.names() == {"coming"}
    await operations.wakeup()
    assert llm.asked[-1] == "add 2"


async def test_an_adapter_does_not_come_between_the_steps_of_a_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, loaded = controlled(llm, monkeypatch)
    await asyncio.gather(operations.sleep(1, "wait"), loaded.load("pirate", tmp_path))
    assert llm.asked == ["sleep 1"]
    await operations.wakeup()
    assert llm.loaded == {"m:pirate"}


async def test_an_adapter_that_vllm_refuses_at_the_wake_up_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, loaded = controlled(llm, monkeypatch)
    await operations.sleep(1, "wait")
    for name in ("bad", "good"):
        await loaded.load(name, tmp_path)
    llm.fails = {"add 1"}
    await operations.wakeup()
    assert (llm.loaded, loaded.names()) == ({"m:good"}, {"good"})
    with pytest.raises(ModelNotFound, match="'bad' is not loaded"):
        loaded.request("bad")


@pytest.mark.parametrize(("mode", "held"), [("wait", "keep"), ("keep", "keep"), ("abort", "abort")])
async def test_new_weights_leave_requests_held_that_a_pause_holds(
    mode: Any, held: str, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, _ = controlled(llm, monkeypatch)
    monkeypatch.setattr(control, "_check_weights", lambda *args: None)
    await operations.pause("keep")
    await operations.update_weights(tmp_path, "v2", mode)
    assert llm.asked[1:] == [f"pause {held}", "reload_weights", "reset", "version v2"]
    assert operations.is_paused()


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_that_come_while_the_engine_sleeps_are_there_when_it_wakes(
    level: int, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, _ = controlled(llm, monkeypatch)
    monkeypatch.setattr(control, "_check_weights", lambda *args: None)
    await operations.sleep(level, "wait")
    await operations.update_weights(tmp_path, "v2", "wait")
    assert llm.asked == [f"sleep {level}"]
    await operations.wakeup()
    assert llm.asked[1:] == ["wake ['weights']", "reload_weights", "version v2", "wake ['kv_cache']"]


async def test_a_sleep_whose_caller_gives_up_in_vllms_own_is_a_sleep(monkeypatch: pytest.MonkeyPatch):
    llm: Any = LLM()
    operations, _ = controlled(llm, monkeypatch)
    await given_up(llm, "sleep", operations.sleep(1, "wait"))
    assert (operations.is_sleeping(), llm.gate.is_set(), llm.asked) == (True, False, [])


async def test_a_wake_up_whose_caller_gives_up_once_the_memory_is_back_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, loaded = controlled(llm, monkeypatch)
    await loaded.load("pirate", tmp_path)
    await operations.sleep(1, "wait")
    await given_up(llm, "add_lora", operations.wakeup())
    assert (operations.is_sleeping(), llm.gate.is_set()) == (False, True)


async def test_new_weights_whose_caller_gives_up_have_their_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    llm: Any = LLM()
    operations, _ = controlled(llm, monkeypatch)
    monkeypatch.setattr(control, "_check_weights", lambda *args: None)
    await given_up(llm, "collective_rpc", operations.update_weights(tmp_path, "v2", "wait"))
    assert llm.asked == ["pause wait", "reset", "version v2", "resume"]
    assert (operations.weights_version(), llm.gate.is_set()) == ("v2", True)


async def given_up(llm: Any, call: str, operation: Coroutine[Any, Any, None]) -> None:
    """Cancels `operation` during this call to vLLM, which goes on until it is done."""
    begun, done = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> None:
        begun.set()
        await done.wait()

    setattr(llm, call, slow)
    running = asyncio.create_task(operation)
    await begun.wait()
    running.cancel()
    asyncio.get_running_loop().call_soon(done.set)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_calls_of_the_core_fail_when_it_is_ended_or_dies():
    engine: Any = VLLMEngine(LLMConfig(model_loading_config={"model_id": "m", "model_source": "demo"}))
    calls = [asyncio.get_running_loop().create_future() for _ in range(2)]
    results = dict(enumerate(calls[:1]))
    engine._llm = SimpleNamespace(engine_core=SimpleNamespace(utility_results=results), gate=asyncio.Event())
    engine._core = SimpleNamespace(stop=nothing)
    await engine._end_core()
    with pytest.raises(Conflict, match="put to sleep"):
        await calls[0]
    results[1] = calls[1]
    engine._on_death("killed")
    with pytest.raises(EngineDead, match="is gone"):
        await calls[1]


async def test_a_dead_engine_holds_no_request_back():
    engine: Any = VLLMEngine(LLMConfig(model_loading_config={"model_id": "m", "model_source": "demo"}))
    llm: Any = LLM()
    llm.engine_core = SimpleNamespace(utility_results={})
    engine._llm, operations = llm, VLLMControl(llm, None, engine._refuse_dead, nothing, nothing)
    held = asyncio.create_task(llm.gate.wait())
    async with llm.sleep_lock:
        later = [asyncio.create_task(one) for one in (operations.sleep(1, "wait"), operations.pause("wait"))]
        await asyncio.sleep(0)
        engine._on_death("killed")
    assert await asyncio.wait_for(held, 10)
    assert [type(error) for error in await asyncio.gather(*later, return_exceptions=True)] == [EngineDead] * 2
    assert llm.gate.is_set()
