"""The user's own code around a model: `preprocessor` and `postprocessor` of a config.

It knows neither Ray nor HTTP nor an engine: the replica, a deployment of its own and batch call the same.
"""

from penstock.hook.context import Context
from penstock.hook.find import POSTPROCESSOR, PREPROCESSOR, problems, takes_two
from penstock.hook.hook import Hook, fault
from penstock.hook.meaning import Meant, meant
from penstock.hook.threads import Threads

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
