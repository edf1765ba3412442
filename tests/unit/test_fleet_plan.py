"""`plan`: what happens when one fleet becomes another. The versions of deployments are the witness."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.config import LLMServingArgs
from penstock.config.fleet import changes
from penstock.config.fleet.document import StartSettings, document, read
from penstock.config.fleet.plan import FleetPlan, plan
from penstock.serve.builders import versions
from penstock.serve.gateway.catalogue import FIXED

pytestmark = pytest.mark.usefixtures("routers_pickled_once")

MODEL_VALUES: dict[str, list[Any]] = {
    "aliases": ["x", "y"],
    "engine_kwargs": [{"reply": "one"}, {"reply": "two"}],
    "routing_policy": ["least_loaded", "round_robin"],
    "log_engine_metrics": [False],
    "batch": [{"max_queued_requests": 3}, {"min_share": 0.5}],
    "runtime_env": [{"env_vars": {"REVISION": "2"}}],
    "on_demand": [{"min_awake_s": 1.0}],
    "engine_start_timeout_s": [60.0],
    "experimental_configs": [{"num_ingress_replicas": 2}],
    "lora_config": [
        {"max_num_adapters_per_replica": 3},
        {"adapters": {"legal": "/legal"}, "pinned": ["legal"]},
        {"adapters": {"legal": "https://user:word@host/legal"}},
    ],
    "deployment_config": [
        {"num_replicas": 2},
        {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}},
        {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
        {"max_queued_requests": 7},
        {"graceful_shutdown_timeout_s": 5.0},
        {"ray_actor_options": {"num_cpus": 2}},
    ],
}
GATEWAY_VALUES: dict[str, list[Any]] = {
    "default_model": ["m"],
    "request_timeout_s": [5.0],
    "prices": [{"m": {"input": 0.15, "cached_input": None}}],
    "processes": [2],
    "log_format": ["json"],
}
REST_VALUES: dict[str, list[Any]] = {
    "jobs": ["off", {"max_batch_lines": 5}],
    "ingress_deployment_config": [{"graceful_shutdown_timeout_s": 60.0}],
}


def some(values: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(several) for name, several in values.items()}
    )


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    others = draw(st.dictionaries(st.sampled_from(["a", "b"]), some(MODEL_VALUES), max_size=2))
    models = {"m": draw(some(MODEL_VALUES)), **others}
    return {
        "llm_configs": [model(name, **fields) for name, fields in models.items()],
        "gateway": draw(some(GATEWAY_VALUES)),
        **draw(some(REST_VALUES)),
    }


def model(name: str, **fields: Any) -> dict[str, Any]:
    if isinstance(alias := fields.get("aliases"), str):
        fields["aliases"] = [f"{name}-{alias}"]
    return {"model_loading_config": {"model_id": name}, "llm_engine": "sim", **fields}


def fleet(*models: dict[str, Any], **rest: Any) -> LLMServingArgs:
    return LLMServingArgs.parse({"llm_configs": list(models), **rest})


def planned(before: LLMServingArgs, after: LLMServingArgs) -> FleetPlan:
    """With the versions that builders give."""
    old, new = versions(before), versions(after)
    return plan(before, after, [name for name in new if name in old and old[name] != new[name]])


GATEWAYS = {"LLMRouter", "LLMJobs", "LLMControl"}


def check(found: FleetPlan) -> None:
    """What changes cost is what the versions of deployments say."""
    everywhere = any(change.cost == "roll" for change in found.gateway)
    rolled: set[str] = set()
    for one in found.models:
        costs = {change.cost for change in one.changes}
        assert one.action not in ("added", "removed") or not one.restarts
        if one.action in ("rolled", "scaled", "live", "unchanged"):
            assert (one.action == "rolled") == ("roll" in costs or everywhere), one
            assert bool(one.restarts) == (one.action == "rolled")
        rolled |= set(one.restarts)
    assert set(found.restarts) - rolled <= GATEWAYS
    if all(model.action == "unchanged" for model in found.models) and not found.gateway:
        assert not found.restarts
    changed = [*found.gateway, *(change for one in found.models for change in one.changes)]
    costs = {change.cost for change in changed}
    assert ("LLMRouter" in found.restarts) == bool("gateway" in costs or everywhere)
    assert "jobs" not in costs or "LLMJobs" in found.restarts


@settings(max_examples=40, deadline=None)
@given(fleets(), fleets())
def test_what_changes_cost_is_what_versions_say(before: dict[str, Any], after: dict[str, Any]):
    old, new = LLMServingArgs.parse(before), LLMServingArgs.parse(after)
    check(planned(old, new))
    assert planned(new, new).is_empty


MORE: dict[str, list[Any]] = {
    "fallbacks": [["n"]],
    "slo": [{"ttft_ms": 100.0}],
    "placement_group_config": [{"bundle_per_worker": {"CPU": 2}}],
    "callback_config": [{"callback_class": "penstock.engines.callback:CallbackBase"}],
    "preprocessor": ["json:dumps"],
    "postprocessor": ["json:dumps"],
    "deployment_config": [
        {"max_replicas_per_node": 2},
        {"max_ongoing_requests": 7},
        {"health_check_period_s": 3.0},
        {"max_surge_percent": 50},
        {"user_config": {"x": 1}},
        {"request_router_config": {"initial_backoff_s": 0.5}},
    ],
}
SINGLE = [
    *({"llm_configs": {name: value}} for name, several in MODEL_VALUES.items() for value in several),
    *({"llm_configs": {name: value}} for name, several in MORE.items() for value in several),
    *(
        {"gateway": {name: value}}
        for name, value in {"cors": {"origins": ["*"]}, "tenants": {"a": {}}}.items()
    ),
    *({"gateway": {name: value}} for name, several in GATEWAY_VALUES.items() for value in several),
    *({name: value} for name, several in REST_VALUES.items() for value in several),
]


@pytest.mark.parametrize("change", SINGLE, ids=str)
def test_it_is_so_for_each_field_alone(change: dict[str, Any]):
    fields = change.get("llm_configs", {})
    rest = {name: value for name, value in change.items() if name != "llm_configs"}
    old, new = fleet(model("m"), model("n")), fleet(model("m", **fields), model("n"), **rest)
    check(planned(old, new))
    check(planned(new, old))


@given(fleets())
def test_a_fleet_survives_as_a_document(given: dict[str, Any]):
    args = LLMServingArgs.parse(given)
    again = StartSettings().applied(document(args))
    assert plan(args, again).is_empty
    assert document(again) == {"gateway": {}, **document(args)}


def test_every_field_has_a_cost():
    assert {name for name, cost in changes.GATEWAY.items() if cost != "live"} == {*FIXED}
    rest = LLMServingArgs.model_fields.keys() - {"llm_configs", "gateway"}
    assert changes.SERVING.keys() == rest


LEGAL = {"adapters": {"legal": "/legal"}}


@pytest.mark.parametrize(
    ("before", "after", "costs"),
    [
        (LEGAL, {"adapters": {"legal": "/legal-2"}}, {"adapters": "live"}),
        (LEGAL, {**LEGAL, "pinned": ["legal"], "refresh_interval_s": 5.0, "download_timeout_s": 9.0,
                 "max_download_tries": 1, "dynamic_lora_loading_path": "/more"},
         {"dynamic_lora_loading_path": "live", "pinned": "live", "refresh_interval_s": "live",
          "download_timeout_s": "live", "max_download_tries": "live"}),
        (LEGAL, {**LEGAL, "max_num_adapters_per_replica": 3}, {"max_num_adapters_per_replica": "roll"}),
        (LEGAL, {"adapters": {"legal": "https://user:word@host/legal"}}, {"adapters": "roll"}),
        (None, LEGAL, {"": "roll"}),
        (LEGAL, None, {"": "roll"}),
    ],
)  # fmt: skip
def test_what_changes_of_adapters_cost(before: Any, after: Any, costs: dict[str, str]):
    old, new = (fleet(model("m", **({"lora_config": lora} if lora else {}))) for lora in (before, after))
    found = planned(old, new)
    check(found)
    wanted = {f"lora_config.{name}".strip("."): cost for name, cost in costs.items()}
    assert {change.path: change.cost for change in found.models[0].changes} == wanted


def actions(found: FleetPlan) -> dict[str, str]:
    return {one.model: one.action for one in found.models}


def test_it_says_what_becomes_of_each_model():
    many = {"deployment_config": {"num_replicas": 2}}
    before = fleet(model("same"), model("alias"), model("more"), model("other"), model("gone"))
    after = fleet(
        model("same"),
        model("alias", aliases=["x"]),
        model("more", **many),
        model("other", engine_kwargs={"reply": "!"}),
        model("new"),
    )
    assert actions(planned(before, after)) == {
        "same": "unchanged",
        "alias": "live",
        "more": "scaled",
        "other": "rolled",
        "gone": "removed",
        "new": "added",
    }


NODES = [{"CPU": 16.0, "GPU": 4.0}]
GPU: dict[str, Any] = {"accelerator_config": {"kind": "gpu"}}
GPUS = {**GPU, "deployment_config": {"num_replicas": 2}}


@pytest.mark.parametrize(
    ("free", "surge", "peak"), [({"CPU": 9.0, "GPU": 2.0}, 2, 4), ({"CPU": 9.0, "GPU": 0.0}, 0, 2)]
)
def test_new_replicas_start_first_where_there_is_room(free: dict[str, float], surge: int, peak: int):
    changed = model("m", **GPUS, engine_kwargs={"reply": "!"})
    found = plan(fleet(model("m", **GPUS)), fleet(changed), ["LLMServer:m"], NODES, free)
    assert (found.models[0].surge, found.gpus) == (surge, (2, 2, peak))
    assert bool(found.models[0].cuts) == (surge == 0)


def test_more_gpus_than_there_are_is_a_fault():
    many = {**GPUS, "deployment_config": {"num_replicas": 5}}
    before, after = fleet(model("m", **GPUS)), fleet(model("m", **many))
    found = plan(before, after, nodes=NODES, free={"GPU": 2.0})
    assert "needs 5 GPUs and the cluster has 4" in found.faults[0]
    found = plan(before, after, nodes=NODES, free={"GPU": 2.0}, can_grow=True)
    assert not found.faults
    assert "needs 5 GPUs and the cluster has 4: what has no room waits" in found.notes[0]


def test_gpus_are_counted_as_each_fleet_and_each_half_of_a_model_has_them():
    prefill = {"prefill": {"deployment_config": {"num_replicas": 3}}}
    before, after = model("m", **GPUS), model("m", **GPUS, engine_kwargs={"tensor_parallel_size": 2})
    assert plan(fleet(before), fleet(after), nodes=NODES).gpus == (2, 4, 4)
    found = plan(fleet(before), fleet(model("m", **GPUS, llm_engine="vllm", **prefill)), nodes=NODES)
    assert found.gpus == (2, 5, 5)
    assert "needs 5 GPUs and the cluster has 4" in found.faults[0]


def test_parts_of_gpus_that_fill_them_have_room():
    parts = [0.2, 0.4, *[0.6] * 4]
    assert sum(parts) > 3
    models = [
        model(f"m{number}", placement_group_config={"bundles": [{"GPU": part}]}, **GPU)
        for number, part in enumerate(parts)
    ]
    found = plan(fleet(*models), fleet(*models), nodes=[{"GPU": 3.0, "CPU": 9.0}])
    assert (found.faults, found.notes, found.gpus) == ([], [], (3, 3, 3))


@pytest.mark.parametrize(
    ("jobs", "kept"),
    [
        ({}, "usage, budgets, the audit log, files and batches"),
        ({"jobs": {"storage": "/jobs"}}, "usage, budgets, the audit log"),
        ({"jobs": "off"}, "usage, budgets, the audit log"),
    ],
)
def test_what_begins_anew_at_another_port_is_said(jobs: dict[str, Any], kept: str):
    before, after = (fleet(model("m"), gateway={"port": port}, **jobs) for port in (8000, 9000))
    assert plan(before, before).notes == []
    (note,) = plan(before, after).notes
    assert note == f"At port 9000 these begin anew, which a service keeps by its port: {kept}."


def test_an_empty_port_is_the_commands(tmp_path: Path):
    models = "llm_configs: [{model_loading_config: {model_id: m}, llm_engine: sim}]"
    (file := tmp_path / "fleet.yaml").write_text(f"{models}\ngateway:\n  port:\n  host: box\n")
    start = StartSettings(defaults={"port": 8000})
    assert start.applied(read(str(file))).gateway.local_url == "http://box:8000"
    assert make_plan(Arguments(sources=(str(file),))).gateway.local_url == "http://box:8000"


def test_a_secret_is_not_shown():
    keys = [{"api_key": text} for text in ("first-secret", "second-secret")]
    before, after = (fleet(model("m"), gateway=key) for key in keys)
    found = plan(before, after)
    assert [one.path for one in found.gateway] == ["api_key"]
    assert "secret" not in repr(found.gateway)


def test_threads_may_build_at_the_same_time():
    args = fleet(model("m"), model("n"))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(versions, [args] * 40))
    assert found == [versions(args)] * 40


def test_another_file_of_a_routing_policy_is_a_change_by_itself():
    assert not FleetPlan([], restarts=["LLMRouter"]).is_empty
