"""The table of docs/compatibility.md that says in what answers differ from those of a bare `vllm serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from differences import ABSENT, Difference
from drawn import RIGHT, Request

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEADING = "## Answers beside `vllm serve`"

_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\([^)]*\)")
_ANY, _NAME = "...", "NAME"
_OF_REQUESTS = ("method", "kind", "content", "encoding")
"""Of a request that are no fields of its body."""

Json = Any


@dataclass(frozen=True)
class Row:
    """One line. A cell's words are for readers; what stands in code is compared.

    endpoints, places: patterns. requests: one of them is met; of each the fields, with their values or `...`;
    the field `*` is any, at any depth. vllm, penstock: the values at a place, any where there are none.
    """

    text: str
    endpoints: list[str] = field(compare=False)
    requests: list[dict[str, Json]] = field(compare=False)
    places: list[str] = field(compare=False)
    vllm: list[Json] = field(compare=False)
    penstock: list[Json] = field(compare=False)

    @classmethod
    def of(cls, text: str) -> Row:
        cells = _LINK.sub("]", text).strip("|").split("|")
        endpoints, _, places, vllm, penstock, _ = (_CODE.findall(cell) for cell in cells)
        requests = [dict(map(_field, _CODE.findall(one))) for one in cells[1].split(" or ")]
        return cls(text, endpoints, requests, places, [*map(_value, vllm)], [*map(_value, penstock)])

    def covers(self, request: Request, found: Difference) -> bool:
        return (
            any(fnmatchcase(request.path, pattern) for pattern in self.endpoints)
            and any(all(_has(request, *one) for one in asked.items()) for asked in self.requests)
            and any(fnmatchcase(found.place, pattern) for pattern in self.places)
            and any(_fits(*pair, found) for pair in product(self.vllm or [_ANY], self.penstock or [_ANY]))
        )

    def examples(self) -> Iterator[Request]:
        """That reach it, as far as its requests are said."""
        path = self.endpoints[0]
        for asked in self.requests:
            own = {name: value for name, value in asked.items() if name in _OF_REQUESTS}
            fields = {name: value for name, value in asked.items() if name not in own}
            if asked and "*" not in path and "*" not in fields and _ANY not in asked.values():
                yield Request(path, {**RIGHT.get(path, [{}])[0], **fields}, **own)


def rows() -> list[Row]:
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [Row.of(line) for line in lines[1:]]  # the first names the columns


def _field(text: str) -> tuple[str, Json]:
    name, given, value = text.partition(": ")
    return name, json.loads(value) if given else _ANY


def _value(text: str) -> Json:
    return ABSENT if text == ABSENT else json.loads(text)


def _has(request: Request, name: str, value: Json) -> bool:
    if name in _OF_REQUESTS:
        return getattr(request, name) == value or (value == _ANY and getattr(request, name) is not None)
    if name == "*":
        return value in _leaves(request.fields or {})
    fields = request.fields or {}
    return name in fields and (value == _ANY or fields[name] == value)


def _leaves(value: Json) -> Iterator[Json]:
    """What the lists and objects inside of `value` hold."""
    if not isinstance(value, dict | list):
        yield value
        return
    for one in value.values() if isinstance(value, dict) else value:
        yield from _leaves(one)


def _fits(vllm: Json, penstock: Json, found: Difference) -> bool:
    """Whether these are the values. NAME stands for the same text in both."""
    if isinstance(vllm, str) and isinstance(penstock, str) and _NAME in vllm:
        before, after = vllm.split(_NAME)
        name = str(found.vllm).removeprefix(before).removesuffix(after)
        return (found.vllm, found.penstock) == (vllm.replace(_NAME, name), penstock.replace(_NAME, name))
    return vllm in (_ANY, found.vllm) and penstock in (_ANY, found.penstock)
