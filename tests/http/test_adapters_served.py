"""Adapters from the client's request to the replica's store: odd names, lost stores, replicas that die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from bucket import s3_server
from served import Served, chat, until

from penstock.asgi import Receive, Scope, Send
from penstock.layers.adapters import store
from penstock.openai.paths import ENGINE_PATHS
from penstock.serve.gateway.catalogue import ServedModel
from penstock.transport.link import ADAPTER

pytestmark = pytest.mark.parity("S21", "X14")


def folder_of(folder: Path, *names: str) -> dict[str, Any]:
    """A `lora_config` over adapters of these names."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text("{}")
    return {"dynamic_lora_loading_path": str(folder)}


async def ask(http: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=chat(**more) | {"model": model})


def said(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "name",
    [
        "poet:clerk",
        ":poet",
        "..",
        "../poet",
        "poet/",
        "poet\0",
        "poet ",
        "po%65t",
        "p\u00f6et",
        "x" * 500,
        "*",
    ],
)
async def test_an_odd_name_is_404_with_the_known_ones(served: Served, tmp_path: Path, name: str):
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    await served.replica(reply="fine", lora=folder_of(tmp_path, "poet", "clerk"))
    async with served.http() as http:
        odd, plain = await ask(http, f"m:{name}"), await ask(http, "m:poet")
    assert (odd.status_code, odd.json()["error"]["code"]) == (404, "model_not_found")
    assert "There are: 'clerk', 'poet'." in odd.json()["error"]["message"]
    assert len(odd.text) < 500
    assert said(plain).startswith("[poet@")


async def test_a_name_that_no_model_can_have_is_404(served: Served, tmp_path: Path):
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    await served.replica(reply="fine", lora=folder_of(tmp_path, "poet"))
    async with served.http() as http:
        odd = await ask(http, f"m:{'x' * 5000}")
    assert (odd.status_code, odd.json()["error"]["code"]) == (404, "model_not_found")
    assert "longer than 512" in odd.json()["error"]["message"]
    assert len(odd.text) < 500


async def test_models_with_adapters_of_the_same_name_keep_apart(served: Served, tmp_path: Path):
    """One of their ids is the beginning of the other."""
    ids = ("org/m", "org/m:v2")
    await served.gateway(*(ServedModel(model_id, 1, adapter_slots=4) for model_id in ids))
    for number, model_id in enumerate(ids):
        lora = folder_of(tmp_path / str(number), "poet")
        await served.replica(model_id, reply=f"I am {model_id}", lora=lora)
    async with served.http() as http:
        answers = [await ask(http, name) for name in ("org/m:poet", "org/m:v2", "org/m:v2:poet")]
        listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        shown = await http.get("/v1/models/org%2Fm:v2%3Apoet")
    assert list(map(said, answers)) == ["[poet@1] I am org/m", "I am org/m:v2", "[poet@1] I am org/m:v2"]
    assert listed == ["org/m", "org/m:poet", "org/m:v2", "org/m:v2:poet"]
    assert (shown.json()["id"], shown.json()["parent"]) == ("org/m:v2:poet", "org/m:v2")


async def test_a_replica_killed_while_an_adapter_loads_leaves_it_to_another(served: Served, tmp_path: Path):
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    lora = folder_of(tmp_path, "poet")
    doomed, heir = await asyncio.gather(
        served.process(lora=lora, adapter_load_s=60),
        served.process(lora=lora, reply="risen", join=False),
    )
    async with served.http() as http:
        asked = [asyncio.create_task(ask(http, "m:poet")) for _ in range(8)]
        await until(lambda: sum(replica.in_flight for replica in served.table.ready("m")) == 8)
        served.add("m", heir.address)
        doomed.kill()
        answers = await asyncio.gather(*asked)
    assert {said(answer) for answer in answers} == {"[poet@1] risen"}


async def test_a_client_that_goes_while_its_adapter_waits_takes_no_place(served: Served, tmp_path: Path):
    await served.gateway(ServedModel("m", 1, adapter_slots=1))
    lora = folder_of(tmp_path, "poet", "clerk") | {"max_num_adapters_per_replica": 1}
    replica = await served.replica(reply="fine", lora=lora)
    assert replica.adapters is not None
    async with served.http() as http, replica.adapters.use("poet"):
        asking = asyncio.create_task(ask(http, "m:clerk"))
        await until(lambda: "clerk" in replica.adapters._current)
        asking.cancel()
        await until(lambda: "clerk" not in replica.adapters._current)
    assert replica.adapters.loaded() == ("poet",)
    async with served.http() as http:
        assert said(await ask(http, "m:poet")) == "[poet@1] fine"


async def test_a_bucket_that_is_gone_takes_only_what_is_not_here(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """What is loaded goes on, what is on the node loads, what is neither says why until it is back."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_FAILURE_KEPT_S", 0.0)
    folder_of(tmp_path / "up", "loaded", "here", "away")
    with s3_server("adapters") as s3:
        s3.upload(tmp_path / "up", "adapters", "of/m")
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        lora = {"dynamic_lora_loading_path": "s3://adapters/of/m", "max_num_adapters_per_replica": 1}
        lora |= {"max_download_tries": 1, "refresh_interval_s": 0.05}
        await served.gateway(ServedModel("m", 1, adapter_slots=1))
        replica = await served.replica(reply="fine", lora=lora)
        async with served.http() as http:
            first = [said(await ask(http, f"m:{name}")) for name in ("here", "loaded")]
            monkeypatch.setenv(
                "AWS_ENDPOINT_URL", "http://127.0.0.1:9"
            )  # the port of "discard": nobody listens
            await until(lambda: "may have changed, which cannot be seen" in caplog.text)
            gone = [await ask(http, f"m:{name}") for name in ("loaded", "away", "here")]
            monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
            back = await ask(http, "m:away")
    assert first == ["[here@1] fine", "[loaded@2] fine"]
    assert [answer.status_code for answer in gone] == [200, 503, 200]
    assert said(gone[0]) == "[loaded@2] fine"
    assert said(gone[2]).startswith("[here@")
    assert gone[1].json()["error"]["code"] == "download_failed"
    assert "'s3://adapters/of/m/away' cannot be read: the server cannot be reached." in gone[1].text
    assert said(back).startswith("[away@")
    assert replica.engine.adapters()


async def telling(scope: Scope, receive: Receive, send: Send) -> None:
    """A replica that answers with the adapter that it is asked for."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": dict(scope["headers"]).get(ADAPTER, b"none")})


@pytest.mark.parametrize("path", ENGINE_PATHS)
async def test_every_endpoint_takes_an_adapter(served: Served, path: str):
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    await served.app(telling)
    sound = {"file": ("a.wav", b"RIFF" * 9)}
    async with served.http() as http:
        asked = [await http.post(path, json={"model": name}) for name in ("m:poet", "m")]
        form = await http.post(path, data={"model": "m:poet"}, files=sound)
    assert [answer.text for answer in (*asked, form)] == ["poet", "none", "poet"]
