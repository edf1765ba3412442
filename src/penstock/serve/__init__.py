"""Online serving: one fleet of engines behind one OpenAI-compatible gateway, on Ray Serve.

In order: `builders` (configs in, an application out), `router`, `gateway` with `http`, `routing` and `fleet`,
`replica`, and `control` beside them; `controller_pace` runs in Serve's own controller. Users' module paths:
`configs`, `deployments`, `openai_api_models`, and those of `ray.serve.llm`: `deployment`, `ingress`,
`request_router`, `callbacks`.
Names load on first use: `import penstock.serve` imports neither Ray nor an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import (
        CloudMirrorConfig,
        GatewayConfig,
        LLMConfig,
        LLMServingArgs,
        LoraConfig,
        ModelLoadingConfig,
    )
    from penstock.engines.callback import CallbackBase
    from penstock.serve.builders import (
        build_dp_deployment,
        build_dp_openai_app,
        build_llm_deployment,
        build_openai_app,
        build_pd_openai_app,
    )
    from penstock.serve.deployments import LLMRouter, LLMServer, VLLMService
    from penstock.serve.replica.frontend.custom_endpoints import endpoint

_WHERE = {
    "CallbackBase": "penstock.engines.callback",
    "CloudMirrorConfig": "penstock.config",
    "GatewayConfig": "penstock.config",
    "LLMConfig": "penstock.config",
    "LLMRouter": "penstock.serve.deployments",
    "LLMServer": "penstock.serve.deployments",
    "LLMServingArgs": "penstock.config",
    "LoraConfig": "penstock.config",
    "ModelLoadingConfig": "penstock.config",
    "VLLMService": "penstock.serve.deployments",
    "build_dp_deployment": "penstock.serve.builders",
    "build_dp_openai_app": "penstock.serve.builders",
    "build_llm_deployment": "penstock.serve.builders",
    "build_openai_app": "penstock.serve.builders",
    "build_pd_openai_app": "penstock.serve.builders",
    "endpoint": "penstock.serve.replica.frontend.custom_endpoints",
}

__all__ = [
    "CallbackBase",
    "CloudMirrorConfig",
    "GatewayConfig",
    "LLMConfig",
    "LLMRouter",
    "LLMServer",
    "LLMServingArgs",
    "LoraConfig",
    "ModelLoadingConfig",
    "VLLMService",
    "build_dp_deployment",
    "build_dp_openai_app",
    "build_llm_deployment",
    "build_openai_app",
    "build_pd_openai_app",
    "endpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.serve' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)
