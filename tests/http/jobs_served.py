"""The Files and Batches APIs on a real port, over the gateway of `served`: rows reach simulated engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from served import Served

from penstock.config.schema.jobs import JobsConfig
from penstock.data.backends.openai_service import OpenAIService
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.worker import InProcessPool
from penstock.errors import ModelNotFound
from penstock.jobs.app import make_app
from penstock.jobs.service import JobService
from penstock.serve.http.server import Port, serve_on

CHAT = "/v1/chat/completions"


class JobsServed:
    """storage: kept by `restart`, which is another process's start for all that storage can tell."""

    def __init__(self, served: Served, storage: Path, config: Mapping[str, Any]) -> None:
        self._served, self.storage, self._config = served, storage, JobsConfig(**config)
        self.service: JobService
        self._port: Port

    async def start(self) -> None:
        def resolve(name: str | None) -> tuple[str, str]:
            if name not in (None, "m"):
                raise ModelNotFound(f"There is no model {name!r}; served is 'm'.", param="model")
            return "m", ""

        def pool(models: Sequence[str]) -> WorkerPool:
            return InProcessPool(lambda: OpenAIService(self._served.url, model="m", max_concurrency=8))

        self.service = JobService(self._config, str(self.storage), resolve, pool, line_bytes=1 << 20)
        await self.service.start()
        self._port = await serve_on(make_app(self.service), "127.0.0.1", 0)
        await self.service.wait_ready()

    async def stop(self) -> None:
        await self._port.close(grace_s=0.2)
        await self.service.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def port_number(self) -> int:
        return self._port.number

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port_number}"

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30)


def line(custom_id: Any, text: str = "hello", *, method: str = "POST", url: str = CHAT, **body: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def lines(rows: Iterable[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()
