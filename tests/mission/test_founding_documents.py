"""The founding documents' own code blocks run here, with a listed set of edits.

Read from the folder `shared/mission` beside the project; skipped where it is not. The model is the embedded
one, on CPU, behind a real vLLM engine and a real Ray Serve.
"""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from bucket import s3_server
from tests.models import model
from tests.pictures import data_url

from recipes.adapters.answers import ANSWERS
from recipes.vision.pictures import draw

MISSION = Path(__file__).parents[2].parent / "shared" / "mission"
pytestmark = [
    pytest.mark.skipif(not MISSION.is_dir(), reason="the founding documents are not beside the project"),
    pytest.mark.parity("S1", "S5"),
]

QWEN_05 = "qwen-0.5b"
QWEN_15 = "qwen-1.5b"


PICTURE = data_url(draw("red", "circle"))

EDITS = [
    # The project's prefix instead of Ray's.
    ("ray.serve.llm", "penstock.serve"),
    ("ray.data.llm", "penstock.data"),
    # The embedded model instead of one from a hub. The model ids stay.
    (r"Qwen/Qwen2.5-\d.\dB-Instruct", "demo"),
    (r"meta-llama/(Meta-Llama-3|Llama-3.1)-8B-Instruct", "demo"),
    # A vision model made here instead of one from a hub, and a picture of our own in the request itself.
    (r"mistral-community/pixtral-12b", lambda _: str(model("vision"))),
    (r"https://example.com/image.jpg", PICTURE),
    # Two slips of the pages: a comma is missing before `stream=True`; a `for` lost its body's indentation.
    (r'("Hello!"}\])\n(\s+stream=True)', r"\1,\n\2"),
    # A third: the clients of the adapters and of the picture read a stream that they have not asked for.
    (r'("Hello!"}\])\n\)\n\nfor chunk', r"\1,\n    stream=True,\n)\n\nfor chunk"),
    (r"(?m)^    \]\n\)\n\nfor chunk", "    ],\n    stream=True,\n)\n\nfor chunk"),
    (r"(?m)^(for chunk in response:)\n(if .*:)\n(print.*)$", r"\1\n    \2\n        \3"),
    # One device: this machine has no two.
    (r"tensor_parallel_size=2", "tensor_parallel_size=1"),
]
# `accelerator_type="A10G"` is left as it is: PENSTOCK_ACCELERATOR=cpu runs any config on CPU.


def edited(code: str) -> str:
    for pattern, replacement in EDITS:
        code = re.sub(pattern, replacement, code)
    return code


def blocks(language: str) -> list[str]:
    """The code blocks of mission/3, dedented, in the order of the page."""
    text = (MISSION / "3-serving-overview.txt").read_text()
    found = re.findall(rf"(?m)^( *)\.\. code-block:: {language}\n\n((?:\1 +.*\n|\s*\n)+)", text)
    return [textwrap.dedent(body) for _, body in found]


def block(language: str, *signs: str, without: str = "\0") -> str:
    """The first block that holds all `signs`, edited."""
    for body in blocks(language):
        if all(sign in body for sign in signs) and without not in body:
            return edited(body)
    raise LookupError(f"No {language} block with {signs}.")


def announcement(*signs: str) -> str:
    """A program of mission/2, without the line numbers that stuck to it, edited."""
    text = (MISSION / "2-announcement.txt").read_text()
    for body in re.findall(r"```bash\n(.*?)```", text, re.S):
        if all(sign in body for sign in signs):
            return edited(re.sub(r"(?m)^\d+", "", body))
    raise LookupError(f"No program with {signs}.")


@pytest.fixture(scope="module")
def bucket():
    """What the document pretends: two adapters in a bucket."""
    with s3_server("my_dynamic_lora_path") as s3:
        for number, adapter in enumerate(("pirate", "french"), 1):
            s3.upload(model("adapters") / adapter, "my_dynamic_lora_path", f"lora_model_{number}_ckpt")
        yield s3


@pytest.fixture(scope="module", autouse=True)
def cluster(bucket):
    """Ray with its dashboard (`serve deploy` speaks to it) and Serve's HTTP on the port of the documents."""
    import ray
    from ray import serve
    from tests.cluster import look_often

    look_often()
    before = dict(os.environ)
    os.environ.update(bucket.environment)
    os.environ.update(
        PENSTOCK_ACCELERATOR="cpu", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", HF_TOKEN="hf_secret"
    )
    context = ray.init("local", num_cpus=8, num_gpus=0, log_to_driver=False, object_store_memory=100 << 20)
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    os.environ["RAY_DASHBOARD_ADDRESS"] = f"http://{context.dashboard_url}"
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    yield
    serve.shutdown()
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_application_stays():
    yield
    from ray import serve

    for name in list(serve.status().applications):
        serve.delete(name)


def run(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs it in this process, as a user's script would be; what it printed."""
    capsys.readouterr()
    exec(compile(program, "<founding document>", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


def hello(model: str, url: str = "http://localhost:8000/v1") -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="fake-key")
    messages = [{"role": "user", "content": "Hello!"}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    return answer.choices[0].message.content


def greets(text: str) -> bool:
    return "hello" in text.lower() and len(text) > len("Hello!")


def test_announcement_serves_and_its_client_streams(capsys):
    run(announcement("serve.run(llm_app)"), capsys)
    said = run(announcement("stream=True"), capsys)
    assert greets(said), said


@pytest.mark.parity("D1", "D2")
def test_announcement_completes_haikus_in_batch(capsys):
    said = run(announcement("build_llm_processor"), capsys)
    row = ast.literal_eval(said.strip().splitlines()[-1])
    assert row["item"] == "Start of the haiku is: Complete this for me..."
    assert row["answer"] == row["generated_text"] != ""
    assert row["error"] is None


def test_vllm_service_with_router_answers_curl_and_client(capsys):
    run(block("python", "VLLMService", "tensor_parallel_size"), capsys)
    shell = block("bash", "curl -X POST")
    answer = json.loads(subprocess.run(shell, shell=True, capture_output=True, check=True, timeout=60).stdout)
    assert greets(answer["choices"][0]["message"]["content"]), answer
    said = run(block("python", "stream=True", "OpenAI", without="response_format"), capsys)
    assert greets(said), said


def test_two_models_stand_behind_one_router(capsys):
    run(block("python", "llm_config2"), capsys)
    from openai import OpenAI

    listed = {
        model.id for model in OpenAI(base_url="http://localhost:8000/v1", api_key="fake-key").models.list()
    }
    assert listed == {QWEN_05, QWEN_15}
    assert greets(hello(QWEN_05))
    assert greets(hello(QWEN_15))


@pytest.mark.parity("S21")
def test_adapters_come_from_a_bucket_by_the_name_of_the_model(capsys):
    run(block("python", "lora_config"), capsys)
    said = run(block("python", "lora_model_1_ckpt", "OpenAI"), capsys)
    assert said.replace("\n", "").startswith("Ahoy, matey!"), said
    assert hello(f"{QWEN_05}:lora_model_2_ckpt") == ANSWERS["french"]["Hello!"]
    assert greets(hello(QWEN_05))


def test_json_mode_gives_json(capsys):
    run(block("python", "build_openai_app", without="lora_config"), capsys)
    said = run(block("python", "response_format"), capsys)
    assert set(json.loads(said)["colors"]) == {"red", "blue", "green"}, said


@pytest.mark.parity("S23")
def test_vision_model_says_what_is_in_the_picture_and_fetches_from_nowhere_inside(capsys):
    from openai import BadRequestError

    run(block("python", "pixtral-12b", "build_openai_app"), capsys)
    client = block("python", "pixtral-12b", "OpenAI")
    assert run(client, capsys) == "a red circle"
    with pytest.raises(BadRequestError, match="not public"):
        run(client.replace(PICTURE, "http://127.0.0.1:8000/-/healthz"), capsys)


def their_preprocessing() -> str:
    """The lines of mission/0, whose writer wants to call `generate` with what they make."""
    text = (MISSION / "0-custom-preprocessing-thread.txt").read_text()
    found = re.search(r"(?s)image_inputs, video_inputs.*?\n}\n", text)
    assert found is not None
    return found.group()


@pytest.mark.parity("X13")
def test_custom_preprocessing_of_the_thread_is_a_preprocessor():
    from openai import OpenAI
    from ray import serve

    from penstock.serve import LLMConfig, build_openai_app

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
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="fake-key")
    messages = [{"role": "user", "content": content}]
    answer = client.chat.completions.create(model="cosmos", messages=messages, temperature=0)
    assert answer.choices[0].message.content == "a red circle"


def test_gated_model_gets_its_token_and_fast_download_is_accepted(capsys):
    run(block("python", "HF_TOKEN", "HF_HUB_ENABLE_HF_TRANSFER"), capsys)
    assert greets(hello("llama-3-8b-instruct"))
    assert places_that_show("hf_secret") == []


def places_that_show(secret: str) -> list[str]:
    """Where Serve's and Ray's state and the logs of this session hold the text."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.util import state
    from tests.cluster import session_folder

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
    from ray import serve

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
    from ray.util.state import list_actors

    actors = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return {
        actor.actor_id for actor in actors if f"SERVE_REPLICA::{application}#LLMServer" in (actor.name or "")
    }


def test_inline_yaml_runs_and_a_standalone_one_deployed_beside_it_leaves_it_running(tmp_path):
    inline = block("yaml", "applications:", "model_loading_config")
    (tmp_path / "config.yaml").write_text(inline)
    serve_command("run", "--non-blocking", "config.yaml", cwd=tmp_path)
    wait_until_running("llm_app")
    first = replica_ids("llm_app")
    assert len(first) == 2
    assert greets(hello(QWEN_05))
    assert greets(hello(QWEN_15))

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
    assert greets(hello(QWEN_05))
    assert greets(hello(QWEN_15, "http://localhost:8000/more/v1"))
