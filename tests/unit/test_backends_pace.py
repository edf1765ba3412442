"""How fast a foreign service is asked, and how its URL is read."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from penstock.data.backends.limits import AdaptiveConcurrency, RateLimiter
from penstock.data.backends.openai_service import OpenAIService, _endpoint, _parsed
from penstock.data.rows.request import RowRequest
from penstock.errors import ConfigError, Unavailable

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/", "http://h:8000/v1/chat/completions"),
        ("http://h/llm", "http://h/llm/v1/chat/completions"),
        ("https://h/api/v1", "https://h/api/v1/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
        ("https://h/v1?api-version=3", "https://h/v1/chat/completions?api-version=3"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_the_endpoint_is_found_from_any_usual_form_of_the_url(url: str, endpoint: str):
    assert _endpoint(_parsed(url), CHAT) == endpoint


def test_paths_without_a_version_stand_beside_it():
    assert _endpoint(_parsed("http://h/v1"), "/classify") == "http://h/classify"


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h:port", "/v1"])
def test_what_is_no_url_is_refused_with_an_example(url: str):
    with pytest.raises(ConfigError, match="must be like http://host:8000/v1"):
        OpenAIService(url)


async def test_who_asks_before_the_start_is_told_so_without_secrets():
    with pytest.raises(Unavailable) as told:
        await OpenAIService("http://me:secret@h/v1?key=secret").send(RowRequest(path=CHAT, body=b"{}"))
    assert "http://h/v1" in str(told.value)
    assert "secret" not in str(told.value)


async def test_turns_come_at_even_distances():
    pace, began = RateLimiter(qps=100), time.monotonic()
    turns: list[float] = []

    async def take() -> None:
        await pace.acquire()
        turns.append(time.monotonic() - began)

    await asyncio.gather(*(take() for _ in range(11)))
    assert turns == sorted(turns)
    assert turns[-1] >= 0.1


async def test_no_more_turns_are_open_than_come_soon():
    pace = RateLimiter(qps=20)
    assert pace.available() == 3
    await asyncio.gather(pace.acquire(), pace.acquire())
    assert pace.available() < 3
    assert RateLimiter(None).available() is None


def test_a_refusal_halves_the_width_and_answers_widen_it_slowly():
    width = AdaptiveConcurrency(64)
    sent_at = time.monotonic()
    width.on_throttled(sent_at, None)
    assert width.limit == 32
    for _ in range(32):
        width.on_success()
    assert 32 <= width.limit <= 33
    for _ in range(10_000):
        width.on_success()
    assert width.limit == 64


def test_refusals_of_one_moment_count_once():
    width, sent_at = AdaptiveConcurrency(64), time.monotonic()
    for _ in range(30):
        width.on_throttled(sent_at, None)
    assert width.limit == 32


def test_the_width_is_never_less_than_one():
    width = AdaptiveConcurrency(8)
    for _ in range(30):
        width.on_throttled(time.monotonic(), None)
    assert width.limit == 1


def test_who_asks_to_be_left_alone_is():
    width = AdaptiveConcurrency(8)
    width.on_throttled(time.monotonic(), 30.0)
    assert width.limit == 0


@pytest.mark.parametrize("url", ["http://[::1]:8000/v1", "http://host/v1", "https://10.0.0.1:1/v1"])
async def test_an_address_is_shown_as_it_is_written(url: str):
    with pytest.raises(Unavailable, match=re.escape(url)):
        await OpenAIService(url.replace("://", "://me:secret@") + "?key=secret").send(
            RowRequest(path="/", body=b"{}")
        )
