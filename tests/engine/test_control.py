"""What can be done to an engine that runs, whatever is behind it; what it lacks, it says."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from enginetest import MODEL_ID, Served, serve, until, vllm_config
from safetensors.torch import load_file, save_file

from penstock import demo_model
from penstock.engine import Delta
from penstock.engines.lacking import Lacking
from penstock.errors import BadRequest, Conflict, DeadlineExceeded, Unsupported

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S25")]

QUESTION = "What is Penstock?"
ARGUMENTS = {"collective_rpc": ("x",), "update_weights": (Path("/"), "v1")}
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}


async def answer(served: Served, prompt: str = QUESTION, **params: object) -> list[Delta]:
    params = {"temperature": 0, "max_tokens": 12} | params
    return [delta async for delta in served.engine.generate(prompt, params)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def begun(served: Served, **params: object) -> tuple[asyncio.Task[list[Delta]], asyncio.Event]:
    """A request that has made tokens, and an event that is set at each further one."""
    more, first = asyncio.Event(), asyncio.Event()

    async def read() -> list[Delta]:
        deltas = []
        async with aclosing(served.engine.generate(QUESTION, LONG | params)) as stream:
            async for delta in stream:
                deltas.append(delta)
                first.set()
                more.set()
        return deltas

    task = asyncio.create_task(read())
    await first.wait()
    return task, more


async def still(task: asyncio.Task[object], seconds: float = 0.3) -> bool:
    """Whether it does not end within this time."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return not done


async def needs(served: Served, *operations: str) -> None:
    """Skips where the engine has not all of them, which it must say."""
    kind = type(served.engine)
    lacking = [name for name in operations if getattr(kind, name) is getattr(Lacking, name, None)]
    for name in lacking:
        with pytest.raises(Unsupported, match=f"{kind.__name__} has no operation '{name}'"):
            await getattr(served.engine, name)(*ARGUMENTS.get(name, ()))
    if lacking:
        pytest.skip(f"{kind.__name__} has no {', '.join(lacking)}, and says so")


async def test_a_kept_pause_stands_still_and_loses_nothing(under_test: Served):
    await needs(under_test, "pause")
    whole = text(await answer(under_test, **LONG))
    running, more = await begun(under_test)
    await under_test.engine.pause()
    await asyncio.sleep(0.05)  # for what was on its way
    more.clear()
    late = asyncio.create_task(answer(under_test))
    assert await still(late)
    assert under_test.engine.is_paused()
    assert not more.is_set()
    await under_test.engine.resume()
    assert text(await running) == whole
    assert text(await late) == text(await answer(under_test))
    assert not under_test.engine.is_paused()


async def test_a_waiting_pause_lets_finish_what_runs(under_test: Served):
    await needs(under_test, "pause")
    running, _ = await begun(under_test)
    await under_test.engine.pause(mode="wait")
    late = asyncio.create_task(answer(under_test))
    assert len(text(await asyncio.wait_for(running, 5))) > 0
    assert await still(late)
    await under_test.engine.resume()
    assert text(await late)


async def test_an_aborting_pause_ends_what_runs(under_test: Served):
    await needs(under_test, "pause")
    running, _ = await begun(under_test, max_tokens=1500)
    await under_test.engine.pause(mode="abort")
    deltas = await asyncio.wait_for(running, 5)
    assert deltas[-1].finish_reason == "abort"
    assert 0 < len(deltas) < 1500
    await under_test.engine.resume()
    assert text(await answer(under_test))


async def test_what_comes_while_it_sleeps_is_answered_when_it_wakes(under_test: Served):
    await needs(under_test, "sleep")
    before = text(await answer(under_test))
    running, _ = await begun(under_test)
    await under_test.engine.sleep()
    assert len(await asyncio.wait_for(running, 1)) > 100  # it has finished before
    assert under_test.engine.is_sleeping()
    late = asyncio.create_task(answer(under_test))
    body = {"model": MODEL_ID, "prompt": QUESTION, "max_tokens": 12, "temperature": 0}
    asked = asyncio.create_task(under_test.http.post("/v1/completions", json=body))
    assert await still(late)
    assert await still(asked, 0)
    await under_test.engine.wakeup()
    assert not under_test.engine.is_sleeping()
    assert text(await late) == before
    assert (await asked).json()["choices"][0]["text"] == before


async def test_asleep_and_paused_it_wakes_paused(under_test: Served):
    await needs(under_test, "pause", "sleep")
    await under_test.engine.pause()
    await under_test.engine.sleep(level=2)
    await under_test.engine.sleep()  # does nothing
    await under_test.engine.wakeup()
    late = asyncio.create_task(answer(under_test))
    assert await still(late)
    await under_test.engine.resume()
    assert text(await late)


async def test_sleep_cannot_keep_what_runs(under_test: Served):
    await needs(under_test, "sleep")
    with pytest.raises(BadRequest, match="'wait' or 'abort'"):
        await under_test.engine.sleep(mode="keep")
    assert not under_test.engine.is_sleeping()


async def test_a_reset_cache_is_empty(under_test: Served):
    await needs(under_test, "reset_prefix_cache")
    prompt = "water turns a wheel and the wheel turns a stone " * 20
    await answer(under_test, prompt)
    assert (await answer(under_test, prompt))[-1].cached_tokens > 0
    await under_test.engine.reset_prefix_cache()
    assert (await answer(under_test, prompt))[-1].cached_tokens == 0


async def test_a_cache_in_use_is_not_reset(under_test: Served):
    await needs(under_test, "reset_prefix_cache")
    running, _ = await begun(under_test, max_tokens=1500)
    with pytest.raises(Conflict, match="Pause"):
        await under_test.engine.reset_prefix_cache()
    running.cancel()
    await until(lambda: under_test.engine.load().running == 0)


async def test_weights_that_are_not_there_change_nothing(under_test: Served, tmp_path: Path):
    await needs(under_test, "update_weights")
    before, version = text(await answer(under_test)), under_test.engine.weights_version()
    with pytest.raises(BadRequest, match="folder"):
        await under_test.engine.update_weights(tmp_path / "nowhere", "v9")
    assert under_test.engine.weights_version() == version
    assert text(await answer(under_test)) == before


async def test_vllm_has_operations_that_need_workers(tmp_path: Path):
    """One engine for all facts: a start takes seconds."""
    config = vllm_config(
        kv_cache_memory_bytes=1 << 26,
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(tmp_path / "traces"),
            "ignore_frontend": True,  # torch's profiler crashes in a process that has had engines before
        },
    )
    others = set(psutil.Process().children())
    async with serve(config) as served:
        await calls_of_workers(served)
        await profile(served, tmp_path / "traces")
        await other_weights(served, tmp_path)
        await memory_given_back(served, others)


async def calls_of_workers(served: Served) -> None:
    (rank,) = await served.engine.collective_rpc("get_model_inspection")
    assert "Qwen2" in rank
    with pytest.raises(BadRequest, match="no_such_method"):
        await served.engine.collective_rpc("no_such_method")
    with pytest.raises(DeadlineExceeded, match=r"0\.001 s"):
        await served.engine.collective_rpc("execute_dummy_batch", timeout=0.001)


async def profile(served: Served, traces: Path) -> None:
    await served.engine.start_profile()
    await answer(served)
    await served.engine.stop_profile()
    assert list(traces.iterdir())  # noqa: ASYNC240


async def other_weights(served: Served, folder: Path) -> None:
    """They last through a sleep; those of another model are refused before anything has changed."""
    before = text(await answer(served))
    other = folder / "other"
    other.mkdir()
    weights = load_file(Path(demo_model()) / "model.safetensors")
    louder = {name: tensor * 1.5 if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(louder, other / "model.safetensors")
    running, _ = await begun(served)
    await served.engine.update_weights(other, "v2")
    assert len(await asyncio.wait_for(running, 1)) > 0
    changed = text(await answer(served))
    assert changed != before
    assert served.engine.weights_version() == "v2"
    await served.engine.sleep()
    await served.engine.wakeup()
    assert text(await answer(served)) == changed
    save_file({"lm_head.weight": weights[next(iter(weights))]}, folder / "model.safetensors")
    with pytest.raises(BadRequest, match="not of this model"):
        await served.engine.update_weights(folder, "v3")
    assert served.engine.weights_version() == "v2"
    assert text(await answer(served)) == changed


async def memory_given_back(served: Served, others: set[psutil.Process]) -> None:
    (core,) = set(psutil.Process().children()) - others
    await served.engine.sleep()
    assert not core.is_running()
    assert set(psutil.Process().children()) == others
    with pytest.raises(Conflict, match="asleep"):
        await served.engine.collective_rpc("get_model_inspection")
    await served.engine.check_health()


async def test_calls_of_workers_and_profiles(under_test: Served):
    await needs(under_test, "collective_rpc", "start_profile", "stop_profile")
    with pytest.raises(Unsupported, match="profiler_config"):
        await under_test.engine.start_profile()
    assert len(await under_test.engine.collective_rpc("get_model_inspection")) == 1
