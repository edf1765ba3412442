"""Adapters in a real vLLM, under the store and the layer of a replica: every answer by the right one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import COPIES, PLACES, TRAINED, Adapted, at_once
from enginetest import MODEL_ID
from safetensors.torch import load_file, save_file
from tests.waiting import until

from penstock.layers.adapters import asking_for, store
from penstock.request_context import using_adapter
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S21", "X14")]


@pytest.fixture
def replica(demo_lora: Adapted) -> Adapted:
    return demo_lora


async def test_one_batch_of_base_and_adapters_gives_each_its_own_answers(replica: Adapted):
    asked = [(question, adapter) for question in BASE_ANSWERS for adapter in ("", *TRAINED)]
    assert await at_once(replica, asked) == []


async def test_twenty_adapters_through_four_places_under_load(
    replica: Adapted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROOM_WAIT_S", 300.0)  # each gets its turn, however slow the machine is
    adapters = itertools.cycle([*COPIES, *TRAINED, ""])
    asked = [(question, next(adapters)) for _ in range(25) for question in ANSWERS["pirate"]]
    assert await at_once(replica, asked) == []
    await until(lambda: replica.store._slots == len(replica.store.loaded()))
    assert await replica.in_core() == len(replica.engine.adapters()) <= PLACES


async def test_answers_name_the_model_as_it_was_asked_for(replica: Adapted):
    name = f"{MODEL_ID}:pirate"
    whole = (await replica.chat("Hello!", "pirate")).json()
    assert whole["model"] == name
    streamed = await replica.chat("Hello!", "pirate", stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {name}
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert said == whole["choices"][0]["message"]["content"] == ANSWERS["pirate"]["Hello!"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/responses", {"input": "Hello!"}, lambda got: got["output"][-1]["content"][0]["text"]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
            lambda got: got["content"][0]["text"],
        ),
    ],
)
async def test_other_ways_to_ask_reach_the_adapter(replica: Adapted, path: str, body: Any, said: Any):
    asked = {"model": f"{MODEL_ID}:french", "temperature": 0} | body
    answered = await replica.http.post(path, json=asked, headers=asking_for("french"))
    assert answered.status_code == 200, answered.text
    assert said(answered.json()) == ANSWERS["french"]["Hello!"]
    assert answered.json()["model"] == f"{MODEL_ID}:french"


async def test_token_ids_in_and_out_reach_the_adapter(replica: Adapted):
    asked = {"messages": [{"role": "user", "content": "Hello!"}]}
    tokens = (await replica.http.post("/tokenize", json=asked)).json()["tokens"]
    body = {"prompt_token_ids": tokens, "sampling_params": {"temperature": 0, "max_tokens": 64}}
    answered = await replica.http.post("/v1/generate", json=body, headers=asking_for("french"))
    assert answered.json()["outputs"][0]["text"] == ANSWERS["french"]["Hello!"]


async def test_tokens_can_be_asked_of_an_adapter(replica: Adapted):
    asked = {"model": f"{MODEL_ID}:french", "prompt": "Hello!"}
    answered = await replica.http.post("/tokenize", json=asked, headers=asking_for("french"))
    assert answered.json()["count"] > 0


async def hello(replica: Adapted, key: str = "", **params: Any) -> str:
    """The engine's own generate, with the prompt of a chat."""
    asked = {"messages": [{"role": "user", "content": "Hello!"}]}
    tokens = (await replica.http.post("/tokenize", json=asked)).json()["tokens"]
    sampling = {"temperature": 0, "max_tokens": 64} | params
    deltas = replica.engine.generate(tokens, sampling, adapter=key or None)
    return "".join([delta.text async for delta in deltas])


async def test_generate_takes_an_adapter_by_argument_and_by_context(replica: Adapted):
    async with replica.store.use("pirate") as key:
        assert await hello(replica, key) == ANSWERS["pirate"]["Hello!"]
        before = using_adapter.set(key)
        assert await hello(replica) == ANSWERS["pirate"]["Hello!"]
        using_adapter.reset(before)
    assert await hello(replica) == BASE_ANSWERS["Hello!"]


async def test_what_runs_on_after_its_answer_keeps_its_adapter_in_the_core(replica: Adapted):
    """As a response in the background does; its files may be gone by then."""
    shutil.copytree(replica.folder / "pirate", replica.folder / "leaving")
    long = {"ignore_eos": True, "max_tokens": 600}
    async with replica.store.use("leaving") as key:
        expected = await hello(replica, key, **long)
        running = asyncio.create_task(hello(replica, key, **long))
        await until(lambda: replica.engine.load().running == 1)
    shutil.rmtree(replica.folder / "leaving")
    await until(lambda: key not in replica.engine.adapters())
    assert not running.done()
    assert await running == expected
    async with asyncio.timeout(10):
        while await replica.in_core() > len(replica.engine.adapters()):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


# -- what cannot be loaded


def edit(folder: Path, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def widen(folder: Path) -> None:
    """As if it were made for a model with twice as many columns."""
    weights = load_file(folder / "adapter_model.safetensors")
    wide = {name: torch.cat([one, one], dim=-1) if "lora_A" in name else one for name, one in weights.items()}
    save_file(wide, folder / "adapter_model.safetensors")


def pickle_wide(folder: Path) -> None:
    """The same where our check cannot see it: vLLM has to."""
    widen(folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def pickle_alone(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


class Evil:
    """Leaves a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (EVIL,)


EVIL = Path(tempfile.gettempdir()) / f"unpickled-{os.getpid()}"


def pickle_evil(folder: Path) -> None:
    torch.save({"weights": Evil()}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def more_tensors(folder: Path, **more: torch.Tensor) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in more.items()}, file)


def new_words(folder: Path) -> None:
    """With rows for words that the base does not have."""
    more_tensors(folder, base_model__model__model__embed_tokens__weight=torch.zeros(1030, 128))


def rename(folder: Path, part: str) -> None:
    """Names of tensors as those of a base that lies within a multimodal model."""
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    inner = "base_model.model.model.language_model."
    new = {
        name.replace("base_model.model.model.", inner) if part in name else name: weights[name]
        for name in weights
    }
    assert new.keys() != weights.keys()
    save_file(new, file)


BROKEN = {
    "vLLM says: this model has no ": lambda folder: rename(folder, ""),
    "of the adapter's layers would be left out": lambda folder: rename(folder, "q_proj"),
    "its adapter_config.json says rank 16": lambda folder: edit(folder, r=16),
    "its rank is 64, and this model takes at most 32": lambda folder: edit(folder, r=64),
    "no adapter_model.safetensors": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "no readable adapter_config.json": lambda folder: (folder / "adapter_config.json").unlink(),
    "is cut off": lambda folder: os.truncate(folder / "adapter_model.safetensors", 10_000),
    "made for another model": widen,
    "vLLM says: The size of tensor": pickle_wide,
    "vLLM does not yet support DoRA": lambda folder: edit(folder, use_dora=True),
    "Unsupported modules_to_save: ['lm_head']": lambda folder: edit(folder, modules_to_save=["lm_head"]),
    "vLLM says: base_model.model.model.embed_tokens.weight is unsupported": new_words,
    "vLLM says: Weights only load failed": pickle_evil,
    "is no safetensors file": lambda folder: os.truncate(folder / "adapter_model.safetensors", 0),
    "adapter_config.json is no JSON": lambda folder: (folder / "adapter_config.json").write_text("{'r': 8}"),
    "its rank is 99": lambda folder: edit(folder, rank_pattern={"q_proj": 99}),
    "only 'LORA' can be served": lambda folder: edit(folder, peft_type="LOHA"),
}


@pytest.mark.parametrize("why", BROKEN)
async def test_a_broken_adapter_is_refused_with_its_reason_and_the_engine_lives(replica: Adapted, why: str):
    name = f"broken{list(BROKEN).index(why)}"
    shutil.copytree(replica.folder / "pirate", replica.folder / name)
    BROKEN[why](replica.folder / name)
    held = await replica.in_core()
    refused = await replica.chat("Hello!", name)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "adapter_broken"
    assert refused.json()["error"]["message"].startswith(f"The adapter '{name}' cannot be loaded: ")
    assert why in refused.json()["error"]["message"]
    assert str(replica.folder) not in refused.text
    assert not EVIL.exists()
    assert await replica.answer("Hello!", "french") == ANSWERS["french"]["Hello!"]
    assert await replica.in_core() <= max(held, PLACES)
    assert await replica.in_core() == len(replica.engine.adapters())


async def test_an_adapter_that_is_only_pickled_answers(replica: Adapted):
    shutil.copytree(replica.folder / "pirate", replica.folder / "pickled")
    pickle_alone(replica.folder / "pickled")
    assert await replica.answer("Hello!", "pickled") == ANSWERS["pirate"]["Hello!"]


# -- change


async def test_a_changed_adapter_answers_anew_and_running_answers_keep_the_old(replica: Adapted):
    changing = replica.folder / "changing"
    shutil.copytree(replica.folder / "pirate", changing)
    assert await replica.answer("Hello!", "changing") == ANSWERS["pirate"]["Hello!"]
    async with replica.store.use("changing") as old:
        long = {"ignore_eos": True, "max_tokens": 200}
        running = asyncio.create_task(hello(replica, old, **long))
        for file in (replica.folder / "french").iterdir():
            shutil.copy(file, changing)
        await until(lambda: replica.store._current["changing"].key != old)
        assert not running.done()
        assert await replica.answer("Hello!", "changing") == ANSWERS["french"]["Hello!"]
        assert await running == await hello(replica, old, **long)
        assert await hello(replica, old) == ANSWERS["pirate"]["Hello!"]
    await until(lambda: old not in replica.engine.adapters())
    assert await replica.answer("Hello!", "changing") == ANSWERS["french"]["Hello!"]


async def test_a_change_of_its_source_leaves_running_answers_on_the_old_adapter(replica: Adapted):
    def source(trained: str) -> dict[str, Any]:
        return {"adapters": {"moving": str(replica.folder / trained)}}

    await replica.store.change(source("pirate"))
    try:
        async with replica.store.use("moving") as old:
            long = {"ignore_eos": True, "max_tokens": 600}
            running = asyncio.create_task(hello(replica, old, **long))
            await until(lambda: replica.engine.load().running == 1)
            await replica.store.change(source("french"))
            assert await replica.answer("Hello!", "moving") == ANSWERS["french"]["Hello!"]
            assert not running.done()
            assert await running == await hello(replica, old, **long)
        await until(lambda: old not in replica.engine.adapters())
        assert await replica.answer("Hello!", "moving") == ANSWERS["french"]["Hello!"]
    finally:
        await replica.store.change({"adapters": {}})
    assert (await replica.chat("Hello!", "moving")).status_code == 404


@pytest.mark.full
async def test_an_adapter_that_is_loaded_while_the_model_sleeps_answers_when_it_wakes(replica: Adapted):
    shutil.copytree(replica.folder / "pirate", replica.folder / "sleeper")
    await replica.engine.control.sleep(level=2)
    try:
        await asyncio.wait_for(replica.store.load_adapter("sleeper"), 10)
    finally:
        await replica.engine.control.wakeup()
    assert await replica.answer("Hello!", "sleeper") == ANSWERS["pirate"]["Hello!"]
    assert await replica.in_core() == len(replica.engine.adapters())


async def test_an_adapter_that_the_engine_has_lost_is_loaded_anew(replica: Adapted):
    shutil.copytree(replica.folder / "pirate", replica.folder / "lost")
    assert await replica.answer("Hello!", "lost") == ANSWERS["pirate"]["Hello!"]
    store = replica.store
    lost = store._current["lost"]
    store._freshening.cancel()  # else the store may see it before the request does
    await asyncio.wait({*store._tasks})
    forgotten = replica.engine._adapters._forget(lost.key)
    await replica.engine._llm.remove_lora(forgotten.lora_int_id)
    refused = await replica.chat("Hello!", "lost")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "The adapter 'lost' is not loaded."
    store._begin_to_refresh()
    await until(lambda: store._current.get("lost") is not lost)
    assert await replica.answer("Hello!", "lost") == ANSWERS["pirate"]["Hello!"]
