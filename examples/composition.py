"""Your own deployment in front of a model: plain Python by handle, no HTTP in between.

`explain` asks the model twice: `chat` gives OpenAI's answer, `generate` the engine's own stream of deltas,
which `tell` hands on.
"""

from collections.abc import AsyncGenerator

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from penstock.serve import LLMConfig, LLMServer


@serve.deployment
class Glossary:
    def __init__(self, model: DeploymentHandle) -> None:
        self.model = model.options(stream=True)

    async def explain(self, term: str) -> dict[str, str]:
        request = {"messages": [{"role": "user", "content": f"What is {term}?"}], "temperature": 0}
        answers = [answer async for answer in self.model.chat.remote(request)]
        return {
            "chat": answers[0].choices[0].message.content,
            "generate": "".join([text async for text in self.tell(term)]),
        }

    async def tell(self, term: str) -> AsyncGenerator[str, None]:
        """Word for word, as the engine makes them."""
        prompt = f"<|im_start|>user\nWhat is {term}?<|im_end|>\n<|im_start|>assistant\n"
        async for delta in self.model.generate.remote(prompt, {"max_tokens": 100, "temperature": 0}):
            yield delta.text

    async def __call__(self, request: Request) -> dict[str, str]:
        return await self.explain(request.query_params["term"])


config = LLMConfig(model_loading_config={"model_id": "helper", "model_source": "demo"})
handle = serve.run(Glossary.bind(LLMServer.as_deployment().bind(config)))
print(handle.explain.remote("a KV cache").result())
for text in handle.options(stream=True).tell.remote("a KV cache"):
    print(text, end="", flush=True)
print()
