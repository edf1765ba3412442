"""Versions of a model: what a config with `versions` becomes, what a change costs, which one is picked."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.client.fleet import planned as planned_by_service
from penstock.cli.client.service import AdminTarget
from penstock.config import LLMConfig, LLMServingArgs
from penstock.config.fleet.document import document
from penstock.config.fleet.plan import FleetPlan, plan
from penstock.errors import ConfigError, ModelNotFound
from penstock.preflight.start import missing_folders
from penstock.serve.builders import build_llm_deployment, build_openai_app, versions
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.telemetry.shadows import _append
from penstock.serve.routing.split import pick

pytestmark = pytest.mark.parity("X15")

A, B = {"name": "a", "weight": 95}, {"name": "b", "weight": 5, "engine_kwargs": {"reply": "b"}}


def fleet(*entries: dict[str, Any], **more: Any) -> LLMServingArgs:
    model = {
        "model_loading_config": {"model_id": "qwen"},
        "llm_engine": "sim",
        "versions": [*entries],
        **more,
    }
    other = {"model_loading_config": {"model_id": "other"}, "llm_engine": "sim", "fallbacks": ["qwen"]}
    return LLMServingArgs.parse({"llm_configs": [model, other]})


def test_each_version_is_a_config():
    given = {"engine_kwargs": {"reply": "a", "max_num_seqs": 3}, "aliases": ["x"], "fallbacks": ["m"]}
    a, b, _ = fleet(A, B, **given).llm_configs
    assert (a.model_id, a.aliases, a.engine_kwargs) == ("qwen", ["qwen@a", "x"], given["engine_kwargs"])
    assert (b.model_id, b.aliases, b.model_source) == ("qwen@b", ["qwen", "x"], "qwen")
    assert b.engine_kwargs == {"reply": "b", "max_num_seqs": 3}
    assert b.fallbacks == ["m"]
    assert plan(fleet(A, B), LLMServingArgs.parse(document(fleet(A, B)))).is_empty


def test_prices_name_a_model_or_one_of_its_versions():
    own = [{"name": name, "engine_kwargs": {"reply": name}} for name in "bc"]
    model = {"model_loading_config": {"model_id": "qwen"}, "llm_engine": "sim", "versions": own}
    prices = {"qwen": {}, "qwen:legal": {}, "qwen@b": {}, "qwen@b:legal": {}}
    build_openai_app(LLMServingArgs.parse({"llm_configs": [model], "gateway": {"prices": prices}}))
    with pytest.raises(ConfigError, match="prices names 'qwen@d'"):
        build_openai_app(
            LLMServingArgs.parse({"llm_configs": [model], "gateway": {"prices": {"qwen@d": {}}}})
        )


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([A, A], "names 'a' more than once"),
        ([A, {"name": "c"}], "'a' and 'c' are the same"),
        ([{**B, "weight": 0}], "all weights are 0"),
        ([A, {**B, "engine_kwarg": {}}], "did you mean 'engine_kwargs'"),
        ([A, {**B, "aliases": ["y"]}], "aliases belongs to the model"),
        ([A, {**B, "model_loading_config": {"model_id": "z"}}], "leave model_id out"),
        ([A, {"name": "a b"}], "name"),
        ([], "unknown version 'b': there are no versions."),
    ],
)
def test_a_wrong_version_is_one_sentence(entries: list[dict[str, Any]], says: str):
    with pytest.raises(ConfigError, match=says):
        fleet(*entries, **({} if entries else {"canary": "b"}))


def test_steps_of_a_canary_do_not_fall():
    with pytest.raises(ConfigError, match=r"canary.steps: must not fall, and 5 comes after 50\."):
        fleet(A, B, canary={"version": "b", "steps": [50, 50, 5]})


def test_an_id_that_a_version_makes_is_not_another_models():
    twice = (
        r"llm_configs\[1\].versions\[1\].name: 'other@b' is used twice; .* A version makes the id MODEL@NAME"
    )
    models = [
        {"model_loading_config": {"model_id": one}, "llm_engine": "sim"} for one in ("other@b", "other")
    ]
    with pytest.raises(ConfigError, match=twice):
        LLMServingArgs.parse({"llm_configs": [models[0], {**models[1], "versions": [A, B]}]})


def test_a_mistake_that_the_service_finds_is_told_by_its_place_in_the_file(tmp_path: Path):
    class Refusing(AdminTarget):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            raise ConfigError("2:\nllm_configs[1].engine_kwargs.reply: no.\nllm_configs[2].aliases: no.")

    file = tmp_path / "fleet.yaml"
    models = document(LLMServingArgs.parse({"llm_configs": [{"model_loading_config": {"model_id": "o"}}]}))
    qwen = {"model_loading_config": {"model_id": "qwen"}, "versions": [A, B]}
    file.write_text(yaml.safe_dump({"llm_configs": [qwen, *models["llm_configs"]]}))
    with pytest.raises(ConfigError) as error:
        planned_by_service(Refusing("", None), {}, str(file))
    first, second = str(error.value).splitlines()[1:]
    assert first == f"{file}:8: llm_configs[0].versions[1].engine_kwargs.reply: no."
    assert second == f"{file}:11: llm_configs[1].aliases: no."


def test_the_folder_for_answers_of_a_shadow_must_be_there(tmp_path: Path):
    shadow = {"version": "b", "answers": str(tmp_path / "none" / "shadow.jsonl")}
    _, b, _ = fleet(A, B, shadow=shadow).llm_configs
    assert missing_folders(b) == [
        f"llm_configs[0].shadow.answers: '{tmp_path}/none' is no folder of this machine."
    ]
    (tmp_path / "none").mkdir()
    assert missing_folders(b) == []
    _append(shadow["answers"], b"{}")
    assert Path(shadow["answers"]).stat().st_mode & 0o777 == 0o600


def test_versions_need_a_gateway():
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", versions=[A, B])
    with pytest.raises(ConfigError, match="build_openai_app"):
        build_llm_deployment(config)


def planned(before: LLMServingArgs, after: LLMServingArgs) -> tuple[FleetPlan, dict[str, str]]:
    old, new = versions(before), versions(after)
    found = plan(before, after, [name for name in new if name in old and old[name] != new[name]])
    return found, {one.model: one.action for one in found.models if one.action != "unchanged"}


@pytest.mark.parametrize(
    ("before", "after", "actions"),
    [
        ([], [A, B], {"qwen": "live", "qwen@b": "added"}),
        ([A, B], [{**A, "weight": 1}, B], {"qwen": "live"}),
        ([A, B], [B], {"qwen": "removed"}),
        ([A, B], [A, {**B, "engine_kwargs": {"reply": "c"}}], {"qwen@b": "rolled"}),
    ],
)
def test_what_a_change_of_versions_costs(before: list[Any], after: list[Any], actions: dict[str, str]):
    found, done = planned(fleet(*before), fleet(*after))
    assert done == actions
    assert list(found.restarts) == [
        f"LLMServer:{name}" for name, action in actions.items() if action == "rolled"
    ]


def test_requests_are_shared_out_by_weight():
    random.seed(15)
    for key in (lambda i: "", str):
        counts = Counter(pick({"a": 70.0, "b": 25.0, "c": 5.0, "d": 0.0}, key(i)) for i in range(20_000))
        for name, share in {"a": 0.7, "b": 0.25, "c": 0.05, "d": 0.0}.items():
            assert counts[name] == pytest.approx(
                20_000 * share, abs=4 * (20_000 * share * (1 - share)) ** 0.5
            )


def test_a_key_moves_only_to_a_version_that_grows():
    before, after = {"a": 60.0, "b": 5.0, "c": 35.0}, {"a": 60.0, "b": 25.0, "c": 35.0}
    moved = [(pick(before, str(i)), pick(after, str(i))) for i in range(5000)]
    assert {new for old, new in moved if old != new} == {"b"}


def test_a_key_for_a_model_has_its_versions_and_one_for_a_version_has_that():
    catalogue = Catalogue([ServedModel.of(one) for one in fleet(A, B, aliases=["x"]).llm_configs], "qwen")
    last = lambda found: found[-1]  # noqa: E731
    assert catalogue.resolve("x", None, last)[0].id == "qwen@b"
    assert catalogue.resolve("qwen@a", None, last)[0].id == "qwen"
    assert catalogue.only(frozenset({"qwen"})).resolve("qwen@b")[0].id == "qwen@b"
    part = catalogue.only(frozenset({"qwen@b"}))
    assert {part.resolve(name)[0].id for name in (None, "qwen", "x", "qwen@b")} == {"qwen@b"}
    with pytest.raises(ModelNotFound):
        part.resolve("qwen@a")
