"""The user's own code around a model: `preprocessor` and `postprocessor` of a config.

Knows neither Ray nor HTTP nor an engine: replicas, hook deployments and batch call the same code.
"""

from penstock.hooks.hook import POSTPROCESSOR as POSTPROCESSOR
from penstock.hooks.hook import PREPROCESSOR as PREPROCESSOR
from penstock.hooks.hook import Context as Context
from penstock.hooks.hook import Hook as Hook
from penstock.hooks.hook import Threads as Threads
from penstock.hooks.hook import authors_ask as authors_ask
from penstock.hooks.hook import fault as fault
from penstock.hooks.hook import problems as problems
from penstock.hooks.hook import takes_two as takes_two
from penstock.hooks.result import Meant as Meant
from penstock.hooks.result import meant as meant
