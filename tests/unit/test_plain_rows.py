"""Which requests of rows are plain, and how they are rendered in bulk."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from penstock.engines.vllm.rows.bulk import Bulk
from penstock.engines.vllm.rows.plain import CHAT, COMPLETIONS, parameters, read


def given(path: str, **body: Any) -> dict[str, Any] | None:
    """The parameters of a plain request; None for another."""
    found = read(path, json.dumps(body).encode())
    return None if found is None else parameters(found)


def chat(**body: Any) -> dict[str, Any] | None:
    return given(CHAT, **{"messages": [{"role": "user", "content": "Hello"}]} | body)


def test_a_plain_request_keeps_what_it_sets_and_nothing_else():
    assert chat(temperature=1, max_tokens=None, min_tokens=None, user="x") == {"temperature": 1.0}
    assert given(COMPLETIONS, prompt=[1, 2], seed=2**63 - 1) == {"seed": 2**63 - 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": []},
        {"tools": None},
        {"n": 2},
        {"seed": 2**63},
        {"max_tokens": True},
        {"temperature": "1"},
        {"unheard_of": 1},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
        {"messages": [{"role": "user", "content": "x" * 200_000}]},
    ],
)
def test_anything_else_is_left_to_the_application(fields: dict[str, Any]):
    assert chat(**fields) is None


@pytest.mark.parametrize("prompt", [[], [-1], [[1]], ["x"], None, 5])
def test_a_prompt_is_one_text_or_token_ids(prompt: Any):
    assert given(COMPLETIONS, prompt=prompt) is None


def test_what_waits_is_done_in_few_jobs_and_an_error_is_its_callers_alone():
    jobs, items = list[int](), list[int]()

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            jobs.append(1)
            return super().submit(*args, **kwargs)

    def halved(number: int) -> int:
        items.append(number)
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2

    async def run() -> list[Any]:
        with Pool(1) as pool:
            bulk = Bulk[int](pool)
            calls = [asyncio.create_task(bulk(partial(halved, number))) for number in range(100)]
            calls[4].cancel()
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(run())
    assert found[6] == 3
    assert str(found[7]) == "7 is odd"
    assert isinstance(found[4], asyncio.CancelledError)
    assert 4 not in items
    assert len(jobs) <= 5
