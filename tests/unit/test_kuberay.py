"""`penstock kuberay`: the manifests of deploy/kuberay, their schemas, and what is refused."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.unit.kuberay_fields import RAY_SERVICE

from penstock.cli.app import app
from penstock.config import LLMServingArgs, load_configs
from penstock.config.schema.env_vars import references_kept
from penstock.errors import ConfigError
from penstock.kuberay.manifest import manifest
from penstock.kuberay.options import Site

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"
MANIFESTS = sorted(each for each in FOLDER.glob("*.yaml") if not each.name.endswith(".models.yaml"))
KUBERNETES = "1.33"
SIM = {"model_loading_config": {"model_id": "echo"}, "llm_engine": "sim"}

pytestmark = pytest.mark.parity("S29")
Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `penstock kuberay` on a config, in its folder; gives stdout."""
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "auto")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(config: Mapping[str, Any] | str, *options: str) -> str:
        file = config if isinstance(config, str) else "models.yaml"
        if not isinstance(config, str):
            (tmp_path / file).write_text(yaml.safe_dump(dict(config)))
        words = ["kuberay", file, *options]
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        app(words, standalone_mode=False)
        said = capsys.readouterr()
        sys.stderr.write(said.err)  # for the test itself
        return said.out

    return run


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def cluster(text: str) -> dict[str, Any]:
    return documents(text)["RayService"]["spec"]["rayClusterConfig"]


def groups(text: str) -> list[dict[str, Any]]:
    return cluster(text)["workerGroupSpecs"]


def served(text: str) -> dict[str, Any]:
    return yaml.safe_load(documents(text)["RayService"]["spec"]["serveConfigV2"])


def fleet(text: str) -> dict[str, Any]:
    (file,) = documents(text)["ConfigMap"]["data"].values()
    return yaml.safe_load(file)


def refusal(command: Command, capsys: pytest.CaptureFixture[str], config: Any, *options: str) -> str:
    """What is printed when it exits with 2."""
    with pytest.raises(SystemExit) as stopped:
        command(config, *options)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_are_what_the_command_in_their_first_line_writes(file: Path, command, monkeypatch):
    monkeypatch.chdir(FOLDER)
    written = file.read_text()
    _, name, *words = shlex.split(written.partition("\n")[0].removeprefix("# "))
    assert (name, command(*words)) == ("kuberay", written)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_fit_the_schemas(file: Path):
    import kubernetes_validate  # 22 MB of schemas

    for document in yaml.safe_load_all(file.read_text()):
        if document["kind"] != "RayService":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            continue
        jsonschema.validate(document, RAY_SERVICE)
        spec = document["spec"]["rayClusterConfig"]
        for part in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": part["template"]}
            kubernetes_validate.validate(pods, KUBERNETES, strict=True)


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names no CRD of KubeRay")
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_fit_the_crd_itself(file: Path):
    crd = yaml.load(Path(os.environ["KUBERAY_CRD"]).read_text(), yaml.CSafeLoader)  # a megabyte
    (schema,) = (
        each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1"
    )
    jsonschema.validate(documents(file.read_text())["RayService"], closed(schema))


def closed(schema: Any) -> Any:
    """Kubernetes drops fields that a CRD does not know; here they are errors."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        inner["type"] = ["integer", "string"]
    if schema.get("type") == "object" and schema.get("properties"):
        inner.setdefault("additionalProperties", False)
    return inner


def test_the_schemas_would_find_a_mistake():
    document = documents(MANIFESTS[0].read_text())["RayService"]
    document["spec"]["rayClusterConfig"]["headGroupSpec"]["templates"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, RAY_SERVICE)


def test_what_is_deployed_is_what_was_written(command):
    written = {
        **SIM,
        "routing_policy": "least_loaded",
        "deployment_config": {"num_replicas": 2},
        "engine_kwargs": {"max_model_len": 1024},
    }
    (entry,) = fleet(command(written, "--storage", "none"))["llm_configs"]
    assert entry == {**written, "accelerator_config": {"kind": "cpu"}}


@pytest.mark.parametrize(
    ("options", "pods"),
    [
        ({"deployment_config": {"num_replicas": 3}}, (3, 3, "0")),
        ({"deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 5}}}, (0, 5, "0")),
        ({"llm_engine": "process", "accelerator_type": "L4"}, (1, 1, "1")),
        ({"llm_engine": "vllm", "engine_kwargs": {"tensor_parallel_size": 4}}, (1, 1, "4")),
        (
            {"llm_engine": "vllm", "engine_kwargs": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}},
            (2, 2, "8"),
        ),
        ({"llm_engine": "vllm", "engine_kwargs": {"data_parallel_size": 3}}, (3, 3, "1")),
    ],
)
def test_pods_follow_from_replicas_and_their_gpus(options, pods):
    from penstock.config import LLMConfig
    from penstock.kuberay.worker_groups import worker_groups

    (group,) = worker_groups([LLMConfig(**{**SIM, **options})], 8)
    assert (group.least, group.most, str(group.gpus)) == pods


def test_replicas_that_take_a_part_of_a_gpu_share_pods():
    from penstock.config import LLMConfig
    from penstock.kuberay.worker_groups import worker_groups

    part = {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5, "CPU": 1}}}
    configs = [
        LLMConfig(model_loading_config={"model_id": name}, deployment_config={"num_replicas": count}, **part)
        for name, count in (("a", 2), ("b", 3))
    ]
    (group,) = worker_groups(configs, 8)
    assert (group.name, group.gpus, group.least, group.cpus) == ("shared-gpu", 1, 3, 4)


def test_an_engine_that_spans_nodes_says_so_because_workers_come_after_it(command):
    (entry,) = fleet((FOLDER / "several-nodes.yaml").read_text())["llm_configs"]
    assert entry["engine_kwargs"]["distributed_executor_backend"] == "ray"


def test_a_gateway_runs_on_each_pod_that_is_always_there(command):
    text = command(
        {"llm_configs": [{**SIM, "deployment_config": {"num_replicas": 2}}], "gateway": {"port": 9}}
    )
    assert fleet(text)["ingress_deployment_config"]["num_replicas"] == 3
    assert "gateway" not in fleet(text)
    assert served(text)["applications"][0]["args"]["gateway"] == {"host": "0.0.0.0", "port": 9}


def test_the_head_mounts_the_fleets_folder_so_that_its_file_changes_while_it_runs(command):
    text = command(SIM)
    (application,) = served(text)["applications"]
    ((name, _),) = documents(text)["ConfigMap"]["data"].items()
    head, (worker, *_) = cluster(text)["headGroupSpec"], groups(text)
    (container,) = head["template"]["spec"]["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "fleet"]
    assert (mount["mountPath"], "subPath" in mount) == ("/etc/penstock", False)
    assert application["args"]["file"] == f"/etc/penstock/{name}"
    (volume,) = [one for one in head["template"]["spec"]["volumes"] if one["name"] == "fleet"]
    assert volume["configMap"] == {"name": documents(text)["ConfigMap"]["metadata"]["name"]}
    assert "fleet" not in [one["name"] for one in worker["template"]["spec"]["volumes"]]
    (options,) = [one["ray_actor_options"] for one in application["deployments"]]
    assert "node:__internal_head__" in options["resources"]


def test_only_other_pods_change_what_kuberay_deploys(command):
    """A cluster that waits to be replaced must not follow a file that is meant for the next one's pods."""
    first, alias = command(SIM), command({**SIM, "aliases": ["x"]})
    second = command({**SIM, "deployment_config": {"num_replicas": 2}})
    assert documents(alias)["RayService"] == documents(first)["RayService"]
    assert fleet(alias)["llm_configs"][0]["aliases"] == ["x"]
    assert served(second) != served(first)
    assert documents(second)["ConfigMap"]["data"].keys().isdisjoint(documents(first)["ConfigMap"]["data"])


def test_json_logs_are_those_of_every_process(command):
    (container,) = groups(command({"llm_configs": [SIM], "gateway": {"log_format": "json"}}))[0]["template"][
        "spec"
    ]["containers"]
    assert {"name": "PENSTOCK_LOG_FORMAT", "value": "json"} in container["env"]


def test_pods_keep_the_label_by_which_kuberay_finds_the_head(command):
    labels = cluster(command(SIM))["headGroupSpec"]["template"]["metadata"]["labels"]
    assert "app.kubernetes.io/name" not in labels


def test_pods_see_no_variables_of_services(command):
    found = cluster(command(SIM))
    templates = [
        found["headGroupSpec"]["template"],
        *(group["template"] for group in found["workerGroupSpecs"]),
    ]
    assert [template["spec"]["enableServiceLinks"] for template in templates] == [False, False]


def test_variables_become_references_to_the_secret(command, monkeypatch):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    written = {**SIM, "runtime_env": {"env_vars": {"MY_TOKEN": "${MY_TOKEN}"}}}
    text = command(written)
    (container,) = groups(text)[0]["template"]["spec"]["containers"]
    named = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in container["env"]}
    assert named["MY_TOKEN"] == {"name": "penstock-secrets", "key": "MY_TOKEN"}
    assert named["PENSTOCK_API_KEY"] == {"name": "penstock-secrets", "key": "PENSTOCK_API_KEY"}
    assert named["HF_TOKEN"]["optional"]
    assert "MY_TOKEN: ${MY_TOKEN}" in text


def test_a_webhooks_secret_comes_from_the_secret(command, capsys):
    tenants = {
        "keys": [{"tenant": "search", "name": "ci", "hash": f"sha256:{'0' * 64}"}],
        "keys_file": "/etc/keys.yaml",
        "webhook": "https://billing.example.com",
    }
    (container,) = groups(command({"llm_configs": [SIM], "gateway": tenants}))[0]["template"]["spec"][
        "containers"
    ]
    (found,) = [each for each in container["env"] if each["name"] == "PENSTOCK_WEBHOOK_SECRET"]
    assert found["valueFrom"]["secretKeyRef"]["optional"]
    said = capsys.readouterr().err
    assert "--from-literal=PENSTOCK_WEBHOOK_SECRET=..." in said
    assert "gateway.keys_file '/etc/keys.yaml' must be in the image" in said


@pytest.mark.parametrize(
    "secret",
    [
        {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_secret"}}},
        {"deployment_config": {"ray_actor_options": {"runtime_env": {"env_vars": {"KEY": "hf_secret"}}}}},
        {"model_loading_config": {"model_id": "echo", "model_source": "https://me:hf_secret@host/m"}},
        {"lora_config": {"adapters": {"x": "https://host/x?token=hf_secret"}}},
    ],
)
def test_a_secret_with_its_value_is_refused(command, capsys, secret):
    told = refusal(command, capsys, {**SIM, **secret})
    assert "penstock-secrets" in told
    assert "hf_secret" not in told


@pytest.mark.parametrize(
    "secret",
    [
        {"jobs": {"storage": "s3://me:hf_secret@bucket"}},
        {
            "ingress_deployment_config": {
                "ray_actor_options": {"runtime_env": {"env_vars": {"PAT": "hf_secret"}}}
            }
        },
    ],
)
def test_a_secret_beside_the_models_is_refused(command, capsys, secret):
    told = refusal(command, capsys, {"llm_configs": [SIM], **secret})
    assert "penstock-secrets" in told
    assert "hf_secret" not in told


@pytest.mark.parametrize(
    "secret",
    [
        {"engine_kwargs": {"hf_token": "hf_secret"}},
        {"callback_config": {"callback_class": "a:b", "callback_kwargs": {"token": "hf_secret"}}},
    ],
)
def test_a_secret_among_arguments_is_refused(secret):
    serving = LLMServingArgs.parse({"llm_configs": [{**SIM, "llm_engine": "vllm", **secret}]})
    with pytest.raises(ConfigError, match=r"token is a secret .* Secret 'penstock-secrets'") as refused:
        manifest(serving, Site())
    assert "hf_secret" not in str(refused.value)


def test_what_only_has_the_name_of_a_secret_is_none(command):
    adapters = {"lora_config": {"adapters": {"monkey": "/data/monkey"}}}
    assert "monkey" in command({**SIM, **adapters})
    kwargs = {"reasoning_config": {"think_start_token": "<think>"}}
    serving = LLMServingArgs.parse({"llm_configs": [{**SIM, "llm_engine": "vllm", "engine_kwargs": kwargs}]})
    assert "think_start_token" in manifest(serving, Site())


def test_a_key_of_the_gateway_is_refused(command, capsys):
    told = refusal(command, capsys, {"llm_configs": [SIM], "gateway": {"api_key": "sk-mine"}})
    assert "PENSTOCK_API_KEY" in told
    assert "sk-mine" not in told


@pytest.mark.parametrize("given", [{"processes": 2}, {"tls": {"cert": "c.pem", "key": "k.pem"}}])
def test_what_kuberay_cannot_do_with_gateways_is_refused(command, capsys, given):
    (name,) = given
    assert f"gateway.{name}" in refusal(command, capsys, {"llm_configs": [SIM], "gateway": given})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--name", "My_Models"), "My_Models"),
        (("--memory", "much"), "64Gi"),
        (("--storage", "none", "--storage-class", "fast"), "--storage-class"),
        (("--node-selector", "L4"), "TYPE:KEY=VALUE"),
        (("--node-selector", "L4:a=b"), "L4"),
    ],
)
def test_an_option_that_cannot_work_is_refused(command, capsys, options, word):
    assert word in refusal(command, capsys, SIM, *options)


def test_a_replica_larger_than_a_node_is_refused(command, capsys):
    bundles = {"placement_group_config": {"bundles": [{"GPU": 16, "CPU": 1}]}}
    process = {"llm_engine": "process", "engine_kwargs": {"command": ["serve"]}}
    written = {**SIM, **process, "accelerator_config": {"kind": "gpu"}, **bundles}
    assert "--gpus-per-node" in refusal(command, capsys, written)


def test_what_pods_lack_is_said(command, capsys, tmp_path):
    (tmp_path / "prompts.py").write_text("def polite(request): return request")
    loading = {"model_id": "echo", "model_source": str(tmp_path), "tokenizer_source": "/tokenizer"}
    lora = {"dynamic_lora_loading_path": "s3://bucket/adapters", "adapters": {"legal": "/adapters/legal"}}
    more = {"preprocessor": "prompts:polite", "accelerator_type": "L4", "lora_config": lora}
    command({**SIM, "model_loading_config": loading, **more})
    told = capsys.readouterr().err
    assert "tokenizer_source '/tokenizer' must be in the image" in told
    assert "lora_config '/adapters/legal' must be in the image" in told
    assert "s3://" not in told
    assert f"model_source '{tmp_path}' must be in the image" in told
    assert "preprocessor 'prompts:polite' must be in the image" in told
    assert "which nodes have L4" in told
    assert "kubectl create secret generic penstock-secrets --from-literal=PENSTOCK_API_KEY=..." in told


def test_mistakes_are_those_of_check(command, capsys):
    assert "engine_kwargs" in refusal(command, capsys, {**SIM, "engine_kwargs": {"max_modl_len": 1}})


def test_the_budget_leaves_one_pod_of_those_that_are_always_there(command):
    scaled = {"autoscaling_config": {"min_replicas": 3, "max_replicas": 9}}
    assert budgets(command({**SIM, "deployment_config": scaled})) == {"head": 1, "worker": 2}
    assert budgets(command(SIM)) == {"head": 1}


def budgets(text: str) -> dict[str, int]:
    """By the component whose pods must stay, how many."""
    found = [each["spec"] for each in yaml.safe_load_all(text) if each["kind"] == "PodDisruptionBudget"]
    label = "app.kubernetes.io/component"
    return {each["selector"]["matchLabels"][label]: each["minAvailable"] for each in found}


def test_with_redis_the_head_may_go(command, capsys):
    text = command(SIM, "--redis", "redis.stores:6379")
    kept = cluster(text)["gcsFaultToleranceOptions"]
    assert kept["redisAddress"] == "redis.stores:6379"
    password = {"name": "penstock-secrets", "key": "REDIS_PASSWORD"}
    assert kept["redisPassword"] == {"valueFrom": {"secretKeyRef": password}}
    jsonschema.validate(documents(text)["RayService"], RAY_SERVICE)
    assert budgets(text) == {}
    assert "--from-literal=REDIS_PASSWORD=..." in capsys.readouterr().err
    assert "HOST:PORT" in refusal(command, capsys, SIM, "--redis", "redis://redis.stores")


def test_configs_of_the_manifests_load():
    for file in MANIFESTS:
        with references_kept():
            assert load_configs(fleet(file.read_text()))


def test_serve_takes_the_configs_of_the_manifests():
    """Ray's own schema of what KubeRay sends; tests/ray/test_kuberay_deploys.py deploys them."""
    from ray.serve.schema import ServeDeploySchema

    for file in MANIFESTS:
        assert ServeDeploySchema.model_validate(served(file.read_text())).proxy_location == "Disabled"
