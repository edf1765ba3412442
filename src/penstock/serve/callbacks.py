"""`CallbackBase`, under the module path of `ray.serve.llm`."""

from penstock.engines.callback import CallbackBase, CallbackCtx

__all__ = ["CallbackBase", "CallbackCtx"]
