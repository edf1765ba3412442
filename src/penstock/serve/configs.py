"""The configs, under the module path that users know."""

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs

__all__ = ["GatewayConfig", "LLMConfig", "LLMServingArgs"]
