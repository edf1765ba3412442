"""Clients that ask a service all the time, and a ledger of what became of each request.

A request's prompt begins with its own number. The simulator repeats the prompt, so that an answer which is
another request's shows. Every request is on a connection of its own: it may reach any gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.load import CHAT
from benchmarks.workload import MODEL_ID

_SILENT_S = 90.0  # a client gives up
_COUNT_PROMPT = "{} one two three four five six seven eight nine ten eleven twelve"
_DRAIN_S = _SILENT_S + 10.0


@dataclass
class Ledger:
    """What was sent, and what each request came to; the counts since `mark` are those of one fault."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    slowest_s: float = 0.0
    silence_s: float = 0.0
    total: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    def mark(self) -> None:
        """From now on the counts are of the next fault."""
        self.outcomes, self.slowest_s, self.silence_s = Counter(), 0.0, 0.0

    def heard(self) -> None:
        """A client has received something."""
        now = time.monotonic()
        self.silence_s = max(self.silence_s, now - self.heard_at)
        self.heard_at = now

    def ended(self, kind: str, outcome: str, seconds: float) -> None:
        """A request has its outcome: "good", or what went wrong."""
        self.total += 1
        self.outcomes[outcome if outcome == "good" else f"{kind}: {outcome}"] += 1
        if kind == "unary" and outcome == "good":
            self.slowest_s = max(self.slowest_s, seconds)

    @property
    def failed(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "good"}


class Clients:
    """`streams` at a time, and `unary` requests a second, from a thread of their own until `stop`."""

    def __init__(self, port: int, *, streams: int, unary: float, tokens: int, repeats: bool) -> None:
        """repeats: whether an answer repeats its prompt."""
        self.ledger = Ledger()
        self._url = f"http://127.0.0.1:{port}{CHAT}"
        self._tokens, self._repeats = tokens, repeats
        self._streams, self._gap_s = streams, 1 / unary
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_until_stopped()), daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """Waits for the open requests. What is wrong with the ledger; empty when all have one outcome."""
        self._stopped.set()
        self._thread.join(_DRAIN_S)
        missing = self.ledger.sent - self.ledger.total
        return f"{missing} of {self.ledger.sent} requests have no outcome" if missing else ""

    async def _ask_until_stopped(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=_SILENT_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._streams):
                group.create_task(self._stream_after_stream(http))
            while not self._stopped.is_set():
                group.create_task(self._ask(http, "unary"))
                await asyncio.sleep(self._gap_s)

    async def _stream_after_stream(self, http: httpx.AsyncClient) -> None:
        while not self._stopped.is_set():
            if not await self._ask(http, "stream"):
                await asyncio.sleep(self._gap_s)

    async def _ask(self, http: httpx.AsyncClient, kind: str) -> bool:
        """Whether it was good."""
        self.ledger.sent += 1
        number, began_at = f"r{self.ledger.sent}", time.monotonic()
        body = {
            "model": MODEL_ID,
            "messages": [{"role": "user", "content": _COUNT_PROMPT.format(number)}],
            "max_tokens": self._tokens if kind == "stream" else 8,
            "ignore_eos": True,
            "stream": kind == "stream",
        }
        try:
            outcome = await (self._stream(http, body) if kind == "stream" else self._unary(http, body))
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.TimeoutException:
            outcome = f"nothing for {_SILENT_S:g} s"
        except httpx.HTTPError:
            outcome = "cut"
        if outcome.startswith("text "):
            is_own = not self._repeats or outcome.split()[1] == number
            outcome = "good" if is_own else "another's text"
        self.ledger.ended(kind, outcome, time.monotonic() - began_at)
        return outcome == "good"

    async def _unary(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await http.post(self._url, json=body)
        self.ledger.heard()
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        return "text " + answer.json()["choices"][0]["message"]["content"] + " ."

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        text = ""
        async with http.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                self.ledger.heard()
                if line == "data: [DONE]":
                    return f"text {text} ."
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return "error event"
                    text += event["choices"][0]["delta"].get("content") or ""
        return "cut"


class Batches:
    """One batch of the Batches API after another, from a thread of its own until `stop`."""

    def __init__(self, port: int, *, rows: int, repeats: bool) -> None:
        self._port, self._rows, self._repeats = port, rows, repeats
        self.done = 0
        self.faults: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = 240.0) -> str:
        """Waits for the batch that runs. What is wrong with rows; empty when all came, each once."""
        self._stopped.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self.faults["a batch is not done"] += 1
        return ", ".join(f"{count} {fault}" for fault, count in self.faults.items())

    def _run(self) -> None:
        base = f"http://127.0.0.1:{self._port}/v1/"
        with httpx.Client(base_url=base, timeout=30.0, trust_env=False) as http:
            while not self._stopped.is_set():
                self._one(http)

    def _one(self, http: httpx.Client) -> None:
        lines = "\n".join(json.dumps(self._row(number)) for number in range(self._rows))
        upload = {"files": {"file": ("rows.jsonl", lines)}, "data": {"purpose": "batch"}}
        given = self._ask(http, "POST", "files", **upload).json()
        order = {"input_file_id": given["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = self._ask(http, "POST", "batches", json=order).json()
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.5)
            batch = self._ask(http, "GET", f"batches/{batch['id']}").json()
        if batch["status"] != "completed" or not batch["output_file_id"]:
            self.faults[f"batch {batch['status']} without an output"] += 1
            return
        answers = self._ask(http, "GET", f"files/{batch['output_file_id']}/content").text.splitlines()
        seen = Counter(self._check(json.loads(line)) for line in answers)
        self.faults["rows missing"] += self._rows - len(seen)
        self.faults["rows twice"] += seen.total() - len(seen)
        self.faults = +self.faults
        self.done += 1

    def _row(self, number: int) -> dict[str, Any]:
        prompt = [{"role": "user", "content": _COUNT_PROMPT.format(f"row-{number}")}]
        body = {"model": MODEL_ID, "messages": prompt, "max_tokens": 8}
        return {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body}

    def _check(self, answer: dict[str, Any]) -> str:
        """The row's id."""
        response, row = answer["response"], answer["custom_id"]
        if response is None or response["status_code"] != 200:
            self.faults["rows failed"] += 1
        elif self._repeats and response["body"]["choices"][0]["message"]["content"].split()[0] != row:
            self.faults["rows with another's text"] += 1
        return row

    def _ask(self, http: httpx.Client, method: str, path: str, **request: Any) -> httpx.Response:
        """Asks until it is answered: faults of the service are what this is about."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = http.request(method, path, **request)
                if answer.status_code < 500:
                    return answer.raise_for_status()
            time.sleep(0.5)
