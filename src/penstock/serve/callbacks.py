"""`CallbackBase`, under the module path of `ray.serve.llm`."""

from penstock.engines.callback import CallbackBase as CallbackBase
from penstock.engines.callback import CallbackCtx as CallbackCtx
