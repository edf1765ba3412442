"""Online serving: one fleet of engines behind one OpenAI-compatible gateway, on Ray Serve.

In order: `builders` (configs in, an application out), `router`, `gateway` with `http`, `routing` and `fleet`,
`replica`, and `control` beside them; `fleet_file` has it follow a file, `controller_pace` runs in Serve's own
controller. Users' module paths: `configs`, `deployments`, `openai_api_models`, and those of `ray.serve.llm`:
`deployment`, `ingress`, `request_router`, `callbacks`.
Names load on first use: `import penstock.serve` imports neither Ray nor an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import CloudMirrorConfig as CloudMirrorConfig
    from penstock.config import GatewayConfig as GatewayConfig
    from penstock.config import LLMConfig as LLMConfig
    from penstock.config import LLMServingArgs as LLMServingArgs
    from penstock.config import LoraConfig as LoraConfig
    from penstock.config import ModelLoadingConfig as ModelLoadingConfig
    from penstock.engines.callback import CallbackBase as CallbackBase
    from penstock.serve.builders import build_dp_deployment as build_dp_deployment
    from penstock.serve.builders import build_dp_openai_app as build_dp_openai_app
    from penstock.serve.builders import build_llm_deployment as build_llm_deployment
    from penstock.serve.builders import build_openai_app as build_openai_app
    from penstock.serve.builders import build_pd_openai_app as build_pd_openai_app
    from penstock.serve.deployments import LLMRouter as LLMRouter
    from penstock.serve.deployments import LLMServer as LLMServer
    from penstock.serve.deployments import VLLMService as VLLMService
    from penstock.serve.replica.handles.client import ModelClient as ModelClient
    from penstock.serve.replica.inbound.custom_endpoints import endpoint as endpoint
    from penstock.serve.running import run as run

_NAMES = {
    "penstock.config": "CloudMirrorConfig GatewayConfig LLMConfig LLMServingArgs LoraConfig "
    "ModelLoadingConfig",
    "penstock.engines.callback": "CallbackBase",
    "penstock.serve.builders": "build_dp_deployment build_dp_openai_app build_llm_deployment "
    "build_openai_app build_pd_openai_app",
    "penstock.serve.deployments": "LLMRouter LLMServer VLLMService",
    "penstock.serve.replica.inbound.custom_endpoints": "endpoint",
    "penstock.serve.replica.handles.client": "ModelClient",
    "penstock.serve.running": "run",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.serve' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)
