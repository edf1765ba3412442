"""What the service says of itself: `/`, `/version`, `/openapi.json` and the page over it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest
from jobs_served import JobsServed, line, lines
from served import Served, sim_config
from test_files_forwarded import in_front

from penstock import __version__
from penstock.asgi import Receive, Scope, Send
from penstock.serve.gateway import routes
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X23")


async def described(served: Served, **headers: str) -> dict[str, Any]:
    async with served.http(headers=headers) as http:
        return (await http.get("/openapi.json")).json()


def saying(documents: dict[str, str]):
    """A replica whose engine answers these JSON documents, and no other path."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        text = documents.get(scope["path"])
        status = 404 if text is None else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": (text or "").encode()})

    return app


def engine(schema: str, path: str = "/v1/embeddings") -> dict[str, str]:
    """An engine with one endpoint that clients reach and one that they do not."""
    reference = '{"$ref": "#/components/schemas/Body"}'
    body = f'{{"requestBody": {{"content": {{"application/json": {{"schema": {reference}}}}}}}}}'
    paths = f'{{"{path}": {{"post": {body}}}, "/sleep": {{"post": {body}}}}}'
    schemas = f'{{"Body": {schema}, "Unused": {{}}}}'
    return {"/openapi.json": f'{{"paths": {paths}, "components": {{"schemas": {schemas}}}}}'}


async def test_the_root_says_what_this_is_and_where_things_are(served: Served):
    await served.gateway("m", api_key="key")
    async with served.http() as http:
        about = (await http.get("/")).json()
        places = [value for value in about.values() if value.startswith("/")]
        found = [await http.get(at, headers={"x-api-key": "key"}) for at in places]
    assert about["service"] == "penstock"
    assert len(places) == 6
    assert {answer.status_code for answer in found} <= {200, 503}
    assert __version__ not in str(about)


async def test_every_path_that_is_described_is_answered_and_every_answered_one_is_described(served: Served):
    await served.gateway("m")
    await served.replica("m")
    found = await described(served)
    async with served.http() as http:
        for path, methods in found["paths"].items():
            for method in methods:
                answer = await http.request(method, path.replace("{id}", "m"), json={})
                assert answer.status_code not in (404, 405), path
        for path in {route.path for route in routes.ALL} - found["paths"].keys():
            assert (await http.post(path.replace("{id}", "m"), json={})).status_code in (404, 405), path
    assert "/v1/chat/completions" in found["paths"]
    assert not [path for path in found["paths"] if path.startswith("/admin")]


async def test_requests_have_the_engines_schemas(served: Served):
    await served.gateway("m")
    await served.replica("m")
    found = await described(served)
    chat = found["paths"]["/v1/chat/completions"]["post"]
    name = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    assert "messages" in found["components"]["schemas"][name]["required"]
    assert chat["x-models"] == ["m"]
    references = re.findall(r"#/components/schemas/([^'\"]+)", str(found))
    assert set(references) == found["components"]["schemas"].keys()


async def test_only_what_clients_reach_is_taken_from_an_engine(served: Served):
    await served.gateway("a", ServedModel("b", 1, paths=("/v1/summarize",)))
    await served.app(saying(engine('{"title": "one"}')), "a")
    await served.app(saying(engine('{"title": "two"}')), "b")
    found = await described(served)
    assert "/sleep" not in found["paths"]
    assert "Unused" not in found["components"]["schemas"]
    assert found["paths"]["/v1/embeddings"]["post"]["x-models"] == ["a", "b"]
    assert found["paths"]["/v1/summarize"]["post"]["x-models"] == ["b"]
    assert "/v1/chat/completions" not in found["paths"]


async def test_schemas_of_two_engines_under_one_name_stay_apart(served: Served):
    await served.gateway("a", "b", "c")
    await served.app(saying(engine('{"title": "one"}')), "a")
    await served.app(saying(engine('{"title": "two"}', "/v1/score")), "b")
    await served.app(saying(engine('{"title": "one"}', "/rerank")), "c")
    found = await described(served)

    def title(path: str) -> str:
        schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return found["components"]["schemas"][schema["$ref"].split("/")[-1]]["title"]

    assert [title(path) for path in ("/v1/embeddings", "/v1/score", "/rerank")] == ["one", "two", "one"]


async def test_a_model_without_a_replica_is_said_to_be_left_out(served: Served):
    await served.gateway("a", "gone")
    await served.replica("a")
    found = await described(served)
    assert "endpoints of gone are left out" in found["info"]["description"]


async def test_keys_are_described_where_they_are_asked_for(served: Served):
    async def operate(operation: str, arguments: Any) -> dict[str, Any]:
        return {}

    await served.gateway("m", api_key="key", admin_key="admin", operate=operate)
    await served.replica("m")
    found = await described(served, **{"x-api-key": "key"})
    assert found["security"] == [{"api_key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert found["paths"]["/admin/sleep"]["post"]["security"] == [{"admin_key": []}]
    assert found["paths"]["/admin/status"]["get"]["security"] == [{"admin_key": []}]


async def test_versions_are_ours_and_the_engines(served: Served):
    await served.gateway(ServedModel("a", 1, engine="vllm"), ServedModel("b", 1, engine="sim"))
    await served.app(saying({"/version": '{"version": "0.32.0"}'}), "a")
    await served.replica("b")
    async with served.http() as http:
        found = (await http.get("/version")).json()
    assert found == {
        "version": __version__,
        "models": {"a": {"engine": "vllm", "version": "0.32.0"}, "b": {"engine": "sim", "version": None}},
    }


async def test_the_page_names_no_host(served: Served):
    await served.gateway("m", api_key="key")
    async with served.http() as http:
        page = await http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "//" not in re.sub(r"^ *// .*$", "", page.text, flags=re.MULTILINE)
    assert '"openapi.json"' in page.text


def body_of(found: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of the request's body, complete in itself."""
    (content,) = found["paths"][path]["post"]["requestBody"]["content"].values()
    return content["schema"] | {"components": found["components"]}


def is_described(found: dict[str, Any], path: str, answer: httpx.Response) -> bool:
    """Whether an answer is as the description says. Raises: ValidationError."""
    operation = found["paths"][path][answer.request.method.lower()]
    said = operation["responses"]["200" if answer.is_success else "default"]
    schema = said["content"]["application/json"]["schema"] | {"components": found["components"]}
    jsonschema.validate(answer.json(), schema, jsonschema.Draft202012Validator)
    return schema.keys() > {"components"}


MESSAGES = [{"role": "user", "content": "Hello"}]


async def test_answers_are_as_they_are_described(served: Served, jobs: JobsServed):
    await in_front(served, jobs)
    await served.replica("m")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "logprobs": True},
        "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
        "/v1/embeddings": {"input": ["Hello", "you"]},
    }
    found = await described(served)
    async with served.http() as http:
        for path, body in bodies.items():
            for one in (body, {**body, "model": "other"}):
                jsonschema.validate(body, body_of(found, path), jsonschema.Draft202012Validator)
                assert is_described(found, path, await http.post(path, json=one)), path
        form = {"files": {"file": lines([line("a")])}, "data": {"purpose": "batch"}}
        file = await http.post("/v1/files", **form)
        assert is_described(found, "/v1/files", file)
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        jsonschema.validate(asked, body_of(found, "/v1/batches"), jsonschema.Draft202012Validator)
        batch = await http.post("/v1/batches", json=asked)
        assert is_described(found, "/v1/batches", batch)
        ids = {
            "/v1/models/{id}": "m",
            "/v1/files/{id}": file.json()["id"],
            "/v1/batches/{id}": batch.json()["id"],
        }
        for path, name in ids.items():
            assert is_described(found, path, await http.get(path.replace("{id}", name))), path
        for path in ("/v1/models", "/v1/files", "/v1/batches"):
            assert is_described(found, path, await http.get(path)), path
        cancelled = await http.post(f"/v1/batches/{batch.json()['id']}/cancel")
        assert is_described(found, "/v1/batches/{id}/cancel", cancelled)


async def test_the_model_is_required_and_one_of_those_served_where_none_is_the_default(served: Served):
    lora = {"dynamic_lora_loading_path": "/adapters", "max_num_adapters_per_replica": 2}
    await served.gateway(
        ServedModel.of(sim_config("a", aliases=["latest"])),
        ServedModel.of(sim_config("b", lora=lora)),
        "asleep",
    )
    for model in ("a", "b"):
        await served.replica(model)
    schema = body_of(await described(served), "/v1/chat/completions")

    def fits(**model: str) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid({"messages": MESSAGES, **model})

    assert [fits(model=name) for name in ("a", "latest", "b", "b:mine", "asleep")] == [True] * 5
    assert [fits(), fits(model="c"), fits(model=""), fits(model="a:mine")] == [False] * 4


async def test_the_only_model_need_not_be_named(served: Served):
    await served.gateway("a")
    await served.replica("a")
    schema = body_of(await described(served), "/v1/chat/completions")
    assert jsonschema.Draft202012Validator(schema).is_valid({"messages": MESSAGES})
