"""The application `front`: one simulated model of one replica, which tests deploy anew with another reply."""

from __future__ import annotations

from openai import OpenAI
from ray import serve
from tests.ray.zoo import KEY, Observed

from penstock.serve import LLMConfig, build_openai_app

APP, MODEL = "front", "sim"


class Front:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
        self.deploy("the first one says")

    def deploy(self, reply: str) -> None:
        app = build_openai_app({"llm_configs": [config(reply)], "gateway": {"admin_key": KEY}})
        serve.run(app, name=APP, route_prefix=f"/{APP}")

    def ask(self) -> str:
        stream = self.client.completions.create(model=MODEL, prompt="hello", max_tokens=20, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    def pid(self) -> int:
        return serve.get_deployment_handle(f"LLMServer:{MODEL}", APP).pid.remote().result()[1]

    def delete(self) -> None:
        serve.delete(APP)


def config(reply: str) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": MODEL},
        llm_engine="sim",
        engine_kwargs={"reply": reply},
        server_cls=Observed,
    )
