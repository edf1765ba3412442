"""The Files and Batches APIs on a real port, over the gateway of `served`: rows reach simulated engines."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch
from served import Served

from penstock.config.schema.jobs import JobsConfig
from penstock.data.backends.openai_service import OpenAIService
from penstock.data.backends.protocol import Backend, Response
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.worker import InProcessPool
from penstock.data.rows.request import RowRequest
from penstock.errors import ModelNotFound
from penstock.jobs.app import make_app
from penstock.jobs.records import BatchRecord
from penstock.jobs.runner import RowCounts
from penstock.jobs.service import JobService
from penstock.jobs.turns import Standing
from penstock.jobs.validation import OwnEndpoints, Resolve
from penstock.serve.http.server import Port, serve_on

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


CONCURRENCY = 8


@dataclass
class Requests:
    """Bodies of rows that were sent to the engine, and of those whose answers came."""

    sent: Counter[bytes] = field(default_factory=Counter)
    answered: set[bytes] = field(default_factory=set)


class _Counted(OpenAIService):
    def __init__(self, requests: Requests, url: str) -> None:
        super().__init__(url, model="m", api_key="the-key", max_concurrency=CONCURRENCY)
        self._requests = requests

    async def send(self, request: RowRequest) -> Response:
        self._requests.sent[request.body] += 1
        response = await super().send(request)
        self._requests.answered.add(request.body)
        return response


class JobsServed:
    """storage: kept by `restart`, which is another process's start for all that storage can tell."""

    def __init__(
        self,
        served: Served,
        storage: Path | str,
        config: Mapping[str, Any],
        own_endpoints: OwnEndpoints | None = None,
        backend: Callable[[], Backend] | None = None,
    ) -> None:
        """backend: answers the rows; else they go to the gateway, and are counted."""
        self._served, self.storage, self._config = served, storage, JobsConfig(**config)
        self._own_endpoints = own_endpoints
        self.service: JobService
        self.requests = Requests()
        self._backend = backend or (lambda: _Counted(self.requests, self._served.url))
        self._port: Port
        self.counted = Counter[tuple[str, str]]()
        """Rows and tokens of tenants' batches."""
        self.budget = 1 << 40
        """Of both together."""

    async def start(self) -> None:
        def resolve(name: str | None, body: bytes) -> tuple[str, str]:
            if name not in (None, "m"):
                raise ModelNotFound(f"There is no model {name!r}; served is 'm'.", param="model")
            return "m", ""

        def pool(record: BatchRecord, standing: Standing, resolve: Resolve) -> WorkerPool:
            return InProcessPool(self._backend)

        def resolve_only(names: Sequence[str]) -> Resolve:
            return lambda name, body: resolve(name if name in names else f"not {name}", body)

        def count(record: BatchRecord, counts: RowCounts) -> bool:
            self.counted[record.tenant, "rows"] += counts.rows
            self.counted[record.tenant, "tokens"] += counts.prompt_tokens + counts.output_tokens
            return self.counted.total() >= self.budget

        self.service = JobService(
            self._config,
            str(self.storage),
            resolve,
            pool,
            line_bytes=1 << 20,
            own_endpoints=self._own_endpoints,
            resolve_only=resolve_only,
            count=count,
        )
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


async def create(jobs: JobsServed, rows: Iterable[str] | bytes, **more: Any) -> Batch:
    client = jobs.openai()
    content = rows if isinstance(rows, bytes) else lines(rows)
    file = await client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    options: Any = {"endpoint": CHAT, "completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, **options)


async def ended(jobs: JobsServed, batch_id: str) -> Batch:
    while True:
        batch = await jobs.openai().batches.retrieve(batch_id)
        if batch.status in ENDED:
            return batch
        await asyncio.sleep(0.05)


async def begun(jobs: JobsServed, batch_id: str) -> Batch:
    """When some of its requests are done."""
    while True:
        batch = await jobs.openai().batches.retrieve(batch_id)
        if batch.request_counts.completed:
            return batch
        assert batch.status not in ENDED, batch
        await asyncio.sleep(0.02)


async def found(jobs: JobsServed, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await jobs.openai().files.content(file_id)).text
    return [json.loads(one) for one in content.splitlines()]
