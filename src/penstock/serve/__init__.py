"""Online serving: one fleet of engines behind one OpenAI-compatible gateway, on Ray Serve."""

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs
from penstock.serve.builders import build_llm_deployment, build_openai_app
from penstock.serve.deployments import LLMRouter, LLMServer, VLLMService

__all__ = [
    "GatewayConfig",
    "LLMConfig",
    "LLMRouter",
    "LLMServer",
    "LLMServingArgs",
    "VLLMService",
    "build_llm_deployment",
    "build_openai_app",
]
