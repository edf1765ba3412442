"""The founding documents' own code blocks run here, with a listed set of edits.

Read from the folder `shared/mission` beside the project; skipped where it is not. The model is the embedded
one, on CPU, behind a real vLLM engine and a real Ray Serve.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

MISSION = Path(__file__).parents[2].parent / "shared" / "mission"
pytestmark = pytest.mark.skipif(
    not MISSION.is_dir(), reason="the founding documents are not beside the project"
)

QWEN_05 = "qwen-0.5b"
QWEN_15 = "qwen-1.5b"

EDITS = [
    # The project's prefix instead of Ray's.
    ("ray.serve.llm", "penstock.serve"),
    # The embedded model instead of one from a hub. The model ids stay.
    (r"Qwen/Qwen2.5-\d.\dB-Instruct", "demo"),
    (r"meta-llama/Meta-Llama-3-8B-Instruct", "demo"),
    # Two slips of the pages: a comma is missing before `stream=True`; a `for` lost its body's indentation.
    (r'("Hello!"}\])\n(\s+stream=True)', r"\1,\n\2"),
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


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Ray with its dashboard (`serve deploy` speaks to it) and Serve's HTTP on the port of the documents."""
    import ray
    from ray import serve

    before = dict(os.environ)
    os.environ.update(
        PENSTOCK_ACCELERATOR="cpu", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", HF_TOKEN="hf_secret"
    )
    context = ray.init(num_cpus=8, num_gpus=0, log_to_driver=False, object_store_memory=100 << 20)
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


def test_json_mode_gives_json(capsys):
    run(block("python", "build_openai_app", without="lora_config"), capsys)
    said = run(block("python", "response_format"), capsys)
    assert set(json.loads(said)["colors"]) == {"red", "blue", "green"}, said


def test_gated_model_gets_its_token_and_fast_download_is_accepted(capsys):
    run(block("python", "HF_TOKEN", "HF_HUB_ENABLE_HF_TRANSFER"), capsys)
    assert greets(hello("llama-3-8b-instruct"))
    from ray import serve

    assert "hf_secret" not in repr(serve.status())


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


def test_inline_yaml_runs_with_serve_run(tmp_path):
    (tmp_path / "config.yaml").write_text(block("yaml", "applications:", "model_loading_config"))
    serve_command("run", "--non-blocking", "config.yaml", cwd=tmp_path)
    wait_until_running("llm_app")
    assert greets(hello(QWEN_05))
    assert greets(hello(QWEN_15))


def replica_ids(application: str) -> set[str]:
    """Of all its models' replicas."""
    from ray.util.state import list_actors

    actors = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return {
        actor.actor_id for actor in actors if f"SERVE_REPLICA::{application}#LLMServer" in (actor.name or "")
    }


def test_standalone_yaml_deploys_and_a_second_deploy_leaves_the_first_running(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    (models / "qwen-0.5b.yaml").write_text(block("yaml", "# models/qwen-0.5b.yaml"))
    (models / "qwen-1.5b.yaml").write_text(block("yaml", "# models/qwen-1.5b.yaml"))
    # The builder runs in a worker, whose folder is not ours: whole paths.
    both = block("yaml", "models/qwen-1.5b.yaml", "applications:").replace("models/", f"{models}/")
    one = re.sub(r"\n.*qwen-1\.5b\.yaml", "", both)
    (tmp_path / "config.yaml").write_text(one)
    serve_command("deploy", "config.yaml", cwd=tmp_path)
    wait_until_running("llm_app")
    first = replica_ids("llm_app")
    assert len(first) == 1
    assert greets(hello(QWEN_05))

    more = one.split("applications:", 1)[1]
    more = more.replace("qwen-0.5b", "qwen-1.5b").replace("llm_app", "more").replace('"/"', '"/more"')
    (tmp_path / "config.yaml").write_text(one + more)
    serve_command("deploy", "config.yaml", cwd=tmp_path)
    wait_until_running("llm_app", "more")
    assert replica_ids("llm_app") == first
    assert greets(hello(QWEN_05))
    assert greets(hello(QWEN_15, "http://localhost:8000/more/v1"))
