"""The JSON schema for editors takes what the loader takes, and finds what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from tests.pages import ROOT, blocks
from tests.unit.test_fleet_plan import SINGLE, model

from penstock.config import load_applications
from penstock.config.fleet.editor_schema import editor_schema
from penstock.config.schema.env_vars import references_kept
from penstock.errors import ConfigError

SCHEMA = Draft7Validator(editor_schema())
FILES = [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("deploy/kuberay/*.models.yaml")]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
M = model("m")


def is_valid(given: Any) -> bool:
    """As an editor sees it: YAML's dates are text there."""
    return SCHEMA.is_valid(json.loads(json.dumps(given, default=str)))


def is_loaded(given: Any) -> bool:
    try:
        with references_kept():
            load_applications(given)
    except ConfigError:
        return False
    return True


def test_it_is_a_schema():
    Draft7Validator.check_schema(SCHEMA.schema)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_example_names_it_and_is_valid(file: Path):
    text = file.read_text()
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named is not None
    assert (file.parent / named[1]).resolve() == ROOT / "docs/reference/fleet.schema.json"
    assert is_valid(yaml.safe_load(text))


def test_it_takes_what_the_manual_shows():
    """Each YAML block that the loader takes: a file, a part of a model or a part beside models."""
    found = [
        yaml.safe_load(one.text)
        for page in PAGES
        for one in blocks(page.read_text())
        if one.language == "yaml"
    ]
    parts = [one for one in found if isinstance(one, dict)]
    wholes = [
        whole
        for one in parts
        for whole in (one, {**M, **one}, {"llm_configs": [M], **one})
        if is_loaded(whole)
    ]
    assert len(wholes) > 40
    assert [whole for whole in wholes if not is_valid(whole)] == []


@pytest.mark.parametrize("change", SINGLE, ids=str)
def test_it_takes_each_field(change: dict[str, Any]):
    rest = {name: value for name, value in change.items() if name != "llm_configs"}
    given = {"llm_configs": [model("m", **change.get("llm_configs", {})), model("n")], **rest}
    assert is_loaded(given)
    assert is_valid(given)


VERSIONS = [
    {"name": "a"},
    {"name": "b", "model_loading_config": {"model_source": "x"}, "slo": {"itl_ms": 3.0}},
]
SERVE = {"import_path": "penstock.serve:build_openai_app", "args": {"llm_configs": [M]}}


@pytest.mark.parametrize(
    "given",
    [
        M,
        {"llm_config": M},
        {"prefill_config": {**M, "llm_engine": "vllm"}, "decode_config": {**M, "llm_engine": "vllm"}},
        {"llm_configs": [str(ROOT / "examples/models/helper.yaml"), M]},
        {"llm_configs": [{**M, "versions": VERSIONS, "canary": "b", "shadow": "b"}]},
        {"llm_configs": [{**M, "versions": VERSIONS, "canary": {"version": "b"}}]},
        {"llm_configs": [M], "jobs": False},
        {"llm_configs": [M], "jobs": "off"},
        {
            "llm_configs": [M],
            "gateway": {"keys": [{"tenant": "t", "name": "n", "key": "k" * 20, "expires": "2030-01-31"}]},
        },
        {**M, "deployment_config": {"num_replicas": "auto"}},
        {**M, "model_loading_config": {"model_id": "m", "model_source": {"bucket_uri": "s3://b/m"}}},
        {"applications": [{**SERVE, "route_prefix": "/", "deployments": []}], "http_options": {"port": 1}},
    ],
    ids=str,
)
def test_it_takes_each_form(given: dict[str, Any]):
    assert is_loaded(given)
    assert is_valid(given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"llm_configs": []},
        {"prefill_config": M},
        {"llm_configs": [{**M, "alias": ["x"]}]},
        {"llm_configs": [{**M, "llm_engine": "simm"}]},
        {"llm_configs": [{**M, "versions": [{"name": "a", "llm_engine": "simm"}]}]},
        {"llm_configs": [{**M, "deployment_config": {"num_replicas": 0}}]},
        {"llm_configs": [{**M, "versions": [{"name": "a"}, {"name": "b", "aliases": ["x"]}]}]},
        {
            "llm_configs": [
                {**M, "versions": [{"name": "a"}, {"name": "b", "model_loading_config": {"model_id": "x"}}]}
            ]
        },
        {**M, "deployment_config": {"placement_group_bundles": [{"GPU": 1}]}},
        {"applications": [{**SERVE, "args": {"llm_configs": [{}]}}]},
        {"applications": [{**SERVE, "deployments": [{"name": "x"}]}]},
    ],
    ids=str,
)
def test_it_finds_what_the_loader_refuses(given: dict[str, Any]):
    assert not is_loaded(given)
    assert not is_valid(given)
