"""The user's own code around a model: `preprocessor` and `postprocessor` of a config.

Knows neither Ray nor HTTP nor an engine: replicas, hook deployments and batch call the same code.
"""

from penstock.hooks.hook import Context, Hook, Threads, fault
from penstock.hooks.loading import POSTPROCESSOR, PREPROCESSOR, problems, takes_two
from penstock.hooks.result import Meant, meant

__all__ = [
    "POSTPROCESSOR",
    "PREPROCESSOR",
    "Context",
    "Hook",
    "Meant",
    "Threads",
    "fault",
    "meant",
    "problems",
    "takes_two",
]
