"""Each way to wake an engine whose every wake-up is a start."""

from __future__ import annotations

import asyncio

import pytest
from controlling import (
    answer,
    asleep_and_paused_it_wakes_paused,
    needs,
    text,
    what_comes_while_it_sleeps_is_answered_when_it_wakes,
)
from enginetest import CONFIGS, Served

from penstock.engines.vllm.engine import VLLMEngine

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("S25"),
    pytest.mark.usefixtures("as_before"),
    pytest.mark.full,
]

dear = pytest.mark.parametrize("under_test", [name for name in CONFIGS if name != "sim"], indirect=True)


@dear
async def test_what_comes_while_it_sleeps_is_answered_when_it_wakes(under_test: Served):
    await needs(under_test, "sleep")
    await what_comes_while_it_sleeps_is_answered_when_it_wakes(under_test)


@dear
async def test_asleep_and_paused_it_wakes_paused(under_test: Served):
    await needs(under_test, "pause", "sleep")
    await asleep_and_paused_it_wakes_paused(under_test)


@pytest.mark.parametrize("under_test", [name for name in CONFIGS if name == "sglang"], indirect=True)
async def test_an_engine_without_workers_says_so(under_test: Served):
    await needs(under_test, "collective_rpc", "start_profile", "stop_profile")


@pytest.mark.parametrize("under_test", ["sim", "vllm"], indirect=True)
async def test_it_wakes_part_by_part_and_answers_when_all_are_awake(under_test: Served):
    control = under_test.engine.control
    expected = text(await answer(under_test))
    await control.sleep(level=2)
    waiting = asyncio.create_task(answer(under_test))
    await control.wakeup_parts(["weights"])
    assert control.is_sleeping()
    if isinstance(under_test.engine, VLLMEngine):
        await control.collective_rpc("check_health")  # its workers are there
    assert not waiting.done()
    await control.wakeup_parts(["kv_cache"])
    assert not control.is_sleeping()
    assert text(await waiting) == expected
