"""`request_router_config`: with a router of Ray Serve's kind it picks the replica, here a simulator's.

Applications of their own: each has another router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI
from ray import serve
from ray.serve.config import RequestRouterConfig
from tests.cluster import own_applications
from tests.ray.toy_routers import Broken, ByFirstWord

from penstock.serve import LLMConfig, LLMServer, build_llm_deployment, build_openai_app
from penstock.serve.request_router import PrefixCacheAffinityRouter

pytestmark = [pytest.mark.full, pytest.mark.parity("S20", "S34")]

WORDS = ("one", "two", "three")


class Named(LLMServer):
    """Says which replica answered: its id is the prefix of each answer's id."""

    def _app(self):
        app = super()._app()

        async def named(scope, receive, send):
            async def with_id(message):
                if message["type"] == "http.response.start":
                    message = {
                        **message,
                        "headers": [*message["headers"], (b"x-served-by", self._id.encode())],
                    }
                await send(message)

            await app(scope, receive, with_id)

        return named


def deployed(serve_url: str, router: object, name: str) -> str:
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        server_cls=Named,
        deployment_config={
            "num_replicas": 3,
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": router,
        },
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name=name, route_prefix=f"/{name}")
    return f"{serve_url}/{name}"


def served_by(url: str, prompt: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    answer = client.completions.with_raw_response.create(model="m", prompt=prompt, max_tokens=4)
    assert prompt.startswith(answer.parse().choices[0].text)
    return answer.headers["x-served-by"]


def picks(url: str) -> dict[str, int]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("penstock_picks_total{")]
    return {line.split('outcome="')[1].split('"')[0]: round(float(line.split()[-1])) for line in found}


@pytest.fixture(autouse=True)
def alone(cluster) -> Iterator[None]:
    with own_applications():
        yield


@pytest.mark.parametrize("how", ["class", "path", "config"])
def test_a_router_of_rays_kind_picks_the_replica(serve_url, how):
    kwargs = {"request_router_kwargs": {"order": " ".join(WORDS)}}
    router = {
        "class": {"request_router_class": ByFirstWord, **kwargs},
        "path": {"request_router_class": "tests.ray.toy_routers:ByFirstWord", **kwargs},
        "config": RequestRouterConfig(request_router_class=ByFirstWord, **kwargs),
    }[how]
    url = deployed(serve_url, router, f"routed-{how}")
    seen = {word: {served_by(url, f"{word} and {i} more") for i in range(4)} for word in WORDS}
    assert all(len(replicas) == 1 for replicas in seen.values()), seen
    assert len(set.union(*seen.values())) == 3
    assert picks(url) == {"router": 12}


def test_a_router_that_fails_leaves_requests_to_the_gateway(serve_url):
    url = deployed(serve_url, {"request_router_class": Broken}, "broken")
    assert Counter(served_by(url, f"hello {i}") for i in range(4)).total() == 4
    assert picks(url) == {"balance": 4}


def test_rays_consistent_hashing_keeps_a_session_on_its_replica(serve_url):
    path = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    url = deployed(serve_url, RequestRouterConfig(request_router_class=path), "hashed")
    client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)

    def replica(session: str) -> str:
        raw = client.completions.with_raw_response
        answer = raw.create(model="m", prompt="x", extra_headers={"x-session-id": session})
        return answer.headers["x-served-by"]

    seen = {f"s{i}": {replica(f"s{i}") for _ in range(3)} for i in range(12)}
    assert all(len(replicas) == 1 for replicas in seen.values()), seen
    assert len(set.union(*seen.values())) > 1


def test_our_prefix_router_keeps_prompts_with_their_cache_and_costs_no_call(serve_url):
    router = {
        "request_router_class": PrefixCacheAffinityRouter,
        "request_router_kwargs": {"imbalanced_threshold": 5, "match_rate_threshold": 0.1},
    }
    url = deployed(serve_url, router, "prefixed")
    long = "the same long beginning of a prompt " * 40
    assert len({served_by(url, f"{long} {i}") for i in range(6)}) == 1
    assert "router" not in picks(url)


def test_a_router_in_the_options_of_a_deployment_picks_as_one_in_the_config(serve_url):
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", server_cls=Named)
    options = {
        "num_replicas": 3,
        "ray_actor_options": {"num_cpus": 0},
        "request_router_config": {
            "request_router_class": ByFirstWord,
            "request_router_kwargs": {"order": "one two three"},
        },
    }
    from penstock.serve import LLMRouter

    model = build_llm_deployment(config, name_prefix="Mine:", override_serve_options=options)
    serve.run(LLMRouter.as_deployment().bind([model]), name="options", route_prefix="/options")
    url = f"{serve_url}/options"
    assert "Mine:m" in serve.status().applications["options"].deployments
    assert len({served_by(url, f"two {i}") for i in range(4)}) == 1
    assert picks(url) == {"router": 4}
