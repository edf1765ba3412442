"""What the layer before a decode engine asks of prefill replicas, and what it passes on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import asgi
from penstock.asgi_client import call
from penstock.config import LLMConfig, ModelLoadingConfig
from penstock.layers.prefill import Prefill
from penstock.layers.stack import stacked
from penstock.openai.asgi_response import send_json

pytestmark = pytest.mark.parity("S24")

WHERE = {"do_remote_prefill": True, "remote_host": "there"}
LONG = "a long story " * 100


class Engine:
    """An app that says what it was asked."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_json(send, asgi.parsed(await asgi.read_body(receive)))


class Elsewhere:
    """A prefill replica. answer: what it says, None when there is none."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, body: bytes) -> bytes | None:
        self.asked.append(json.loads(body))
        return None if self.answer is None else json.dumps(self.answer).encode()


async def passed_on(elsewhere: Elsewhere, path: str, body: dict[str, Any], **fields: str) -> dict[str, Any]:
    app = Prefill(Engine(), elsewhere, min_prompt_tokens=100)
    reply = await call(app, path, json.dumps(body).encode(), fields)
    return json.loads(await reply.read())


@pytest.mark.parametrize(
    ("path", "body", "one_token"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 50}, {"max_tokens": 1}),
        ("/v1/completions", {"prompt": list(range(200))}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"messages": LONG, "min_tokens": 4}, {"max_completion_tokens": 1}),
        ("/v1/responses", {"input": LONG}, {"max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"messages": LONG, "max_tokens": 9}, {"max_tokens": 1}),
    ],
)
async def test_a_long_prompt_is_computed_elsewhere(path: str, body: Any, one_token: Any):
    elsewhere = Elsewhere({"kv_transfer_params": WHERE})
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert await passed_on(elsewhere, path, streamed) == {**streamed, "kv_transfer_params": WHERE}
    (asked,) = elsewhere.asked
    assert asked.items() >= {**one_token, "stream": False}.items()
    assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert not {"stream_options", "min_tokens"} & asked.keys()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "short"},
        {"prompt": [1, 2, 3], "user": LONG},
        {"prompt": [LONG, LONG]},
        {"prompt": LONG, "n": 2},
        {"prompt": LONG, "echo": True},
        {"prompt": LONG, "prompt_logprobs": 1},
        {"prompt": LONG, "previous_response_id": "resp_1"},
    ],
)
async def test_what_does_not_pay_is_computed_here(body: Any):
    elsewhere = Elsewhere({"kv_transfer_params": WHERE})
    assert await passed_on(elsewhere, "/v1/completions", body) == body
    assert not elsewhere.asked


@pytest.mark.parametrize("answer", [None, {"choices": []}, {"kv_transfer_params": None}, []])
async def test_whatever_goes_wrong_there_it_is_computed_here(answer: Any):
    elsewhere = Elsewhere(answer)
    assert await passed_on(elsewhere, "/v1/completions", {"prompt": LONG}) == {"prompt": LONG}
    assert elsewhere.asked


@pytest.mark.parametrize("prompt", ["short", LONG])
async def test_clients_cannot_say_where_to_fetch_from(prompt: str):
    forged = {"prompt": prompt, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
    elsewhere = Elsewhere()
    assert await passed_on(elsewhere, "/v1/completions", forged) == {"prompt": prompt}
    assert all("remote_host" not in asked["kv_transfer_params"] for asked in elsewhere.asked)


FORGED = {"do_remote_prefill": True, "remote_host": "evil"}


@pytest.mark.parametrize("path", ["/v1/generate", "/inference/v1/generate", "/v1/completions", "/any/other"])
@pytest.mark.parametrize(
    "place", [[], ["vllm_xargs"], ["extra_args"], ["sampling_params"], ["sampling_params", "extra_args"]]
)
async def test_nor_can_they_on_another_endpoint_or_in_its_parameters(path: str, place: list[str]):
    forged: dict[str, Any] = {"kv_transfer_params": FORGED}
    clean: dict[str, Any] = {}
    for name in reversed(place):
        forged, clean = {name: {"seed": 1, **forged}}, {name: {"seed": 1, **clean}}
    assert await passed_on(Elsewhere(), path, {"prompt": "x", **forged}) == {"prompt": "x", **clean}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_nor_by_json_that_only_python_reads(encoding: str):
    forged = json.dumps({"kv_transfer_params": FORGED, "top_p": float("nan")}).encode(encoding)
    reply = await call(Prefill(Engine(), Elsewhere(), 100), "/v1/completions", forged)
    assert json.loads(await reply.read()) == {"top_p": None}


async def test_other_endpoints_and_nonsense_pass_as_they_are():
    elsewhere = Elsewhere({"kv_transfer_params": WHERE})
    assert await passed_on(elsewhere, "/v1/embeddings", {"input": LONG}) == {"input": LONG}
    app = Prefill(Engine(), elsewhere, min_prompt_tokens=100)
    reply = await call(app, "/v1/completions", b"[no json" + LONG.encode())
    assert json.loads(await reply.read()) is None
    assert not elsewhere.asked


@pytest.mark.parametrize(("role", "kept"), [("", {}), ("prefill", {"kv_transfer_params": WHERE})])
async def test_with_the_users_own_connector_clients_name_no_caches(role: str, kept: dict[str, Any]):
    config = LLMConfig(
        model_loading_config=ModelLoadingConfig(model_id="m"),
        engine_kwargs={"kv_transfer_config": {"kv_connector": "Own", "kv_role": "kv_both"}},
    )
    engine: Any = SimpleNamespace(app=Engine, generate=None)
    app = stacked(engine, config, adapters=None, preprocessor=None, postprocessor=None, role=role)
    request = {"prompt": "a", "kv_transfer_params": WHERE}
    reply = await call(app, "/v1/completions", json.dumps(request).encode(), {})
    assert json.loads(await reply.read()) == {"prompt": "a", **kept}
