"""The gateway as a class, under the module path of `ray.serve.llm`."""

from penstock.serve.router.ingress import DEFAULT_ENDPOINTS as DEFAULT_ENDPOINTS
from penstock.serve.router.ingress import OpenAiIngress as OpenAiIngress
from penstock.serve.router.ingress import make_fastapi_ingress as make_fastapi_ingress
