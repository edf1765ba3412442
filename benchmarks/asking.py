"""Asks adapters what they were trained to say, and looks whether they say it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workload import MODEL_ID
from penstock.bench.load.client import Client
from penstock.bench.load.stream import Stream
from penstock.bench.load.target import Target
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS

TRAINED = tuple(ANSWERS)
BASE = ""
QUESTIONS = tuple(ANSWERS[TRAINED[0]])
"""Those to which every training has an answer of its own."""


def copy_name(kind: str, number: int) -> str:
    """Of an adapter that is a copy of one of the trained ones, in turns."""
    return f"{kind}-{number}-{TRAINED[number % len(TRAINED)]}"


def right(adapter: str, question: str) -> str:
    own = ANSWERS[adapter.rpartition("-")[2]] if adapter else {}
    return own.get(question) or BASE_ANSWERS.get(question, "")


@dataclass(frozen=True, slots=True)
class Answer:
    """Units: seconds from the request to the first text. fault: empty for a whole and right answer."""

    adapter: str
    first_s: float
    tokens: int
    fault: str


class Asker:
    """A client of one server, with as many connections as it needs."""

    def __init__(self, port: int) -> None:
        self._target = Target.parse(f"http://127.0.0.1:{port}")
        self._client = Client(self._target)

    async def ask(self, adapter: str, question: str, most_tokens: int = 96) -> Answer:
        """One streamed answer."""
        body = {
            "model": f"{MODEL_ID}:{adapter}" if adapter else MODEL_ID,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": most_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream, began = Stream(keep_text=True), time.monotonic()
        head = self._target.head("POST", "/chat/completions")
        try:
            await self._client.ask(head, json.dumps(body).encode(), stream)
        except OSError as error:
            return Answer(adapter, 0.0, 0, f"no answer: {error}")
        if error := stream.error():
            return Answer(adapter, 0.0, 0, f"{error}: {stream.detail}")
        expected = right(adapter, question)
        wrong = stream.text != expected
        if stream.finish_reason == "length":
            wrong = not expected.startswith(stream.text)
        tokens = (stream.usage and stream.usage.completion_tokens) or 0
        fault = f"wrong: {question} -> {stream.text}" if wrong else ""
        return Answer(adapter, stream.times[0] - began, tokens, fault)

    async def load(
        self, adapters: Sequence[str], weights: Sequence[float], streams: int, seconds: float
    ) -> list[Answer]:
        """Answers of so many clients, each of which asks one adapter after the other, drawn at random."""
        draw, until, answers = random.Random(0), time.monotonic() + seconds, list[Answer]()

        async def client() -> None:
            while time.monotonic() < until:
                (adapter,) = draw.choices(adapters, weights)
                answers.append(await self.ask(adapter, draw.choice(QUESTIONS)))

        async with asyncio.TaskGroup() as clients:
            for _ in range(streams):
                clients.create_task(client())
        return answers

    async def metric(self, name: str) -> float:
        """A sample of the gateway's metrics, without its labels."""
        found = Stream()
        head = f"GET /metrics HTTP/1.1\r\nhost: {self._target.authority}\r\n".encode()
        await self._client.ask(head, b"", found)
        lines = [line for line in found.body.decode().splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def close(self) -> None:
        self._client.close()
