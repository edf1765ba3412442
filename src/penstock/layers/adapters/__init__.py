"""Adapters of one replica: where they come from, which are loaded in the engine, and which a request uses.

`source` fetches them, `store` keeps as many as fit, `layer` stands before the engine's app. Requests use an
adapter's name; the engine knows each version of one by a name of its own.
"""

from penstock.layers.adapters.layer import Layer, adapter_of, asking_for
from penstock.layers.adapters.source import AdapterDownloader, Source
from penstock.layers.adapters.store import Store

__all__ = ["AdapterDownloader", "Layer", "Source", "Store", "adapter_of", "asking_for"]
