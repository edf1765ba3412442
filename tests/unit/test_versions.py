"""Which changes of a config give a deployment another version: Serve keeps the replicas of all others."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve import Application, Deployment

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs
from penstock.config.fleet.plan import plan
from penstock.config.schema.jobs import JobsConfig
from penstock.errors import ConfigError
from penstock.serve import LLMRouter, LLMServer, build_openai_app
from penstock.serve.replica import version
from penstock.serve.replica.version import versioned

pytestmark = pytest.mark.usefixtures("routers_pickled_once")

A, B, CONTROL, ROUTER, JOBS = "LLMServer:a", "LLMServer:b", "LLMControl", "LLMRouter", "LLMJobs"


def model(name: str, **given: Any) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": name}, llm_engine="sim", **given)


def deployments(value: Any) -> dict[str, Deployment]:
    """Those of an application and of all that it is bound to, by name."""
    if isinstance(value, Application):
        made: Any = value._bound_deployment
        return {made.name: made} | deployments([*made.init_args, *made.init_kwargs.values()])
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {name: one for part in parts for name, one in deployments(part).items()}


def made(*models: LLMConfig, jobs: bool = False, **gateway: Any) -> dict[str, Deployment]:
    config = JobsConfig() if jobs else None
    return deployments(LLMRouter.as_deployment().bind(models, GatewayConfig(**gateway), jobs=config))


def versions(*models: LLMConfig, **gateway: Any) -> dict[str, str | None]:
    return {name: one.version for name, one in made(*models, **gateway).items()}


def told(*models: LLMConfig, **gateway: Any) -> list[Any]:
    """What Serve passes on to processes that run."""
    found = made(*models, jobs=True, **gateway)
    return [found[name].user_config for name in (ROUTER, JOBS)]


def changed(*models: LLMConfig, **gateway: Any) -> set[str]:
    before = versions(model("a"), model("b"), jobs=True)
    after = versions(*models, **{"jobs": True, **gateway})
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_the_same_fleet_has_the_same_versions():
    assert changed(model("a"), model("b")) == set()
    assert None not in versions(model("a")).values()
    named = LLMConfig(model_loading_config={"model_id": "a", "model_source": "a"}, llm_engine="sim")
    assert changed(named, model("b")) == set()
    assert plan(*(LLMServingArgs(llm_configs=[one]) for one in (named, model("a")))).is_empty


@pytest.mark.parametrize(
    "given",
    [
        {"aliases": ["x"]},
        {"fallbacks": ["b"]},
        {"routing_policy": "round_robin"},
        {"routing_config": {"session_header": "x-user"}},
        {"log_engine_metrics": False},
        {"batch": {"max_queued_requests": 5}},
        {"deployment_config": {"max_queued_requests": 5}},
        {"deployment_config": {"max_ongoing_requests": 5}},
    ],
)
def test_what_only_gateways_read_restarts_nothing_and_is_told(given: dict[str, Any]):
    assert changed(model("a", **given), model("b")) == set()
    for before, now in zip(told(model("a"), model("b")), told(model("a", **given), model("b")), strict=True):
        assert before != now


def test_other_adapters_restart_nothing_and_control_is_told():
    few: dict[str, Any] = {"dynamic_lora_loading_path": "/adapters", "max_num_adapters_per_replica": 4}
    more = {**few, "adapters": {"legal": "/legal"}, "pinned": ["legal"], "refresh_interval_s": None}
    before, after, larger = (
        made(model("a", lora_config=lora))
        for lora in (few, more, {**more, "max_num_adapters_per_replica": 5})
    )
    assert {name: one.version for name, one in before.items()} == {
        name: one.version for name, one in after.items()
    }
    assert before[CONTROL].user_config["a"]["adapters"] == {}
    assert after[CONTROL].user_config == larger[CONTROL].user_config
    assert after[CONTROL].user_config["a"]["pinned"] == ["legal"]
    assert larger[A].version != after[A].version != made(model("a"))[A].version
    assert version.of_answers(model("a", lora_config=few)) == version.of_answers(model("a", lora_config=more))


def test_a_login_in_a_source_is_part_of_the_version_and_told_nobody():
    found = [
        made(model("a", lora_config={"adapters": {"legal": f"https://user:{word}@host/legal"}}))
        for word in ("one", "two")
    ]
    assert [one[CONTROL].user_config for one in found] == [{}, {}]
    assert found[0][A].version != found[1][A].version


@pytest.mark.parametrize(
    "given",
    [
        {"num_replicas": 2},
        {"health_check_period_s": 7.0},
        {"user_config": {"own": 1}},
    ],
)
def test_what_serve_changes_in_place_restarts_nothing(given: dict[str, Any]):
    assert changed(model("a", deployment_config=given), model("b")) == set()


def test_replicas_restart_when_they_begin_to_be_scaled_by_their_load():
    """Ray Serve has replicas report it from their start on, or never."""
    scaled = [model("a", deployment_config={"autoscaling_config": {"max_replicas": most}}) for most in (3, 4)]
    assert changed(scaled[0], model("b")) == {A}
    assert versions(scaled[0]) == versions(scaled[1])


@pytest.mark.parametrize(
    "given",
    [
        {"engine_kwargs": {"reply": "hello"}},
        {"runtime_env": {"env_vars": {"REVISION": "2"}}},
        {"runtime_env": {"env_vars": {"OWN_TOKEN": "secret"}}},
        {"batch": {"min_share": 0.5}},
        {"deployment_config": {"graceful_shutdown_timeout_s": 60}},
    ],
)
def test_an_engines_own_config_restarts_only_that_one(given: dict[str, Any]):
    assert changed(model("a", **given), model("b")) == {A}


LIVE: dict[str, Any] = {
    "cors": {"origins": ["https://example.org"]},
    "keys_file": "keys.yaml",
    "oidc": {"issuer": "https://id.example", "audience": "penstock"},
    "tenants": {"t": {"limits": {"requests_per_minute": 5}}},
    "prices": {"a": {"input": 0.15, "output": 0.6}, "a:legal": {"input": 1}},
    "isolate_cache": True,
    "priority_tier": True,
    "default_model": "b",
    "wait_for_replica_s": 7,
    "request_timeout_s": 5,
    "max_body_bytes": 1 << 20,
    "max_bodies_bytes": 2 << 30,
    "max_connections_per_address": 9,
}


@pytest.mark.parametrize("name", LIVE)
def test_what_a_gateway_takes_over_restarts_nothing_and_is_told(name: str):
    assert changed(model("a"), model("b"), **{name: LIVE[name]}) == set()
    assert told(model("a"), model("b")) != told(model("a"), model("b"), **{name: LIVE[name]})


def test_a_process_keeps_what_it_started_with_and_serve_is_told_no_secret():
    for given in ({"api_key": "the-key"}, {"admin_key": "the-key"}, {"port": 8001}, {"log_format": "json"}):
        restarted = changed(model("a"), model("b"), **given)
        assert ROUTER in restarted
        assert made(model("a"), **given)[CONTROL].init_args == (given.get("port"),)
        assert (JOBS in restarted) == (given.keys() <= {"port", "log_format"})
        assert (CONTROL in restarted) == ("port" in given)  # it names the file of usage by that
        assert "the-key" not in str(told(model("a"), model("b"), **given))


def test_jobs_more_or_less_restart_the_gateway_alone():
    assert changed(model("a"), model("b"), jobs=False) == {ROUTER, JOBS}


def test_a_model_more_or_less_restarts_no_other_process():
    assert changed(model("a"), model("b"), model("c")) == {"LLMServer:c"}
    assert changed(model("a")) == {B}


def test_a_wrong_config_of_the_gateway_is_refused_before_it_is_told():
    with pytest.raises(ConfigError, match="default model 'x' is none of"):
        made(model("a"), default_model="x")
    with pytest.raises(ConfigError, match="prices names 'x'; the models' ids are a"):
        made(model("a"), prices={"x": {"input": 1}})


class Reconfigured(LLMRouter):
    """Has a `user_config` of its own."""


def test_a_user_config_of_the_users_own_is_kept_and_changes_restart_that_gateway():
    def bound(*models: LLMConfig) -> Deployment:
        own = {"user_config": {"own": 1}}
        return deployments(Reconfigured.as_deployment(own).bind(models))[ROUTER]

    assert bound(model("a")).user_config == {"own": 1}
    assert bound(model("a")).version != bound(model("a", aliases=["x"])).version


def test_engines_get_nothing_of_the_gateways():
    configs = [model("a", fallbacks=["b"]), model("b")]
    made = deployments(build_openai_app({"llm_configs": configs, "gateway": {"api_key": "the-key"}}))
    assert [made[name].init_kwargs["gateway"] for name in (A, B)] == [None, None]
    assert made[A].init_args[0].fallbacks == []


def test_a_model_with_a_gateway_of_its_own_restarts_with_it():
    def version(**given: Any) -> str | None:
        return deployments(LLMServer.as_deployment().bind(model("a"), **given))[A].version

    assert version() == version()
    assert version() != version(gateway=GatewayConfig(request_timeout_s=5))


def test_code_that_a_config_names_is_part_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hook = tmp_path / "versions_hook.py"
    monkeypatch.syspath_prepend(tmp_path)
    hook.write_text("def add(request): return request\n")
    own = model("a", preprocessor="versions_hook:add")
    before = versions(own)
    hook.write_text("def add(request): return dict(request)\n")
    after = versions(own)
    assert {name for name in before if before[name] != after[name]} == {A}


class Own(LLMServer):
    """A server class in a file."""


def test_a_server_class_in_a_file_has_a_version_and_one_in_a_function_has_none():
    class Inner(LLMServer):
        """Its variables are not known."""

    assert versions(model("a", server_cls=Own))[A]
    assert versions(model("a", server_cls=Own))[A] != versions(model("a"))[A]
    assert versions(model("a", server_cls=Inner))[A] is None
    assert versions(model("a", server_cls=Inner))[ROUTER]


def test_an_object_of_unknown_state_leaves_the_version_to_serve():
    assert versioned(serve.deployment(Own), [object()]).version is None


def test_replicas_that_send_prompts_to_prefill_replicas_restart_as_gateways_do():
    def changed(**given: Any) -> set[str]:
        made = [
            deployments(LLMRouter.as_deployment().bind([model]))
            for model in (LLMConfig(**common), LLMConfig(**common, **given))
        ]
        return {name for name in made[0] if made[0][name].version != made[1][name].version}

    common = {"model_loading_config": {"model_id": "a"}, "accelerator_config": {"kind": "cpu"}, "prefill": {}}
    assert changed(aliases=["x"]) == set()
    assert changed(deployment_config={"num_replicas": 2}) == set()
    assert changed(routing_policy="round_robin") == {A}


def test_a_build_asks_serve_once_for_what_has_failed(monkeypatch, patched):
    asked: list[int] = []

    def status() -> Any:
        asked.append(1)
        failed = SimpleNamespace(status="DEPLOY_FAILED")
        return SimpleNamespace(applications={"app": SimpleNamespace(deployments={A: failed})})

    monkeypatch.setattr(version, "ray", SimpleNamespace(is_initialized=lambda: True))
    patched(serve, "status", status)
    patched(time, "monotonic", lambda: 0.5)
    version._failed.cache_clear()
    try:
        application = LLMRouter.as_deployment().bind([model("a"), model("b")])
        made = deployments(application)
        assert (
            made[A]._deployment_config.health_check_timeout_s
            > made[B]._deployment_config.health_check_timeout_s
        )
        assert len(asked) == 1
    finally:
        version._failed.cache_clear()
