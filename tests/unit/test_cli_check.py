import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.cli.models import precheck
from penstock.cli.models.check import check
from penstock.cli.models.options import Arguments
from penstock.errors import ConfigError

GOOD = """
model_loading_config: {model_id: echo}
llm_engine: sim
engine_kwargs: {max_model_len: 1024}
deployment_config: {num_replicas: 3}
"""
GPUS = """
model_loading_config: {model_id: large, model_source: some/large}
accelerator_config: {kind: gpu}
placement_group_config: {bundle_per_worker: {GPU: 2, CPU: 1}}
"""
BAD = """
model_loading_config: {model_idd: echo}
llm_engine: sim
engine_kwargs: {max_modl_len: 1024}
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "model.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_config_without_mistakes_is_0_and_shows_the_placement(written, capsys):
    assert check([written(GOOD)]) == 0
    told = capsys.readouterr()
    assert [line.split() for line in told.out.splitlines()[2:]] == [
        ["model", "echo"],
        ["source", "echo"],
        ["engine", "sim"],
        ["accelerator", "cpu"],
        ["replicas", "3"],
        ["actor", "CPU", "1"],
        ["bundles", "none;", "the", "actor's", "own", "resources", "are", "all"],
        ["No", "mistakes", "found."],
    ]
    assert told.err == ""


def test_gpus_are_placed_on_a_machine_without_one(written, capsys):
    assert check([written(GPUS)]) == 0
    out = capsys.readouterr().out
    assert "1 x [GPU 2, CPU 2], PACK" in out
    assert "CPU 1, GPU 2" in out


def test_what_penstock_serve_would_refuse_is_not_checked(written, capsys):
    args = "{llm_configs: [{model_loading_config: {model_id: echo}, llm_engine: sim}]}"
    path = "import_path: penstock.serve:build_openai_app"
    text = f"applications:\n- {{{path}, route_prefix: /llm, args: {args}}}\n"
    assert check([written(text)]) == 0
    assert "applications[0].route_prefix: only Ray Serve obeys it" in capsys.readouterr().out


def test_it_says_where_hooks_run(written, capsys):
    text = f"{GOOD}preprocessor: copy:copy\npostprocessor: copy:copy\npreprocessor_options: "
    assert check([written(text + "{num_replicas: 2}")]) == 0
    out = capsys.readouterr().out
    assert "preprocessor  copy:copy, a deployment of its own: 2 x [CPU 1]" in out
    assert "postprocessor copy:copy, in the replica" in out


def test_a_hook_whose_module_is_missing_is_a_mistake_unless_a_runtime_env_brings_it(written, capsys):
    text = f"{GOOD}preprocessor: no_such_module:Name\n"
    assert check([written(text)]) == 2
    err = capsys.readouterr().err
    assert "model.yaml:6: preprocessor: 'no_such_module:Name'" in err
    assert "No module named 'no_such_module'" in err
    assert check([written(text + "runtime_env: {working_dir: 's3://bucket/code.zip'}\n")]) == 0


def test_modules_in_the_current_folder_are_found(written, tmp_path):
    (tmp_path / "my_hooks.py").write_text("def shout(request):\n    return request\n")
    file = written(f"{GOOD}preprocessor: my_hooks:shout\n")
    command = [str(Path(sys.executable).with_name("penstock")), "check", file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mistakes_of_the_config_and_of_engine_arguments_come_together(written, capsys):
    assert check([written(BAD)]) == 2
    err = capsys.readouterr().err
    assert "did you mean 'model_id'?" in err
    assert "did you mean 'max_model_len'?" in err


FAULTY = """
llm_configs:
- model_loading_config: {model_id: a, model_sourc: ./nowhere}  # 3
  llm_engine: sim
  fallbacks: [zz]  # 5
  engine_kwargs: {max_modl_len: 5}  # 6
- model_loading_config: {model_id: b, model_source: ./nowhere}  # 7
  preprocessor: no_such_module:Name  # 8
  deployment_config: {num_replicas: 1, autoscaling_config: {min_replicas: 1}}  # 9
- other.yaml
gateway:
  prot: 8001  # 12
  keys_file: no-keys.yaml  # 13
  tls: {cert: no.pem, key: no.pem}  # 14
  default_model: bb  # 15
jobs: {}
jobs: {filez: 3}  # 17, twice
"""
ALWAYS = {3, 5, 6, 8, 9, 12, 13, 14, 15, 17}


def lines(problems: Iterable[str]) -> set[int]:
    found = (re.match(r"\S+faulty\.yaml:(\d+): ", problem) for problem in problems)
    return {int(one[1]) for one in found if one}


def test_every_fault_of_a_file_comes_in_one_run_with_its_line(written, capsys):
    written(GOOD.replace("echo", "c") + "aliases: [b]\n", "other.yaml")
    file = written(FAULTY, "faulty.yaml")
    assert check([file]) == 2
    err = capsys.readouterr().err
    assert lines(err.splitlines()) == ALWAYS
    assert "other.yaml:6: aliases: 'b' is already a name of 'b'." in err
    with pytest.raises(ConfigError) as refused:
        precheck.planned(Arguments(sources=(file,)))
    assert lines(refused.value.problems) == {*ALWAYS, 7}  # the folder must be here then


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (None, "faulty.yaml:3: gateway.keys_file: KEYS: no such file in"),
        ("keys: [", "faulty.yaml:3: gateway.keys_file: KEYS:1:8: is not valid YAML"),
        ("\nkeys: [{tenant: t, name: n}]", "KEYS:2: keys[0]: has neither `hash` nor `key`"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused_before_a_start(written, keys, says, capsys):
    one = "{model_loading_config: {model_id: echo}, llm_engine: sim}"
    file = written(f"\nllm_configs: [{one}]\ngateway: {{keys_file: keys.yaml}}\n", "faulty.yaml")
    path = written(keys or "", "keys.yaml")
    if keys is None:
        Path(path).unlink()
    with pytest.raises(ConfigError) as refused:
        precheck.planned(Arguments(sources=(file,)))
    assert says.replace("KEYS", path) in str(refused.value)
    assert check([file]) == 2
    assert says.replace("KEYS", path) in capsys.readouterr().err


def test_keys_are_neither_shown_nor_told_beside_a_mistake(written, capsys):
    keys = "runtime_env: {env_vars: {HF_TOKEN: hf_hidden}}\n"
    one = f"llm_configs:\n- {{{GOOD.strip().replace(chr(10), ', ')}, {keys.strip()}}}\n"
    whole = f"{one}gateway: {{api_key: k_hidden, admin_key: a_hidden}}\n"
    assert check([written(whole)]) == 0
    told = capsys.readouterr()
    assert "one API key" in told.out
    assert "hidden" not in told.out + told.err
    wrong = whole.replace("admin_key: a_hidden", "admin_key: [a_hidden]").replace("hf_hidden", "[hf_hidden]")
    assert check([written(wrong, "wrong.yaml")]) == 2
    told = capsys.readouterr()
    assert "admin_key" in told.err
    assert "hidden" not in told.out + told.err


def test_one_bad_file_does_not_hide_another(written, capsys):
    files = [written(BAD, "bad.yaml"), written(GOOD, "good.yaml"), "no/such.yaml"]
    assert check(files) == 2
    told = capsys.readouterr()
    assert "echo" in told.out
    assert "bad.yaml:2" in told.err
    assert "no/such.yaml" in told.err


def test_placement_that_cannot_work_is_a_mistake(written, capsys):
    text = GPUS.replace("{bundle_per_worker: {GPU: 2, CPU: 1}}", "{bundles: [{GPU: 1.5}]}")
    assert check([written(text)]) == 2
    assert "whole GPUs only" in capsys.readouterr().err


def test_json_has_placements_mistakes_and_what_was_not_checked(written, capsys):
    assert check([written(GOOD), written(BAD, "bad.yaml")], as_json=True) == 2
    found = json.loads(capsys.readouterr().out)
    (application,) = found["applications"]
    assert application["gateway"] == {"host": "127.0.0.1", "port": None, "api_key": False, "tenants": False}
    (model,) = application["models"]
    assert (model["model"], model["deployments"][0]["replicas"]) == ("echo", "3")
    assert any("model_idd" in mistake for mistake in found["mistakes"])
    assert found["not_checked"] == []
