"""The user's own code around a model: `preprocessor` and `postprocessor` of a config.

It knows neither Ray nor HTTP nor an engine: the replica, a deployment of its own and batch call the same.
"""

from penstock.hooks.context import Context
from penstock.hooks.hook import Hook, fault
from penstock.hooks.loading import POSTPROCESSOR, PREPROCESSOR, problems, takes_two
from penstock.hooks.result import Meant, meant
from penstock.hooks.threads import Threads

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
