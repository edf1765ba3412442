"""A class in the gateway's place, as users write one. Gateways import this."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.serve.ingress import OpenAiIngress
from penstock.serve.openai_api_models import ChatCompletionRequest


class Louder(OpenAiIngress):
    """Changes what goes to a model, and has an endpoint of its own."""

    def __init__(self, llm_deployments, model_cards, *, lora_paths=None, ends_with="?") -> None:
        super().__init__(llm_deployments, model_cards, lora_paths=lora_paths)
        self._ends_with = ends_with

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        body.messages[-1]["content"] += self._ends_with
        return await super().chat(body, request)

    async def ending(self) -> dict:
        return {"ends_with": self._ends_with}
