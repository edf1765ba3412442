"""The configs, under the module path that users know."""

from penstock.config import (
    CloudMirrorConfig,
    GatewayConfig,
    LLMConfig,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
)

__all__ = [
    "CloudMirrorConfig",
    "GatewayConfig",
    "LLMConfig",
    "LLMServingArgs",
    "LoraConfig",
    "ModelLoadingConfig",
]
