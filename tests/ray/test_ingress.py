"""Programs of the bind pattern, and classes in the gateway's place: on the simulator.

Applications of their own: what is shown is how they are put together.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from openai import NotFoundError, OpenAI
from ray import serve
from tests.cluster import own_applications
from tests.ray.toy_ingress import Louder

from penstock.errors import ConfigError
from penstock.serve import LLMConfig, build_openai_app
from penstock.serve.deployment import LLMServer
from penstock.serve.ingress import DEFAULT_ENDPOINTS, OpenAiIngress, make_fastapi_ingress

pytestmark = pytest.mark.parity("S34", "S4")


def config(model_id: str, **values: object) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": model_id}, llm_engine="sim", **values)


def bound(llm_config: LLMConfig):
    options = LLMServer.get_deployment_options(llm_config)
    return serve.deployment(LLMServer).options(**options).bind(llm_config)


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def says(url: str, model: str = "one", text: str = "Hello there") -> str:
    messages = [{"role": "user", "content": text}]
    return client(url).chat.completions.create(model=model, messages=messages).choices[0].message.content


@pytest.fixture(autouse=True)
def alone(cluster) -> Iterator[None]:
    with own_applications():
        yield


def test_models_that_a_program_bound_itself_stand_behind_the_ingress_that_it_bound(serve_url):
    configs = [config("one"), config("two")]
    options = OpenAiIngress.get_deployment_options(llm_configs=configs)
    ingress = serve.deployment(make_fastapi_ingress(OpenAiIngress)).options(**options)
    serve.run(ingress.bind([bound(each) for each in configs]), name="bind", route_prefix="/bind")
    url = f"{serve_url}/bind"
    assert {model.id for model in client(url).models.list()} == {"one", "two"}
    assert says(url, "two") == "Hello there"
    with pytest.raises(NotFoundError, match="'three' is not served"):
        says(url, "three")


def test_a_class_in_the_gateways_place_changes_requests_and_answers_its_own_paths(serve_url):
    endpoints = {**DEFAULT_ENDPOINTS, "ending": lambda app: app.get("/ending")}
    ingress = serve.deployment(make_fastapi_ingress(Louder, endpoint_map=endpoints))
    app = ingress.bind({"one": bound(config("one"))}, {"one": None}, ends_with="!")
    serve.run(app, name="loud", route_prefix="/loud")
    url = f"{serve_url}/loud"
    assert says(url) == "Hello there!"
    stream = client(url).chat.completions.create(
        model="one", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == "Hi!"
    assert httpx.get(f"{url}/ending").json() == {"ends_with": "!"}
    assert client(url).completions.create(model="one", prompt="as it is").choices[0].text == "as it is"
    assert client(url).models.retrieve("one").id == "one"
    assert httpx.get(f"{url}/metrics").status_code == 404  # it is not in the map


def test_a_builder_takes_the_class_and_the_gateway_answers_all_that_it_does_not(serve_url):
    ingress = {"ingress_cls": Louder, "ingress_extra_kwargs": {"ends_with": "!!"}}
    args = {"llm_configs": [config("one")], "ingress_cls_config": ingress}
    serve.run(build_openai_app(args), name="built", route_prefix="/built")
    url = f"{serve_url}/built"
    assert says(url) == "Hello there!!"
    assert "penstock_requests_total" in httpx.get(f"{url}/metrics").text
    assert client(url).embeddings.create(model="one", input="x").data


def test_an_app_of_ones_own_keeps_its_middleware_and_routes(serve_url):
    app = FastAPI()

    @app.middleware("http")
    async def signed(request, call_next):
        response = await call_next(request)
        response.headers["x-signed"] = "yes"
        return response

    @app.get("/plain")
    def plain() -> str:
        return "plain"

    ingress = serve.deployment(make_fastapi_ingress(OpenAiIngress, app=app))
    serve.run(ingress.bind([bound(config("one"))]), name="app", route_prefix="/app")
    url = f"{serve_url}/app"
    assert httpx.get(f"{url}/plain").json() == "plain"
    assert httpx.get(f"{url}/v1/models").headers["x-signed"] == "yes"
    assert says(url) == "Hello there"


def test_an_ingress_that_names_a_model_otherwise_is_refused(cluster):
    with pytest.raises(ConfigError, match="give both the same model ids"):
        OpenAiIngress({"a": None}, {"b": None})
