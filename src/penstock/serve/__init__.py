"""Online serving: one fleet of engines behind one OpenAI-compatible gateway, on Ray Serve."""

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs
from penstock.engines.callback import CallbackBase
from penstock.serve.builders import (
    build_dp_deployment,
    build_dp_openai_app,
    build_llm_deployment,
    build_openai_app,
    build_pd_openai_app,
)
from penstock.serve.deployments import LLMRouter, LLMServer, VLLMService
from penstock.serve.replica.custom_endpoints import endpoint

__all__ = [
    "CallbackBase",
    "GatewayConfig",
    "LLMConfig",
    "LLMRouter",
    "LLMServer",
    "LLMServingArgs",
    "VLLMService",
    "build_dp_deployment",
    "build_dp_openai_app",
    "build_llm_deployment",
    "build_openai_app",
    "build_pd_openai_app",
    "endpoint",
]
