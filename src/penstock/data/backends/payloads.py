"""A URL for rows of two kinds: payloads, posted as they are, and requests to an OpenAI-compatible service."""

from __future__ import annotations

from penstock.data.backends.openai_service import Url
from penstock.data.backends.protocol import Answer
from penstock.data.backends.rate_limit import Pace
from penstock.data.pipeline.configs import HttpRequestProcessorConfig
from penstock.data.rows.request import Request
from penstock.engine import Load, Progress, silent

PAYLOAD = ""
"""The path of a request that is a payload."""


class Http:
    """Which kind the rows are is known when they come, so the service is asked for its model only then."""

    def __init__(self, config: HttpRequestProcessorConfig) -> None:
        pace = Pace(config.qps / config.most_actors if config.qps else None)

        def url(raw: bool) -> Url:
            return Url(
                config.url,
                headers=config.headers,
                api_key=config.api_key,
                model=config.model,
                pace=pace,
                max_concurrency=config.max_in_flight,
                timeout_s=config.timeout_s,
                raw=raw,
            )

        self._exact, self._service = url(raw=True), url(raw=False)
        self._last = self._exact

    async def start(self, progress: Progress = silent) -> None:
        await self._exact.start(progress)

    async def stop(self) -> None:
        await self._exact.stop()
        await self._service.stop()

    async def ask(self, request: Request) -> Answer:
        if request.path == PAYLOAD:
            return await self._exact.ask(request)
        self._last = self._service
        await self._service.start()
        return await self._service.ask(request)

    def load(self) -> Load:
        return self._last.load()

    def room(self, in_flight: int) -> int:
        return self._last.room(in_flight)
