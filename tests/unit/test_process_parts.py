"""What an engine in a process of its own is told, and what its child's texts mean. Nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.engine import no_progress
from penstock.engines import foreign
from penstock.engines.check import check_arguments
from penstock.engines.process import media_urls, readiness
from penstock.engines.process.engine import ProcessEngine
from penstock.engines.process.gauges import Gauges, read
from penstock.engines.process.options import filled
from penstock.engines.process.readiness import ModelCard
from penstock.engines.process.wire import lines
from penstock.errors import BadRequest

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100",user_specified_block_size="True"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="a"} 4
sglang:num_queue_reqs{model_name="a"} 2
sglang:token_usage{model_name="a"} 0.5
sglang:max_total_num_tokens{model_name="a"} 4096
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


@pytest.mark.parametrize(
    ("text", "gauges"),
    [
        (VLLM, Gauges(5, 1, 0.25, 3200)),
        (SGLANG, Gauges(4, 2, 0.5, 4096)),
        (LLAMA, Gauges(1, 0)),
        ("python_gc_objects_collected_total 1.0", None),
    ],
)
def test_gauges_are_known_by_the_names_of_their_engines(text: str, gauges: Gauges | None):
    assert read(text) == gauges


def chat(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    "request_",
    [
        chat({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}),
        chat({"type": "image_url", "image_url": " HTTPS://internal/x"}),
        chat({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}),
        chat({"type": "image_url", "image_url": {"url": "secret.png"}}),
        chat({"type": "image", "source": {"type": "url", "url": "http://internal/"}}),
        chat({"type": "tool_result", "content": [{"type": "image", "source": {"url": "http://internal/"}}]}),
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://internal/"}]}]},
        {
            "input": [
                {"type": "function_call_output", "output": [{"type": "input_file", "file_url": "ftp://a"}]}
            ]
        },
        {"input": [{"image": "http://internal/a.png"}], "model": "m"},
        {"data_1": {"content": [{"type": "audio_url", "audio_url": {"url": "http://allowed.com.evil/"}}]}},
    ],
)
def test_an_address_that_the_config_does_not_name_is_not_fetched(request_: dict[str, object]):
    for allowed in ([], ["allowed.com"]):
        with pytest.raises(BadRequest, match="allowed_media_domains"):
            media_urls.check(request_, allowed)
    media_urls.check(request_, [media_urls.ANY])


def test_data_and_hosts_that_the_config_names_pass():
    media_urls.check(
        chat({"type": "image_url", "image_url": {"url": "https://allowed.com:1/a"}}), ["allowed.com"]
    )
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,/9j/4A==", "detail": "auto"}},
        {"type": "input_audio", "input_audio": {"data": "//uQx+AA", "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "/9j/4A=="}},
        {"type": "document", "source": {"type": "text", "data": "See http://a. And b.txt, too."}},
        {"type": "text", "text": "http://internal/a.png"},
        {"type": "tool_use", "input": {"image": "http://internal/"}},
    ):
        media_urls.check(chat(part) | {"tools": [{"image": "http://a/"}], "prompt": "http://a/"}, [])


def problems(**engine_kwargs: object) -> str:
    config = LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="Process", engine_kwargs=engine_kwargs
    )
    return "\n".join(check_arguments([config]).problems)


async def test_a_sleep_whose_caller_gives_up_ends_the_child():
    config = LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="process", engine_kwargs={"command": ["server"]}
    )
    engine: Any = ProcessEngine(config)
    closing, closed, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closing.set()
        await closed.wait()

    async def stop() -> None:
        stopped.set()

    engine._wire, engine._child = SimpleNamespace(close=close), SimpleNamespace(stop=stop)
    sleeping = asyncio.create_task(engine.sleep())
    await closing.wait()
    sleeping.cancel()
    asyncio.get_running_loop().call_soon(closed.set)
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert stopped.is_set()


@pytest.mark.parametrize("status", [200, 400])
async def test_an_adapter_that_goes_or_is_refused_at_the_wake_up_leaves_the_others(status: int):
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="process",
        engine_kwargs={"command": ["server"], "warm_up": False},
    )
    engine: Any = ProcessEngine(config)
    engine._adapters = {"a": Path("a"), "b": Path("b"), "c": Path("c")}
    loaded: list[str] = []

    async def get(path: str, limit_s: float) -> tuple[int, bytes]:
        return 200, b""

    async def post(path: str, value: Any) -> tuple[int, bytes]:
        loaded.append(value["lora_name"])
        engine._adapters.pop("b", None)  # as `unload_adapter` does at once
        return status if value["lora_name"] == "m:a" else 200, b"{}"

    async def listed(wire: Any, name: str) -> ModelCard:
        return ModelCard()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readiness, "card", listed)
        await engine._ready(SimpleNamespace(get=get, post=post), no_progress)
    assert loaded == ["m:a", "m:c"]
    assert engine.adapters() == ({"a", "c"} if status == 200 else {"c"})


class Piece(bytes):
    """Of an answer; counts the bytes that are copied to add it to others."""

    copied = 0

    def __radd__(self, before: bytes) -> bytes:
        Piece.copied += len(before) + len(self)
        return bytes(before) + bytes(self)


async def test_a_long_line_is_not_copied_with_each_piece_of_it():
    async def pieces() -> AsyncGenerator[bytes]:
        for text in [b"a\nb", *[b"x"] * 1000, b"c\nd"]:
            yield Piece(text)

    answer: Any = SimpleNamespace(content=SimpleNamespace(iter_any=pieces))
    assert [piece async for piece in lines(answer)] == [b"a\n", b"b" + b"x" * 1000 + b"c\n", b"d"]
    assert Piece.copied <= 2000


def test_a_placeholder_that_means_nothing_is_refused():
    said = problems(command=["server", "--port", "{prot}", '{"json": 1}'])
    assert "unknown placeholder 'prot'; did you mean 'port'" in said
    assert "--port" not in said


def test_a_command_is_wanted():
    assert "command" in problems()


def test_placeholders_are_filled_and_other_braces_stay():
    assert filled('{host}:{port} {"a": {}}', {"host": "h", "port": "1"}) == 'h:1 {"a": {}}'


def test_an_endpoint_that_the_server_has_switched_off_says_so():
    off = b'{"error": {"message": "Scale-out endpoints are disabled."}}'
    found = foreign.heard(off, 403)
    assert (found.status, str(found)) == (501, "Scale-out endpoints are disabled.")
