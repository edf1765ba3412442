"""Configuration: what users write, and what follows from it. Imports neither Ray nor an engine."""

from penstock.config.derive.accelerators import accelerator_kind as accelerator_kind
from penstock.config.derive.accelerators import check_accelerator as check_accelerator
from penstock.config.loading.load import Application as Application
from penstock.config.loading.load import load_applications as load_applications
from penstock.config.loading.load import load_configs as load_configs
from penstock.config.loading.serving_args import LLMServingArgs as LLMServingArgs
from penstock.config.schema.gateway import GatewayConfig as GatewayConfig
from penstock.config.schema.model import LLMConfig as LLMConfig
from penstock.config.schema.sections import AcceleratorConfig as AcceleratorConfig
from penstock.config.schema.sections import BucketSource as BucketSource
from penstock.config.schema.sections import CallbackConfig as CallbackConfig
from penstock.config.schema.sections import LoraConfig as LoraConfig
from penstock.config.schema.sections import ModelLoadingConfig as ModelLoadingConfig
from penstock.config.schema.sections import OnDemandConfig as OnDemandConfig
from penstock.config.schema.sections import PlacementGroupConfig as PlacementGroupConfig
from penstock.config.schema.settings import Settings as Settings

CloudMirrorConfig = BucketSource
"""Its name in `ray.serve.llm`."""
