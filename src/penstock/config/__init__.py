"""Configuration: what users write, and what follows from it. Imports neither Ray nor an engine."""

from penstock.config.derive.accelerators import accelerator_kind, check_accelerator
from penstock.config.loading.load import Application, load_applications, load_configs
from penstock.config.loading.serving_args import LLMServingArgs
from penstock.config.schema.gateway import GatewayConfig
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.sections import (
    AcceleratorConfig,
    BucketSource,
    CallbackConfig,
    LoraConfig,
    ModelLoadingConfig,
    OnDemandConfig,
    PlacementGroupConfig,
)
from penstock.config.schema.sections import BucketSource as CloudMirrorConfig
from penstock.config.schema.settings import Settings

__all__ = [
    "AcceleratorConfig",
    "Application",
    "BucketSource",
    "CallbackConfig",
    "CloudMirrorConfig",
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
