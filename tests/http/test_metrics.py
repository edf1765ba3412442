"""/metrics and /health: ours, and the engines' own under their replica's name."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, chat, until
from tests.dashboard import without_series

from penstock.config import LLMConfig
from penstock.serve.fleet import links
from penstock.serve.gateway.catalogue import ServedModel


async def samples(served: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    async with served.http() as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_requests_are_counted_by_model_and_outcome(served: Served):
    await served.gateway("m")
    await served.replica(max_model_len=8)
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat("a", max_tokens=1))
        await http.post("/v1/chat/completions", json=chat("a b c d e f g h i j"))
        await http.post("/v1/chat/completions", json=chat() | {"model": "unknown"})
    counted = {
        (labels["model"], labels["status"]): value
        for labels, value in (await samples(served))["penstock_requests_total"]
    }
    assert counted == {("m", "200"): 1, ("m", "400"): 1, ("", "404"): 1}


def of(found: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    """The value of the one child for chats with model m."""
    asked = {"model": "m", "route": "/v1/chat/completions"}
    (value,) = [value for labels, value in found[name] if labels == asked]
    return value


async def test_a_stream_is_timed_to_its_first_token_between_tokens_and_to_its_end(served: Served):
    await served.gateway("m")
    await served.replica(step_base_ms=4.0, step_per_request_ms=0.0)
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=10, ignore_eos=True))
    found = await samples(served)
    overhead = of(found, "penstock_gateway_overhead_seconds_sum")
    first = of(found, "penstock_time_to_first_token_seconds_sum")
    between = of(found, "penstock_inter_token_latency_seconds_sum")
    whole = of(found, "penstock_request_seconds_sum")
    assert 0 < overhead < first < first + between < whole
    assert 1 <= of(found, "penstock_inter_token_latency_seconds_count") <= 9


@pytest.mark.parity("S28")
async def test_every_query_of_the_dashboard_reads_a_series(served: Served):
    """On a simulator; tests/ray/test_served_demo.py does it with vLLM."""
    await served.gateway(ServedModel("m", created=1, adapter_slots=4))
    await served.replica(max_model_len=8)
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat("a", max_tokens=3, stream=True))
        await http.post("/v1/chat/completions", json=chat("a b c d e f g h i j"))
        assert without_series((await http.get("/metrics")).text) == []


async def test_an_answer_that_does_not_stream_has_no_first_token(served: Served):
    await served.gateway("m")
    await served.replica()
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat())
    found = await samples(served)
    assert of(found, "penstock_time_to_first_token_seconds_count") == 0
    assert of(found, "penstock_request_seconds_count") == 1


async def test_routes_are_told_apart_by_their_names_in_the_table(served: Served):
    await served.gateway("m")
    await served.replica()
    async with served.http() as http:
        await http.post("/tokenize?model=m", json={"prompt": "a"})
        await http.get("/v1/responses/resp_1?model=m")
        await http.get("/v1/responses/resp_2?model=m")
    counted = {
        (labels["model"], labels["route"]): value
        for labels, value in (await samples(served))["penstock_request_seconds_count"]
    }
    assert counted[("m", "/tokenize")] == 1
    assert counted[("m", "/v1/responses/{id}")] == 2


async def test_engines_metrics_are_merged_under_a_replica_label(served: Served):
    await served.gateway("m")
    replicas = [await served.replica(reply="two words") for _ in range(2)]
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat())
    made = (await samples(served))["vllm:generation_tokens_total"]
    assert {labels["replica"] for labels, _ in made} == {r.address.replica_id for r in replicas}
    assert sorted(value > 0 for _, value in made) == [False, True]


async def test_engines_metrics_can_be_left_out(served: Served):
    quiet = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", log_engine_metrics=False)
    await served.gateway(ServedModel.of(quiet))
    await served.replica()
    async with served.http() as http:
        text = (await http.get("/metrics")).text
    assert "penstock_" in text
    assert "vllm:" not in text


async def test_a_replica_without_metrics_does_not_spoil_the_others(served: Served):
    await served.gateway("m")

    async def app(scope, receive, send):
        raise ValueError("no metrics here")

    await served.app(app)
    replica = await served.replica()
    made = (await samples(served))["vllm:num_requests_running"]
    assert [labels["replica"] for labels, _ in made] == [replica.address.replica_id]


async def test_metrics_that_are_too_large_are_left_out_whole(served: Served, monkeypatch: pytest.MonkeyPatch):
    await served.gateway("m")
    await served.replica()
    monkeypatch.setattr(links, "_MOST_BYTES", 100)
    found = await samples(served)
    assert "penstock_open_requests" in found
    assert "vllm:num_requests_running" not in found


async def test_health_is_503_until_every_model_has_a_replica(served: Served):
    await served.gateway("a", "b")
    await served.replica("a")
    async with served.http() as http:
        before = await http.get("/health")
        await served.replica("b")
        after = await http.get("/health")
    assert (before.status_code, before.json()) == (
        503,
        {
            "status": "unavailable",
            "models": {
                "a": {"ready": 1, "resting": 0, "replicas": 1, "wanted": 1},
                "b": {"ready": 0, "resting": 0, "replicas": 0, "wanted": 0},
            },
        },
    )
    assert (after.status_code, after.json()["status"]) == (200, "ok")


async def test_streams_of_a_replica_that_has_left_are_still_open_requests(served: Served):
    await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    async with served.http() as http:
        async with http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=4000, ignore_eos=True)
        ) as stream:
            lines = stream.aiter_lines()  # without a reference, it would close the stream
            await anext(lines)
            served.remove("m", replica.address)
            assert 'penstock_open_requests{model="m"} 1.0' in (await http.get("/metrics")).text
        await until(lambda: served.table.leases("m") == 0)
        assert 'penstock_open_requests{model="m"} 0.0' in (await http.get("/metrics")).text
