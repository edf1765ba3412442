"""The user's own code around a model: `preprocessor` and `postprocessor` of a config.

Knows neither Ray nor HTTP nor an engine: replicas, hook deployments and batch call the same code. In order:
`hook` finds and calls it, `result` reads what a preprocessor returned.
"""

from penstock.hooks.hook import Context

__all__ = ["Context"]
