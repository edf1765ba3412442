"""The classes that users bind to models, under the module path that they know."""

from penstock.serve.replica.deployment import ModelDeployment
from penstock.serve.replica.server import LLMServer
from penstock.serve.router.deployment import RouterDeployment
from penstock.serve.router.router import LLMRouter

__all__ = ["LLMRouter", "LLMServer", "ModelDeployment", "RouterDeployment", "VLLMService"]


class VLLMService(LLMServer):
    """Another name of `LLMServer`."""
