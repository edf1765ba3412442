"""The gateway as a class, under the module path of `ray.serve.llm`."""

from penstock.serve.router.ingress import DEFAULT_ENDPOINTS, OpenAiIngress, make_fastapi_ingress

__all__ = ["DEFAULT_ENDPOINTS", "OpenAiIngress", "make_fastapi_ingress"]
