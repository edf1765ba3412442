"""The engines that whole sessions of tests share, on the event loop that Serve's replicas run.

A start costs some ten seconds of CPU, so each of these is started once, by the first test that asks for it.
Who changes one puts it back in `finally`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode lets no test import its neighbour
sys.path.append(str(Path(__file__).parents[1] / "http"))  # gateways and listeners around engines
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: engines would fight for the cores

from enginetest import (
    CONFIGS,
    SEATS,
    Served,
    process_config,
    serve,
    sglang_config,
    sim_config,
    vllm_config,
    vllm_config_with_small_cache,
)
from models import model

if TYPE_CHECKING:
    from adapted import Adapted
    from pooling import Pooled

FIXTURES = {"sim": "simulator", "vllm": "demo", "process": "demo_process", "sglang": "demo_sglang"}
"""Names of the fixtures that `under_test` hands out."""


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`under_test` is each engine that there is; SGLang in the full tier only."""
    if "under_test" not in metafunc.fixturenames:
        return
    marks = metafunc.definition.iter_markers("parametrize")
    if not any(mark.args[0] == "under_test" for mark in marks):
        names = [name for name in CONFIGS if name != "sglang" or metafunc.config.getoption("full")]
        metafunc.parametrize("under_test", names, indirect=True, scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def as_before(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Wakes and resumes an engine that a failed test has left asleep or paused."""
    yield
    for name in {"under_test", "demo", "assistant"} & set(request.fixturenames):
        engine = request.getfixturevalue(name).engine
        if engine.control.is_sleeping():
            await engine.control.wakeup()
        if engine.control.is_paused():
            await engine.control.resume()


@pytest.fixture(scope="session")
def under_test(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(FIXTURES[request.param])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def simulator() -> AsyncIterator[Served]:
    async with serve(sim_config()) as served:
        yield served


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for profiles of `demo`."""
    return tmp_path_factory.mktemp("traces")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo(traces: Path) -> AsyncIterator[Served]:
    """The demo model in a real vLLM with SEATS seats, a small cache and a profiler."""
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "ignore_frontend": True,  # torch's profiler crashes in a process that has had engines before
    }
    config = vllm_config_with_small_cache(
        max_num_seqs=SEATS, profiler_config=profiler, enable_prompt_tokens_details=True
    )
    async with serve(config) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo_process() -> AsyncIterator[Served]:
    """The demo model in vLLM's own server, a child of ours."""
    async with serve(process_config()) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo_sglang() -> AsyncIterator[Served]:
    async with serve(sglang_config()) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo_lora(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    """The demo model in a replica's server, with a folder of adapters that tests add to."""
    from adapted import COPIES, TRAINED, adapted

    folder = tmp_path_factory.mktemp("adapters")
    for name in (*TRAINED, *COPIES):
        shutil.copytree(model("adapters") / name.partition(".")[0], folder / name)
    async with adapted(folder) as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def assistant() -> AsyncIterator[Served]:
    """The model that thinks and calls tools, in a real vLLM."""
    config = vllm_config(
        str(model("assistant")),
        reasoning_parser="deepseek_r1",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        enable_tokenizer_info_endpoint=True,
        enable_prompt_tokens_details=True,
        kv_cache_memory_bytes=1 << 26,
    )
    async with serve(config) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def embedder() -> AsyncIterator[Pooled]:
    """The model of sentences, in a replica's server over a real vLLM."""
    from pooling import EMBEDDER, pooled

    async with pooled("embedder", **EMBEDDER) as found:
        yield found


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that requests to `vision` may read; beside it lies what they may not."""
    from seeing import BLUE_SQUARE, RED_CIRCLE
    from tests.pictures import encoded

    folder = tmp_path_factory.mktemp("pictures")
    (folder / "red.png").write_bytes(encoded(RED_CIRCLE))
    (folder.parent / "secret.png").write_bytes(encoded(BLUE_SQUARE))
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vision(pictures: Path) -> AsyncIterator[Served]:
    """The model that names what it sees, in a real vLLM."""
    config = vllm_config(
        str(model("vision")),
        limit_mm_per_prompt={"image": 2, "video": 1},
        allowed_media_domains=["localhost"],
        allowed_local_media_path=str(pictures),
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        kv_cache_memory_bytes=1 << 26,
    )
    async with serve(config) as served:
        yield served
