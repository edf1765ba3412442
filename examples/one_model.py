"""One model behind an OpenAI-compatible address. Then ask it with client.py, or any OpenAI client."""

from ray import serve

from penstock.serve.configs import LLMConfig
from penstock.serve.deployments import LLMRouter, VLLMService

config = LLMConfig(
    model_loading_config={"model_id": "helper", "model_source": "demo"},  # or a hub id, or a local folder
    engine_kwargs={"max_model_len": 2048},
)
model = VLLMService.as_deployment().bind(config)
serve.run(LLMRouter.as_deployment().bind([model]))
