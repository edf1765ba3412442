"""What can be done to an engine that runs, whatever is behind it; what it lacks, it says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from controlling import (
    LIMIT_S,
    LONG,
    QUESTION,
    answer,
    asleep_and_paused_it_wakes_paused,
    begun,
    needs,
    settled,
    text,
    turns,
    waits,
    what_comes_while_it_sleeps_is_answered_when_it_wakes,
)
from enginetest import MODEL_ID, Served
from safetensors.torch import load_file, save_file
from tests.waiting import until

from penstock import demo_model
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import BadRequest, Conflict, DeadlineExceeded, EngineStartFailed, Unsupported

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("S25"),
    pytest.mark.usefixtures("as_before"),
]


async def test_a_kept_pause_stands_still_and_loses_nothing(under_test: Served):
    await needs(under_test, "pause")
    whole = text(await answer(under_test, **LONG))
    running, more = await begun(under_test)
    await under_test.engine.control.pause()
    await settled(under_test, more)
    late = asyncio.create_task(answer(under_test))
    assert await waits(under_test, late, 2)
    assert under_test.engine.control.is_paused()
    assert not more.is_set()
    await under_test.engine.control.resume()
    assert text(await running) == whole
    assert text(await late) == text(await answer(under_test))
    assert not under_test.engine.control.is_paused()


async def test_a_waiting_pause_lets_finish_what_runs(under_test: Served):
    await needs(under_test, "pause")
    running, _ = await begun(under_test)
    await under_test.engine.control.pause(mode="wait")
    late = asyncio.create_task(answer(under_test))
    assert len(text(await asyncio.wait_for(running, LIMIT_S))) > 0
    assert await waits(under_test, late, 1)
    await under_test.engine.control.resume()
    assert text(await late)


async def test_an_aborting_pause_ends_what_runs(under_test: Served):
    await needs(under_test, "pause")
    running, _ = await begun(under_test, max_tokens=1500)
    await under_test.engine.control.pause(mode="abort")
    deltas = await asyncio.wait_for(running, LIMIT_S)
    assert deltas[-1].finish_reason == "abort"
    assert 0 < len(deltas) < 1500
    await under_test.engine.control.resume()
    assert text(await answer(under_test))


@pytest.mark.parametrize("under_test", ["sim"], indirect=True)
async def test_what_comes_while_it_sleeps_is_answered_when_it_wakes(under_test: Served):
    await what_comes_while_it_sleeps_is_answered_when_it_wakes(under_test)


@pytest.mark.parametrize("under_test", ["sim"], indirect=True)
async def test_asleep_and_paused_it_wakes_paused(under_test: Served):
    await asleep_and_paused_it_wakes_paused(under_test)


async def test_sleep_cannot_keep_what_runs(under_test: Served):
    await needs(under_test, "sleep")
    with pytest.raises(BadRequest, match="'wait' or 'abort'"):
        await under_test.engine.control.sleep(mode="keep")
    assert not under_test.engine.control.is_sleeping()


async def test_a_reset_cache_is_empty(under_test: Served):
    await needs(under_test, "reset_prefix_cache")
    prompt = "water turns a wheel and the wheel turns a stone " * 20
    await answer(under_test, prompt)
    assert (await answer(under_test, prompt))[-1].cached_tokens > 0
    await under_test.engine.control.reset_prefix_cache()
    assert (await answer(under_test, prompt))[-1].cached_tokens == 0


async def test_a_cache_in_use_is_not_reset(under_test: Served):
    await needs(under_test, "reset_prefix_cache")
    running, _ = await begun(under_test, max_tokens=1500)
    with pytest.raises(Conflict, match="Pause"):
        await under_test.engine.control.reset_prefix_cache()
    running.cancel()
    await until(lambda: under_test.engine.load().running == 0)


async def test_weights_that_are_not_there_change_nothing(under_test: Served, tmp_path: Path):
    await needs(under_test, "update_weights")
    before, version = text(await answer(under_test)), under_test.engine.control.weights_version()
    with pytest.raises(BadRequest, match="folder"):
        await under_test.engine.control.update_weights(tmp_path / "nowhere", "v9")
    assert under_test.engine.control.weights_version() == version
    assert text(await answer(under_test)) == before


# -- what only an engine with workers of ours has


@pytest.mark.parametrize("under_test", ["sim", "process"], indirect=True)
async def test_an_engine_without_workers_says_so(under_test: Served):
    await needs(under_test, "collective_rpc", "start_profile", "stop_profile")


async def test_workers_are_called(demo: Served):
    (rank,) = await demo.engine.control.collective_rpc("get_model_inspection")
    assert "Qwen2" in rank
    with pytest.raises(BadRequest, match="no_such_method"):
        await demo.engine.control.collective_rpc("no_such_method")
    with pytest.raises(DeadlineExceeded, match=r"0\.001 s"):
        await demo.engine.control.collective_rpc("execute_dummy_batch", timeout=0.001)


async def test_a_profile_is_written(demo: Served, traces: Path):
    await demo.engine.control.start_profile()
    await answer(demo)
    await demo.engine.control.stop_profile()
    assert list(traces.iterdir())  # noqa: ASYNC240


async def test_an_engine_without_a_profiler_names_its_setting(assistant: Served):
    with pytest.raises(Unsupported, match="profiler_config"):
        await assistant.engine.control.start_profile()
    assert len(await assistant.engine.control.collective_rpc("get_model_inspection")) == 1


async def test_a_pause_that_is_given_up_leaves_the_engine_as_it_was(demo: Served):
    running, _ = await begun(demo, max_tokens=1500)
    pausing = asyncio.create_task(demo.engine.control.pause(mode="wait"))
    await turns(demo)
    pausing.cancel()
    assert await asyncio.gather(pausing, return_exceptions=True)
    running.cancel()
    assert not demo.engine.control.is_paused()
    assert text(await asyncio.wait_for(answer(demo), LIMIT_S))


async def test_a_sleep_that_is_given_up_leaves_the_engine_paused(demo: Served):
    running, more = await begun(demo, max_tokens=1500)
    try:
        await demo.engine.control.pause()
        await turns(demo)
        more.clear()
        falling_asleep = asyncio.create_task(demo.engine.control.sleep())
        await asyncio.wait_for(more.wait(), LIMIT_S)  # it lets finish what runs
        falling_asleep.cancel()
        assert await asyncio.gather(falling_asleep, return_exceptions=True)
        await settled(demo, more)
        late = asyncio.create_task(answer(demo))
        assert await waits(demo, late, 2)
        assert not more.is_set()
    finally:
        await demo.engine.control.resume()
        running.cancel()
    assert text(await late)


async def test_a_sleep_that_fails_leaves_the_engine_awake(demo: Served, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(demo.engine, VLLMEngine)
    assert demo.engine._llm is not None

    async def fail() -> None:
        raise RuntimeError("memory does not come back")

    with monkeypatch.context() as patch:
        patch.setattr(demo.engine._llm.renderer, "clear_mm_cache_async", fail)
        with pytest.raises(RuntimeError, match="memory"):
            await demo.engine.control.sleep(mode="abort")
    assert not demo.engine.control.is_sleeping()
    assert text(await asyncio.wait_for(answer(demo), LIMIT_S))


@pytest.mark.full
async def test_other_weights_and_a_pause_last_through_a_sleep(demo: Served, tmp_path: Path):
    """One sleep for all facts of vLLM: waking starts a core."""
    before, version = text(await answer(demo)), demo.engine.control.weights_version()
    try:
        changed = await other_weights(demo, tmp_path)
        assert changed != before
        await demo.engine.control.pause()
        await memory_given_back(demo)
        await a_failed_wake_up_leaves_no_core(demo, tmp_path / "other")
        await wake_paused(demo, changed)
        await refused_weights(demo, tmp_path, changed)
    finally:
        await demo.engine.control.wakeup()
        await demo.engine.control.resume()
        await demo.engine.control.update_weights(Path(demo_model()), version)
    assert text(await answer(demo)) == before


async def other_weights(served: Served, folder: Path) -> str:
    """Gives what an engine says with them; what runs finishes before."""
    other = folder / "other"
    other.mkdir()
    weights = load_file(Path(demo_model()) / "model.safetensors")
    louder = {name: tensor * 1.5 if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(louder, other / "model.safetensors")
    running, _ = await begun(served)
    await served.engine.control.update_weights(other, "v2")
    assert len(await asyncio.wait_for(running, LIMIT_S)) > 0
    assert served.engine.control.weights_version() == "v2"
    return text(await answer(served))


async def memory_given_back(served: Served) -> None:
    """Its core ends; what an engine answers by itself, it goes on to answer."""
    running = set(psutil.Process().children())
    await served.engine.control.sleep(level=2)
    await served.engine.control.sleep()  # does nothing
    (core,) = running - set(psutil.Process().children())
    assert not core.is_running()
    with pytest.raises(Conflict, match="asleep"):
        await served.engine.control.collective_rpc("get_model_inspection")
    await served.engine.check_health()


async def a_failed_wake_up_leaves_no_core(served: Served, weights: Path) -> None:
    """weights: those that it had when it went to sleep."""
    asleep = set(psutil.Process().children())
    gone = weights.with_name("gone")
    os.rename(weights, gone)
    with pytest.raises(EngineStartFailed, match="cannot wake up as it was"):
        await served.engine.control.wakeup()
    os.rename(gone, weights)
    assert served.engine.control.is_sleeping()
    assert set(psutil.Process().children()) == asleep


async def wake_paused(served: Served, expected: str) -> None:
    """What has come in the meantime is answered when the pause ends."""
    late = asyncio.create_task(answer(served))
    body = {"model": MODEL_ID, "prompt": QUESTION, "max_tokens": 12, "temperature": 0}
    asked = asyncio.create_task(served.http.post("/v1/completions", json=body))
    assert await waits(served, late, 2)
    await served.engine.control.wakeup()
    assert not served.engine.control.is_sleeping()
    assert await waits(served, late, 2)
    assert not asked.done()
    await served.engine.control.resume()
    assert text(await late) == expected
    assert (await asked).json()["choices"][0]["text"] == expected


async def refused_weights(served: Served, folder: Path, expected: str) -> None:
    """Those of another model, before anything has changed."""
    weights = load_file(Path(demo_model()) / "model.safetensors")
    save_file({"lm_head.weight": weights[next(iter(weights))]}, folder / "model.safetensors")
    with pytest.raises(BadRequest, match="not of this model"):
        await served.engine.control.update_weights(folder, "v3")
    assert served.engine.control.weights_version() == "v2"
    assert text(await answer(served)) == expected
