"""Penstock answers as a bare `vllm serve` does, but for what docs/compatibility.md lists; batch lines, too.

The requests are drawn from vLLM's own OpenAPI document and sent to both servers, which have the same model.
BESIDE='MODEL REQUEST', as a failure prints it, asks that one again; BESIDE=7 draws other requests.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from shlex import quote
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agreed import Row, rows
from bare import Pair, beside
from differences import Difference, between, line, seen
from drawn import LAST, Drawer, Request
from hypothesis import settings
from jobs_served import create, ended, found

from penstock.jobs.validation import ENDPOINTS
from penstock.tiers import FIELD as TIER

pytestmark = [
    pytest.mark.full,
    pytest.mark.parity("X9"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(0),
]

MODELS: dict[str, dict[str, Any]] = {
    "assistant": {
        "reasoning_parser": "deepseek_r1",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    },
    "embedder": {
        "max_model_len": 128,
        "chat_template": "{{ messages[0].content }}",
        "hf_overrides": {"task_instructions": {"search_query": "tell me about "}},
    },
    "cross_encoder": {"max_model_len": 128},
}
REQUESTS = {"assistant": 360, "embedder": 210, "cross_encoder": 60}
ASKED_AGAIN = 3
BROKEN = (500, 502, 503, 504)
FILE = "tests/http/test_beside_fuzz.py"
SHOWN = 1000
REPORTED = 30


@dataclass
class Found:
    """A difference that nothing explains, with the first request that showed it and how many did."""

    request: Request
    difference: Difference
    requests: int = 0


@dataclass
class Comparison:
    """Of the two servers of one model."""

    model: str
    pair: Pair
    agreed: list[Row]
    reached: set[Row]
    found: dict[tuple[str, str], Found] = field(default_factory=dict)
    answered: list[tuple[Request, Any]] = field(default_factory=list)
    lasts: tuple[str, str] = ("none", "none")

    async def ask(self, request: Request) -> tuple[Any, Any]:
        """What vLLM and Penstock answer."""
        clients = (self.pair.vllm, self.pair.penstock)
        sending = [send(client, request, last) for client, last in zip(clients, self.lasts, strict=True)]
        answers = await asyncio.gather(*sending)
        ids = [stored(request, answer) for answer in answers]
        self.lasts = (ids[0], ids[1]) if all(ids) else self.lasts
        return seen(answers[0]), seen(answers[1])

    async def compare(self, request: Request) -> None:
        vllm, penstock = await self.ask(request)
        left = self.left(request, vllm, penstock)
        for _ in range(ASKED_AGAIN):
            if left:  # vLLM's own streams are not always parsed alike: the answer must be one of its answers
                again = seen(await send(self.pair.vllm, request, self.lasts[0]))
                left = self.left(request, again, penstock)
        if left and await self.has_two_faults(request, vllm, penstock):
            left = []
        for one in left:
            self.found.setdefault((request.path, one.place), Found(request, one)).requests += 1
        self.answered.append((request, penstock))

    async def has_two_faults(self, request: Request, vllm: Any, penstock: Any) -> bool:
        """Whether both refuse it, each for another field: without one of these they agree."""
        names = {named(vllm), named(penstock)} & {*(request.fields or ())}
        for name in names if 200 not in (vllm["status"], penstock["status"]) else ():
            smaller = request.without(name)
            answers = await self.ask(smaller)
            if answers[0]["status"] != 200 and not self.left(smaller, *answers):
                return True
        return False

    def left(self, request: Request, vllm: Any, penstock: Any) -> list[Difference]:
        """What the table does not explain."""
        found = [one for one in between(vllm, penstock) if not self.is_agreed(request, one)]
        if penstock["status"] in BROKEN and not found:  # vLLM's is the same
            found = [Difference("status", vllm["status"], penstock["status"])]
        return found

    def is_agreed(self, request: Request, one: Difference) -> bool:
        covering = [row for row in self.agreed if row.covers(request, one)]
        self.reached.update(covering)
        return bool(covering)

    async def report(self, found: Found) -> str:
        request = await self.shrunk(found.request, found.difference.place)
        vllm, penstock = await self.ask(request)
        ways = next(
            (one for one in between(vllm, penstock) if one.place == found.difference.place), found.difference
        )
        return (
            f"{found.difference.place} ({found.requests} requests)\n"
            f"  vllm serve: {_short(ways.vllm)}\n  penstock:   {_short(ways.penstock)}\n"
            f"  whole, vllm serve: {_short(vllm)}\n  whole, penstock:   {_short(penstock)}\n"
            f"  BESIDE={quote(f'{self.model} {request.text()}')} make test T={FILE}\n"
        )

    async def shrunk(self, request: Request, place: str) -> Request:
        """With the fewest fields that still differ there."""
        for name in request.fields or ():
            smaller = request.without(name)
            if any(one.place == place for one in self.left(smaller, *await self.ask(smaller))):
                request = smaller
        return request

    async def lines(self) -> list[str]:
        """Asks again by batches what lines can ask; what differs from the answers by HTTP."""
        return [text for endpoint in ENDPOINTS for text in await self._lines(endpoint)]

    async def _lines(self, endpoint: str) -> list[str]:
        asked = [(request, by_http) for request, by_http in self.answered if _is_line(request, endpoint)]
        if not asked:
            return []
        texts = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": endpoint, "body": request.fields})
            for i, (request, _) in enumerate(asked)
        ]
        batch = await ended(self.pair.jobs, (await create(self.pair.jobs, texts, endpoint=endpoint)).id)
        assert batch.status == "completed", batch
        files = [await found(self.pair.jobs, name) for name in (batch.output_file_id, batch.error_file_id)]
        answers = {one["custom_id"]: one["response"] for file in files for one in file}
        wrong = list[str]()
        for i, (request, by_http) in enumerate(asked):
            by_line = line(answers[str(i)]["status_code"], answers[str(i)]["body"])
            # A line's class is another one, and is said.
            if differing := [
                one for one in between(by_http, by_line) if one.penstock not in ("flex", "batch")
            ]:
                wrong.append(f"{request.text()}\n  by HTTP {by_http}\n  as a line {by_line}\n  {differing}")
        return wrong


async def send(client: httpx.AsyncClient, request: Request, last: str) -> httpx.Response | None:
    """None where the connection ended before the answer did."""
    path, headers = request.path.replace(LAST, last), {"content-type": request.kind}
    try:
        return await client.request(request.method, path, content=request.body(last), headers=headers)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return None


def named(answer: Any) -> str:
    """The field of the body that an error blames."""
    body = answer.get("body")
    error = body.get("error") if isinstance(body, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    return str(param).removeprefix("body.").partition(".")[0]


def stored(request: Request, answer: httpx.Response | None) -> str:
    """The id of the response that it made, if it made one that can be asked for."""
    if answer is None or answer.status_code != 200 or request.path != "/v1/responses":
        return ""
    kept = (
        request.fields is not None and request.fields.get("store", True) and not request.fields.get("stream")
    )
    return answer.json()["id"] if kept else ""


def _is_line(request: Request, endpoint: str) -> bool:
    fields = request.fields or {}
    return (
        request.fields is not None
        and "stream" not in fields
        and not fields.get("background")
        and fields.get("model", "m") == "m"
        and not fields.keys() & {TIER, "priority"}  # the batch's class is that of each line
        and request == Request(endpoint, request.fields)
        and LAST not in request.text()
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


@dataclass
class Outcome:
    """Of all models."""

    different: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    reached: set[Row] = field(default_factory=set)
    requests: int = 0


def drawn(model: str, document: Any) -> Iterable[Request]:
    name, _, text = os.environ.get("BESIDE", "39").partition(" ")
    if text:
        return [Request.of(text)] if name == model else []
    random, turns = (Random(int(name)), 1) if settings.default.derandomize else (Random(), 4)
    return islice(Drawer(document, random).requests(), turns * REQUESTS[model])


def examples(agreed: list[Row], document: Any) -> list[Request]:
    """Of rows that say all of their request, so that each is reached."""
    return [one for row in agreed for one in row.examples() if one.path in document["paths"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcome(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Outcome]:
    """Asks everything, of one model after the other: two engines at a time."""
    outcome, agreed = Outcome(), rows()
    for model, arguments in MODELS.items():
        async with beside(model, tmp_path_factory.mktemp("jobs"), **arguments) as pair:
            comparison = Comparison(model, pair, agreed, outcome.reached)
            document = (await pair.vllm.get("/openapi.json")).json()
            for request in [*drawn(model, document), *examples(agreed, document)]:
                await comparison.compare(request)
                outcome.requests += 1
            reports = [await comparison.report(one) for one in islice(comparison.found.values(), REPORTED)]
            outcome.different += reports
            outcome.lines += await comparison.lines()
    yield outcome


async def test_answers_differ_only_as_the_table_says(outcome: Outcome):
    assert not outcome.different, "\n".join(["", *outcome.different])


async def test_batch_lines_are_answered_as_requests_are(outcome: Outcome):
    assert not outcome.lines, "\n".join(["", *outcome.lines])


@pytest.mark.skipif("BESIDE" in os.environ, reason="the rows are for the usual requests")
async def test_each_row_of_the_table_is_reached(outcome: Outcome):
    assert [row.text for row in rows() if row not in outcome.reached and "at times" not in row.text] == []
