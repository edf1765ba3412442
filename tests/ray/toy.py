"""A deployment that is no LLM. Its replicas import this file, so it imports nothing that only tests find."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

from pydantic import BaseModel


class Question(BaseModel):
    text: str
    times: int = 1


@dataclasses.dataclass
class Point:
    x: int


class Toy:
    """Not an LLM."""

    async def ask(self, question: Question) -> Question:
        return Question(text=question.text * question.times)

    def add(self, row: dict[str, Any]) -> int:
        return row["a"] + row["b"]

    def both(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"sum": row["a"] + row["b"], "product": row["a"] * row["b"]}

    async def point(self, row: dict[str, Any]) -> Point:
        return Point(row["x"])

    async def double(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"array": row["array"] * 2, "raw": row["raw"]}

    async def count(self, row: dict[str, Any]) -> Any:
        for number in range(row["to"]):
            yield number

    async def refuse(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "error": {
                "message": "Too long.",
                "type": "invalid_request_error",
                "code": "context_length_exceeded",
            }
        }

    async def fail(self, row: dict[str, Any]) -> None:
        raise ValueError("this row") if row["bad"] else KeyError("this code")

    async def wait(self, row: dict[str, Any]) -> int:
        await asyncio.sleep(row["s"])
        return os.getpid()
