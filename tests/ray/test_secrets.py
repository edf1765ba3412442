"""Secrets of a runtime_env reach the replica, and nobody else."""

import os
from contextlib import suppress

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from tests.cluster import session_folder

from penstock.serve import LLMConfig, LLMRouter, LLMServer

pytestmark = pytest.mark.parity("S6")

SECRETS = ("hf-of-the-test", "password-of-the-test", "proxy-of-the-test")


class Telling(LLMServer):
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def config(**options: object) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "gated"},
        llm_engine="sim",
        runtime_env={"env_vars": {"HF_TOKEN": SECRETS[0], "HF_HUB_ENABLE_HF_TRANSFER": "1"}},
        deployment_config={
            "max_constructor_retry_count": 1,
            "ray_actor_options": {
                "runtime_env": {
                    "env_vars": {"MY_PASSWORD": SECRETS[1], "HTTPS_PROXY": f"http://me:{SECRETS[2]}@proxy:1"}
                }
            },
        },
        **options,
    )


def shown() -> dict[str, str]:
    """What Serve's REST interface tells, and the logs of this session."""
    logs = {}
    for path in session_folder().rglob("*"):
        with suppress(FileNotFoundError):  # others come and go
            if path.is_file():
                logs[str(path)] = path.read_text(errors="replace")
    assert len(logs) > 10
    return {**logs, "status": repr(serve.status()), "details": repr(_get_global_client().get_serve_details())}


def test_a_secret_reaches_the_replica_and_no_state_or_log(serve_url: str):
    """Deploys an application of its own: what its deployment says is the fact."""
    gated = config()
    model = Telling.as_deployment(gated.get_serve_options(name_prefix="VLLM:")).bind(gated)
    serve.run(LLMRouter.as_deployment().bind([model]), name="gated", route_prefix="/gated")
    handle = serve.get_deployment_handle("VLLM:gated", "gated")
    assert handle.variable.remote("HF_TOKEN").result() == SECRETS[0]
    assert handle.variable.remote("MY_PASSWORD").result() == SECRETS[1]
    assert handle.variable.remote("HF_XET_HIGH_PERFORMANCE").result() == "1"
    answers = [httpx.get(f"{serve_url}/gated/v1/models").text]
    answers.append(httpx.post(f"{serve_url}/gated/v1/chat/completions", json={"messages": 1}).text)
    said = {**shown(), "answers": repr(answers)}
    assert [name for name, text in said.items() if any(secret in text for secret in SECRETS)] == []
    serve.delete("gated")


def test_a_start_that_fails_tells_no_secret(serve_url: str):
    """Deploys one of its own, too: one that fails."""
    failing = config(engine_kwargs={"start_error": "The simulated start failed."})
    with pytest.raises(RuntimeError):
        serve.run(Telling.as_deployment().bind(failing), name="failing", route_prefix="/failing")
    said = shown()
    assert "The simulated start failed." in said["status"]
    assert [name for name, text in said.items() if any(secret in text for secret in SECRETS)] == []
    serve.delete("failing")
