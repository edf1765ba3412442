"""The configs, under the module path that users know."""

from penstock.config import CloudMirrorConfig as CloudMirrorConfig
from penstock.config import GatewayConfig as GatewayConfig
from penstock.config import LLMConfig as LLMConfig
from penstock.config import LLMServingArgs as LLMServingArgs
from penstock.config import LoraConfig as LoraConfig
from penstock.config import ModelLoadingConfig as ModelLoadingConfig
