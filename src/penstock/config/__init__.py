"""Configuration: what users write, and what follows from it. Imports neither Ray nor an engine."""

from penstock.config.accelerators import accelerator_kind, check_accelerator
from penstock.config.gateway import GatewayConfig, LLMServingArgs
from penstock.config.load import Application, load_applications, load_configs
from penstock.config.model import LLMConfig
from penstock.config.parts import (
    AcceleratorConfig,
    BucketSource,
    CallbackConfig,
    LoraConfig,
    ModelLoadingConfig,
    OnDemandConfig,
    PlacementGroupConfig,
)
from penstock.config.settings import Settings

__all__ = [
    "AcceleratorConfig",
    "Application",
    "BucketSource",
    "CallbackConfig",
    "GatewayConfig",
    "LLMConfig",
    "LLMServingArgs",
    "LoraConfig",
    "ModelLoadingConfig",
    "OnDemandConfig",
    "PlacementGroupConfig",
    "Settings",
    "accelerator_kind",
    "check_accelerator",
    "load_applications",
    "load_configs",
]
