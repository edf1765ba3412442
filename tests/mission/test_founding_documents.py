"""The founding documents' own code blocks run here, with a listed set of edits.

Read from the folder `shared/mission` beside the project; skipped where it is not. The model is the embedded
one, on CPU, behind a real vLLM engine and a real Ray Serve; in the fast tier most of them run with a
simulator that knows its answers.
"""

import ast
import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from ray import serve
from ray.serve.context import _get_global_client
from ray.util import state
from tests.cluster import ADAPTERS, Cluster, own_applications, session_folder
from tests.mission.edits import MISSION, PICTURE, announcement, block
from tests.models import model

from penstock.errors import BadRequest, ConfigError
from penstock.serve import LLMConfig, LLMServer, build_openai_app
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS

pytestmark = [
    pytest.mark.skipif(not MISSION.is_dir(), reason="the founding documents are not beside the project"),
    pytest.mark.parity("S1", "S5"),
]

QWEN_05 = "qwen-0.5b"
HELLO = [{"role": "user", "content": "Hello!"}]
QWEN_15 = "qwen-1.5b"
URL = "http://localhost:8000"
"""The documents' own; `Here` has another port in its place."""


class Here:
    """The shared cluster as the place where the documents' programs run."""

    def __init__(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = cluster.url
        self._capsys = capsys

    def run(self, program: str) -> str:
        """Runs it in this process, as a user's script would be; what it printed."""
        self._capsys.readouterr()
        here = compile(program.replace(URL, self.url), "<founding document>", "exec")
        exec(here, {"__name__": "__main__"})
        return self._capsys.readouterr().out

    def curl(self, line: str) -> dict:
        done = subprocess.run(
            line.replace(URL, self.url), shell=True, capture_output=True, check=True, timeout=60
        )
        return json.loads(done.stdout)

    def client(self, prefix: str = "") -> OpenAI:
        return OpenAI(base_url=f"{self.url}{prefix}/v1", api_key="fake-key")

    def says(self, model: str, content: object = "Hello!", prefix: str = "") -> str:
        messages = [{"role": "user", "content": content}]
        answer = self.client(prefix).chat.completions.create(model=model, messages=messages, temperature=0)
        return answer.choices[0].message.content


@pytest.fixture
def here(cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch) -> Iterator[Here]:
    """The document's applications are gone afterwards."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", cluster.dashboard)
    with own_applications():
        yield Here(cluster, capsys)


def greets(text: str) -> bool:
    return "hello" in text.lower() and len(text) > len("Hello!")


def test_announcement_serves_and_its_client_streams(here):
    here.run(announcement("serve.run(llm_app)"))
    said = here.run(announcement("stream=True"))
    assert greets(said), said


@pytest.mark.parity("D1", "D2")
def test_announcement_completes_haikus_in_batch(here, simulated):
    said = here.run(announcement("build_llm_processor"))
    row = ast.literal_eval(said.strip().splitlines()[-1])
    assert row["item"] == "Start of the haiku is: Complete this for me..."
    assert row["answer"] == row["generated_text"] != ""
    assert row["error"] is None


def test_vllm_service_with_router_answers_curl_and_client(here, simulated):
    here.run(block("python", "VLLMService", "tensor_parallel_size"))
    answer = here.curl(block("bash", "curl -X POST"))
    assert greets(answer["choices"][0]["message"]["content"]), answer
    said = here.run(block("python", "stream=True", "OpenAI", without="response_format"))
    assert greets(said), said


def test_two_models_stand_behind_one_router(here, simulated):
    here.run(block("python", "llm_config2"))
    assert {model.id for model in here.client().models.list()} == {QWEN_05, QWEN_15}
    assert greets(here.says(QWEN_05))
    assert greets(here.says(QWEN_15))


@pytest.fixture
def adapters(cluster: Cluster) -> None:
    """What the document pretends: two adapters in a bucket."""
    for number, adapter in enumerate(("pirate", "french"), 1):
        cluster.bucket.upload(model("adapters") / adapter, ADAPTERS, f"lora_model_{number}_ckpt")


@pytest.mark.parity("S21")
def test_adapters_come_from_a_bucket_by_the_name_of_the_model(here, simulated, adapters):
    here.run(block("python", "lora_config"))
    said = here.run(block("python", "lora_model_1_ckpt", "OpenAI"))
    second = here.says(f"{QWEN_05}:lora_model_2_ckpt")
    if simulated:  # says which adapter it has
        assert said.startswith("[lora_model_1_ckpt@"), said
        assert second.startswith("[lora_model_2_ckpt@"), second
    else:
        assert said.replace("\n", "").startswith("Ahoy, matey!"), said
        assert second == ANSWERS["french"]["Hello!"]
    assert here.says(QWEN_05) == BASE_ANSWERS["Hello!"]


def test_json_mode_gives_json(here, simulated):
    here.run(block("python", "build_openai_app", without="lora_config"))
    said = here.run(block("python", "response_format"))
    assert set(json.loads(said)["colors"]) == {"red", "blue", "green"}, said


@pytest.mark.parity("S33", "S25")
async def test_the_servers_three_usage_patterns(here, simulated):
    """Of mission/1, whose page gives them as lines: here whole programs."""
    llm_config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    server = LLMServer.sync_init(llm_config)
    await server.start()
    started = await LLMServer(llm_config)
    for one in (server, started):
        (answer,) = [each async for each in await one.chat({"messages": HELLO})]
        assert answer.choices[0].message.content == "Hello!"
        await one.sleep(level=1)
        await one.wakeup(tags=["weights"])
        assert await one.is_sleeping()
        await one.wakeup(tags=["kv_cache"])
        assert not await one.is_sleeping()
        await one.pause(mode="abort", clear_cache=True)
        assert await one.is_paused()
        await one.resume()
        with pytest.raises(BadRequest, match="takes no arguments"):
            await one.resume(tags=["weights"])
        await one.stop()
    deployment = serve.deployment(LLMServer).bind(llm_config)
    handle = serve.run(deployment, name="three", route_prefix="/three").options(stream=True)
    answers = [answer async for answer in handle.chat.remote({"messages": HELLO})]
    assert answers[0].choices[0].message.content == "Hello!"


def test_placement_in_a_deployment_config_is_refused_as_the_server_says():
    """Of mission/1, `get_deployment_options`."""
    options = {"placement_group_bundles": [{"GPU": 1}]}
    with pytest.raises(ConfigError, match="set `placement_group_config` of the LLMConfig"):
        LLMConfig(model_loading_config={"model_id": "m"}, deployment_config=options)


@pytest.mark.parity("S23")
def test_vision_model_says_what_is_in_the_picture_and_fetches_from_nowhere_inside(here, simulated):
    here.run(block("python", "pixtral-12b", "build_openai_app"))
    client = block("python", "pixtral-12b", "OpenAI")
    if simulated:  # sees no picture, and fetches none
        assert here.run(client) == "What's in this image?"
        return
    assert here.run(client) == "a red circle"
    with pytest.raises(BadRequestError, match="not public"):
        here.run(client.replace(PICTURE, f"{here.url}/-/healthz"))


def their_preprocessing() -> str:
    """The lines of mission/0, whose writer wants to call `generate` with what they make."""
    text = (MISSION / "0-custom-preprocessing-thread.txt").read_text()
    found = re.search(r"(?s)image_inputs, video_inputs.*?\n}\n", text)
    assert found is not None
    return found.group()


@pytest.mark.parity("X13")
def test_custom_preprocessing_of_the_thread_is_a_preprocessor(here, simulated):
    program = f"""
from qwen_vl_utils import process_vision_info

def preprocess(request):
    text, shown = request["messages"][0]["content"]
    picture = {{"type": "image", "image": shown["image_url"]["url"]}}
    messages = [{{"role": "user", "content": [picture, text]}}]
    prompt = "<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>" + text["text"]
    prompt += "<|im_end|>\\n<|im_start|>assistant\\n"
{textwrap.indent(their_preprocessing(), "    ")}
    return llm_inputs
"""
    names = {"__name__": "__main__"}
    exec(compile(program, "<mission/0>", "exec"), names)
    config = LLMConfig(
        model_loading_config={"model_id": "cosmos", "model_source": str(model("vision"))},
        engine_kwargs={"limit_mm_per_prompt": {"image": 10, "video": 10}, "max_model_len": 4096},
        preprocessor=names["preprocess"],
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
    said = here.says(
        "cosmos",
        [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PICTURE}}],
    )
    if simulated:  # says the prompt that it was given
        assert "<|vision_start|><|image_pad|><|vision_end|>What is this?" in said
    else:
        assert said == "a red circle"


FAST_DOWNLOAD = "HF_HUB_ENABLE_HF_TRANSFER"


@pytest.mark.parametrize("signs", [{"without": FAST_DOWNLOAD}, {}], ids=["token", "token and fast download"])
def test_gated_model_gets_its_token_and_fast_download_is_accepted(here, simulated, monkeypatch, signs):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    here.run(block("python", "HF_TOKEN", *([] if signs else [FAST_DOWNLOAD]), **signs))
    assert greets(here.says("llama-3-8b-instruct"))
    assert places_that_show("hf_secret") == []


def places_that_show(secret: str) -> list[str]:
    """Where Serve's and Ray's state and the logs of this session hold the text."""
    lists = (state.list_actors, state.list_runtime_envs, state.list_workers, state.list_jobs)
    said = {ask.__name__: repr(ask(detail=True)) for ask in lists}
    said |= {"status": repr(serve.status()), "details": repr(_get_global_client().get_serve_details())}
    logs = [path for path in session_folder().rglob("*") if path.is_file()]
    assert len(logs) > 10, logs
    said |= {path.name: path.read_text(errors="replace") for path in logs}
    return [name for name, text in said.items() if secret in text]


def serve_command(*arguments: str, cwd: Path) -> None:
    command = [str(Path(sys.executable).with_name("serve")), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_until_running(*names: str) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        applications = serve.status().applications
        states = {name: applications[name].status for name in names if name in applications}
        assert "DEPLOY_FAILED" not in states.values(), applications
        if len(states) == len(names) and set(states.values()) == {"RUNNING"}:
            return
        time.sleep(0.2)
    raise AssertionError(f"Not running in time: {serve.status()}")


def replica_ids(application: str) -> set[str]:
    """Of all its models' replicas."""
    actors: Any = state.list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return {
        actor.actor_id for actor in actors if f"SERVE_REPLICA::{application}#LLMServer" in (actor.name or "")
    }


def test_inline_yaml_runs_and_a_standalone_one_deployed_beside_it_leaves_it_running(
    here, cluster, full, tmp_path
):
    inline = block("yaml", "applications:", "model_loading_config")
    (tmp_path / "config.yaml").write_text(inline)
    with nullcontext() if full else cluster.simulated():
        serve_command("run", "--non-blocking", "config.yaml", cwd=tmp_path)
        wait_until_running("llm_app")
    first = replica_ids("llm_app")
    assert len(first) == 2
    assert greets(here.says(QWEN_05))
    assert greets(here.says(QWEN_15))

    models = tmp_path / "models"
    models.mkdir()
    (models / "qwen-0.5b.yaml").write_text(block("yaml", "# models/qwen-0.5b.yaml"))
    (models / "qwen-1.5b.yaml").write_text(block("yaml", "# models/qwen-1.5b.yaml"))
    # The builder runs in a worker, whose folder is not ours: whole paths.
    both = block("yaml", "models/qwen-1.5b.yaml", "applications:").replace("models/", f"{models}/")
    one = re.sub(r"\n.*qwen-0\.5b\.yaml", "", both).split("applications:", 1)[1]
    more = one.replace("llm_app", "more").replace('"/"', '"/more"')
    (tmp_path / "config.yaml").write_text(inline + more)
    serve_command("deploy", "config.yaml", cwd=tmp_path)
    wait_until_running("llm_app", "more")
    assert replica_ids("llm_app") == first
    assert greets(here.says(QWEN_05))
    assert greets(here.says(QWEN_15, prefix="/more"))
